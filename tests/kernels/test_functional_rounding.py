"""The list-level API with rounding="stochastic": all backends give the same bits; errors."""

import pytest
import rounding_oracle
import torch
from torch import Tensor

from fusedacc import functional
from fusedacc.kernels.rounding import stream_of

LOW = torch.bfloat16
SHAPES = [(), (0,), (7,), (3, 5), (1030,)]
MOST_SEED, MOST_OFFSET = 2**63 - 1, 2**31 - 1
STOCHASTIC = {"rounding": "stochastic", "seed": 3}


def lists(generator: torch.Generator, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    """Return sums and gradients. The last sum is transposed."""
    sums, gradients = (
        [torch.randn(shape, generator=generator).to(each) for shape in (*SHAPES, (4, 6))]
        for each in (LOW, dtype)
    )
    return [[*sums[:-1], sums[-1].view(6, 4).t()], gradients]


def copies(tensors: list[Tensor]) -> list[Tensor]:
    """Return copies with the same strides, because the bits depend on the position in memory."""
    return [tensor.clone() for tensor in tensors]


def equal(mine: list[Tensor], others: list[Tensor]) -> bool:
    return all(map(torch.equal, mine, others))


@pytest.mark.parametrize("dtype", [LOW, torch.float32])
@pytest.mark.parametrize("overwrite", [False, True, "some"])
def test_each_sum_is_rounded_once_with_its_own_bits(dtype, overwrite, cpu_backend, generator):
    sums, gradients = lists(generator, dtype)
    flags = [index % 2 == 0 for index in range(len(sums))] if overwrite == "some" else overwrite
    written = flags if isinstance(flags, list) else [flags] * len(sums)
    wanted = [
        (0.0 if new else old.float()) + 0.375 * gradient.float()
        for old, gradient, new in zip(sums, gradients, written, strict=True)
    ]
    functional.scale_accumulate_(
        sums, gradients, 0.375, overwrite=flags, offset=9, backend=cpu_backend, **STOCHASTIC
    )
    for index, (found, exact) in enumerate(zip(sums, wanted, strict=True)):
        bits = rounding_oracle.expected(exact, found, 3, stream_of(index, 9))
        assert rounding_oracle.patterns(found) == bits, index


def test_a_plan_counts_its_additions(cpu_backend, generator):
    sums, gradients = lists(generator)
    others, again = copies(sums), copies(sums)
    plan = functional.prepare(sums, offset=4, backend=cpu_backend, **STOCHASTIC)
    for number, wanted in ((None, 4), (None, 5), (20, 20), (None, 21)):
        before = plan.offset
        plan(gradients, 0.3, offset=number)
        functional.scale_accumulate_(others, gradients, 0.3, offset=wanted, backend=cpu_backend, **STOCHASTIC)
        assert equal(sums, others), number
        assert before <= wanted
        assert plan.offset == wanted + 1
    for _ in range(2):  # with the same offset the errors are the same
        functional.scale_accumulate_(again, gradients, 0.3, backend=cpu_backend, **STOCHASTIC)
    assert not equal(again, others)


def test_the_number_of_threads_changes_no_bit(generator, threads):
    gradient = torch.randn(1 << 18, generator=generator)
    found = [torch.ones(1 << 18, dtype=LOW) for _ in range(2)]
    for count, total in enumerate(found, 1):
        threads(count)
        functional.scale_accumulate_([total], [gradient], 1e-3, **STOCHASTIC)
    assert torch.equal(*found)


@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_under_the_compiler(backend, generator):
    sums, gradients = lists(generator)
    plain = copies(sums)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(accumulators: list[Tensor], terms: list[Tensor]) -> None:
        functional.scale_accumulate_(accumulators, terms, 0.3, offset=6, backend=backend, **STOCHASTIC)

    compiled(sums, gradients)
    functional.scale_accumulate_(plain, gradients, 0.3, offset=6, backend=backend, **STOCHASTIC)
    assert equal(sums, plain)


SEEDS, OFFSETS = rf"allowed: 0 to {MOST_SEED}", rf"allowed: 0 to {MOST_OFFSET}"
BAD = {
    "rounding": ({"rounding": "up"}, ValueError, r"rounding is 'up'; allowed: 'nearest', 'stochastic'"),
    "no rounding": ({"rounding": None}, ValueError, r"rounding is None; allowed"),
    "rounding of a kind that has no hash": ({"rounding": []}, ValueError, r"rounding is \[\]; allowed"),
    "float seed": ({"seed": 1.0}, TypeError, r"seed is 1\.0 \(float\); allowed: an int from 0"),
    "bool seed": ({"seed": True}, TypeError, r"seed is True \(bool\); allowed"),
    "tensor seed": ({"seed": torch.tensor(1)}, TypeError, r"seed is tensor.* allowed"),
    "negative seed": ({"seed": -1}, ValueError, f"seed is -1; {SEEDS}"),
    "large seed": ({"seed": 2**63}, ValueError, f"seed is {2**63}; {SEEDS}"),
    "str offset": ({"offset": "1"}, TypeError, r"offset is '1' \(str\); allowed: an int from 0"),
    "bool offset": ({"offset": False}, TypeError, r"offset is False \(bool\); allowed"),
    "negative offset": ({"offset": -2}, ValueError, f"offset is -2; {OFFSETS}"),
    "large offset": ({"offset": 2**31}, ValueError, f"offset is {2**31}; {OFFSETS}"),
    "unused seed": (
        {"rounding": "nearest"},
        ValueError,
        r"seed is 3, but rounding='nearest' takes no random bits; allowed",
    ),
    "unused offset": (
        {"rounding": "nearest", "seed": None, "offset": 0},
        ValueError,
        r"offset is 0, but rounding='nearest' .*; allowed: None",
    ),
}


@pytest.mark.parametrize("call", [functional.scale_accumulate_, functional.prepare])
@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_refused_before_anything_is_written(case, call, cpu_backend, generator):
    arguments, kind, said = BAD[case]
    sums, gradients = lists(generator)
    before = copies(sums)
    given = (sums, gradients) if call == functional.scale_accumulate_ else (sums,)
    with pytest.raises(kind, match=said):
        call(*given, backend=cpu_backend, **(STOCHASTIC | arguments))
    assert equal(sums, before)


@pytest.mark.parametrize("call", [functional.scale_accumulate_, functional.prepare])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_sums_of_other_dtypes_are_refused(dtype, call, cpu_backend):
    sums = [torch.ones(3, dtype=LOW), torch.ones(3, dtype=dtype)]
    before, gradients = copies(sums), [torch.ones_like(each) for each in sums]
    given = (sums, gradients) if call == functional.scale_accumulate_ else (sums,)
    with pytest.raises(TypeError, match=rf"accumulators\[1\] is {dtype}, but .* sums of torch\.bfloat16"):
        call(*given, backend=cpu_backend, **STOCHASTIC)
    assert equal(sums, before)


@pytest.mark.parametrize(
    ("offset", "kind", "said"),
    [
        (1, ValueError, "offset is 1; allowed: 2 and above, since"),
        (2.0, TypeError, r"offset is 2\.0 \(float\); allowed"),
        (2**31, ValueError, "allowed: 0 to"),
    ],
)
def test_a_plan_refuses_used_offsets(offset, kind, said, cpu_backend):
    sums, gradients = [torch.ones(5, dtype=LOW)], [torch.full((5,), 1e-3)]
    plan = functional.prepare(sums, backend=cpu_backend, **STOCHASTIC)
    plan(gradients), plan(gradients)
    before = copies(sums)
    with pytest.raises(kind, match=said):
        plan(gradients, offset=offset)
    with pytest.raises(ValueError, match=r"gradients\[0\] has shape"):
        plan([torch.ones(6)])
    assert equal(sums, before)
    assert plan.offset == 2


def test_a_plan_that_rounds_to_nearest_takes_no_offset(cpu_backend):
    sums = [torch.ones(5, dtype=LOW)]
    plan = functional.prepare(sums, backend=cpu_backend)
    assert plan.offset is None
    with pytest.raises(ValueError, match="offset is 3, but this plan rounds to nearest; allowed: None"):
        plan([torch.ones(5)], offset=3)
    assert sums[0].tolist() == [1.0] * 5


def test_a_parameter_list_is_refused():
    given = torch.nn.ParameterList([torch.ones(4, dtype=LOW)])
    for call, *others in ((functional.scale_accumulate_, [torch.ones(4)]), (functional.prepare,)):
        with pytest.raises(TypeError, match=r"accumulators is ParameterList; allowed: a list or tuple"):
            call(given, *others, **STOCHASTIC)
