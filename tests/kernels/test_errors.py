"""Invalid calls: the error names the argument, the index and the reason, and nothing is modified."""

import pytest
import torch

from fusedacc import functional

GOOD = [((4,), torch.float32), ((2, 3), torch.bfloat16), ((5,), torch.float32)]


def good_lists():
    accumulators = [torch.full(shape, 2.0, dtype=dtype) for shape, dtype in GOOD]
    gradients = [torch.full(shape, 3.0) for shape, _ in GOOD]
    return accumulators, gradients


def assert_refused(accumulators, gradients, backend, error, message, **arguments):
    """Check that a call and a plan both raise the error."""
    with pytest.raises(error, match=message):
        functional.scale_accumulate_(accumulators, gradients, backend=backend, **arguments)
    with pytest.raises(error, match=message):
        functional.prepare(accumulators, backend=backend)(gradients, **arguments)


def vector(dtype=torch.float32):
    return torch.ones(5, dtype=dtype)


SUMS, FRESH = "accumulators", "gradients"
PAIR = r"gradients\[2\] is torch\.float64 and accumulators\[2\] is torch\.float32; allowed: .*float32"
#: The list, the invalid element at index 2 instead of a vector of 5, the error, and its message.
BAD_TENSORS = {
    "no tensor": (FRESH, [1.0] * 5, TypeError, r"gradients\[2\] is list, not a tensor"),
    "none": (FRESH, None, TypeError, r"gradients\[2\] is NoneType"),
    "sparse": (FRESH, vector().to_sparse(), TypeError, r"gradients\[2\] is sparse"),
    "complex": (FRESH, vector(torch.complex64), TypeError, r"\[2\] is complex"),
    "integer": (FRESH, vector(torch.int64), TypeError, r"\[2\].*torch\.int64.*allowed"),
    "bool": (FRESH, vector(torch.bool), TypeError, r"\[2\].*torch\.bool"),
    "dtype pair": (FRESH, vector(torch.float64), TypeError, PAIR),
    "float8": (FRESH, vector().to(torch.float8_e4m3fn), TypeError, r"\[2\].*float8"),
    "shape": (FRESH, torch.ones(6), ValueError, r"gradients\[2\] has shape \(6,\).*\[2\] has shape \(5,\)"),
    "dimensions": (FRESH, torch.ones(5, 1), ValueError, r"gradients\[2\] has shape \(5, 1\)"),
    "broadcast": (FRESH, torch.ones(()), ValueError, r"gradients\[2\] has shape \(\)"),
    "device": (FRESH, vector().to("meta"), ValueError, r"gradients\[2\] is on meta.*cpu"),
    "sparse sum": (SUMS, vector().to_sparse(), TypeError, r"accumulators\[2\] is sparse"),
    "integer sum": (SUMS, vector(torch.int32), TypeError, r"accumulators\[2\]"),
    "float8 sum": (SUMS, vector().to(torch.float8_e5m2), TypeError, r"\[2\] is torch\.float8_e5m2; allowed"),
    "expanded sum": (SUMS, torch.ones(1).expand(5), ValueError, r"\[2\] overlaps itself.*\(0,\)"),
    "folded sum": (SUMS, torch.ones(9).as_strided((5,), (0,)), ValueError, r"\[2\] overlaps itself"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_bad_tensors(case, cpu_backend):
    which, tensor, error, message = BAD_TENSORS[case]
    accumulators, gradients = good_lists()
    (accumulators if which == SUMS else gradients)[2] = tensor
    assert_refused(accumulators, gradients, cpu_backend, error, message)
    assert all(tensor.eq(2.0).all() for tensor in accumulators[:2])
    assert [tensor._version for tensor in accumulators[:2]] == [0, 0]


BAD_ARGUMENTS = {
    "scale string": ({"scale": "0.5"}, TypeError, r"scale is.*'0\.5'"),
    "scale complex": ({"scale": 1j}, TypeError, r"scale is 1j \(complex\)"),
    "scale none": ({"scale": None}, TypeError, r"scale is None"),
    "scale vector": ({"scale": torch.ones(1)}, ValueError, r"scale has shape \(1,\).*0-dim"),
    "scale integer": ({"scale": torch.tensor(2)}, TypeError, r"scale has dtype torch\.int64"),
    "scale device": ({"scale": torch.ones((), device="meta")}, ValueError, r"on meta.*accumulators\[0\]"),
    "too few flags": ({"overwrite": [True]}, ValueError, r"overwrite has 1 entries for 3 tensors"),
    "too many flags": ({"overwrite": [True] * 4}, ValueError, r"overwrite has 4 entries for 3 tensors"),
    "flag kind": ({"overwrite": [True, "no", False]}, TypeError, r"overwrite\[1\] is 'no'"),
    "flags kind": ({"overwrite": "yes"}, (TypeError, ValueError), r"overwrite"),
    "backend": ({"backend": "gpu"}, ValueError, r"'gpu' is no backend; allowed: 'auto', 'cuda', 'triton'"),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_arguments(case, cpu_backend):
    arguments, error, message = BAD_ARGUMENTS[case]
    accumulators, gradients = good_lists()
    given = {"backend": cpu_backend, **arguments}
    assert_refused(accumulators, gradients, error=error, message=message, **given)
    assert all(tensor.eq(2.0).all() for tensor in accumulators)


def test_counts_must_agree(cpu_backend):
    accumulators, gradients = good_lists()
    for fresh in (gradients[:2], [], [*gradients, torch.ones(1)]):
        message = f"3 accumulators, but {len(fresh)} gradients"
        assert_refused(accumulators, fresh, cpu_backend, ValueError, message)


def test_a_tensor_instead_of_a_list_is_refused(cpu_backend):
    for which in ("accumulators", "gradients"):
        lists = {"accumulators": [torch.ones(2)], "gradients": [torch.ones(2)], which: torch.ones(1, 2)}
        with pytest.raises(TypeError, match=f"{which} is Tensor; allowed: a list or tuple"):
            functional.scale_accumulate_(**lists, backend=cpu_backend)


def overlaps():
    room = torch.zeros(12)
    other = torch.ones(4)
    square = room[:9].view(3, 3)
    return {
        "one twice": ([room, other, room], None, r"accumulators\[0\] and accumulators\[2\] share memory"),
        "views": ([room[:5], other, room[4:]], None, r"accumulators\[0\] and accumulators\[2\]"),
        "interleaved": ([room[::2], room[1::2]], None, r"accumulators\[0\] and accumulators\[1\]"),
        "other dtype": ([room, room.view(torch.bfloat16)], None, r"accumulators\[0\] and accumulators\[1\]"),
        "shifted": ([room[1:9]], [room[:8]], r"gradients\[0\] shares memory with accumulators\[0\]"),
        "transposed": ([square], [square.t()], r"gradients\[0\] shares memory with accumulators\[0\]"),
        "of another": ([other, room[:4]], [room[4:8], room[2:6]], r"gradients\[1\].*accumulators\[1\]"),
        "exchanged": ([room[:4], room[4:8]], [room[4:8], room[:4]], r"gradients\[0\].*accumulators\[1\]"),
        "narrower": ([room[:6]], [room.view(torch.bfloat16)[:6]], r"gradients\[0\].*accumulators\[0\]"),
    }


@pytest.mark.parametrize("case", overlaps())
def test_overlap_is_refused(case, cpu_backend):
    accumulators, gradients, message = overlaps()[case]
    gradients = [torch.ones_like(tensor) for tensor in accumulators] if gradients is None else gradients
    before = [tensor.clone() for tensor in accumulators]
    assert_refused(accumulators, gradients, cpu_backend, ValueError, message)
    assert all(map(torch.equal, accumulators, before))


def test_neighbours_and_shared_gradients_are_allowed(cpu_backend):
    room = torch.zeros(12)
    gradient = torch.ones(4)
    accumulators = [room[8:], room[:4], room[4:8], room[4:4]]
    functional.scale_accumulate_(accumulators, [*[gradient] * 3, gradient[:0]], backend=cpu_backend)
    assert room.eq(1).all()


def test_gradient_count_is_checked_before_the_first_part_runs():
    # Each device is one part: an invalid last gradient must also stop the first part.
    accumulators = [torch.zeros(3), torch.zeros(3, device="meta"), torch.zeros(3)]
    gradients = [torch.ones(3), torch.ones(3, device="meta"), torch.ones(4)]
    assert_refused(accumulators, gradients, "auto", ValueError, r"gradients\[2\] has shape \(4,\)")
    assert accumulators[0].eq(0).all()
