"""The total norm on a CPU with every backend that can run here: its value, its flag, its determinism."""

import itertools
import math

import pytest
import torch
from cases import GRADIENT_LAYOUTS, PAIR_IDS, PAIRS, copies, lay_out, random_tensor
from loops import NoHostRead

from fusedacc import functional
from fusedacc.distributed import mesh_norm
from fusedacc.kernels import norms, reference, registry
from fusedacc.kernels.dtypes import computation_dtype

INF, NAN = math.inf, math.nan
NORM_TYPES = (2.0, INF)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Sizes around the widths of vector registers, of a group, of a block and of both kinds of chunks.
SHAPES = [(), (0,), (1,), (7,), (3, 5), (4, 0, 2), (2, 3, 4, 5), (1025,), (8192,), (8193,), (16385,)]


def exact(tensors, norm_type):
    """Return the norm in float64, scaled by the largest magnitude so that squares do not overflow."""
    values = torch.cat([tensor.detach().double().flatten() for tensor in tensors])
    largest = values.abs().max() if values.numel() else torch.tensor(0.0, dtype=torch.float64)
    if norm_type == INF or not 0 < largest < INF:
        return largest
    return torch.linalg.vector_norm(values / largest) * largest


def tolerance(tensors, norm_type, result):
    """Return the relative tolerance.

    It covers the rounding of the result and of the reference. For sums in float32 it also covers one rounding
    for each element of a lane and for each join (at most 512 + 10), and one for a square. The root halves it.
    """
    rounding = torch.finfo(result.dtype).eps / 2
    if norm_type == INF:
        return rounding
    single = any(tensor.dtype != torch.float64 for tensor in tensors)
    sums = 523 * torch.finfo(torch.float32 if single else torch.float64).eps / 4
    elements = sum(tensor.numel() for tensor in tensors)
    return rounding + sums + elements * torch.finfo(torch.float64).eps


def assert_is_norm(result, tensors, norm_type):
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    assert result.dtype == (torch.float64 if wide else torch.float32)
    assert result.shape == ()
    expected = exact(tensors, norm_type)
    subnormal = torch.finfo(result.dtype).smallest_normal * torch.finfo(result.dtype).eps
    error = (result.double() - expected).abs()
    assert error <= expected * tolerance(tensors, norm_type, result) + subnormal, (result, expected)


@pytest.mark.sweep
@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("layout", GRADIENT_LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_layout(dtype, layout, norm_type, cpu_backend, generator):
    tensors = [random_tensor(shape, dtype, generator, layout) for shape in SHAPES]
    before = copies(tensors)
    result = functional.total_norm(tensors, norm_type, backend=cpu_backend)
    assert_is_norm(result, tensors, norm_type)
    assert all(map(torch.equal, tensors, before))
    for tensor in tensors[-4:]:
        assert_is_norm(functional.total_norm([tensor], norm_type, backend=cpu_backend), [tensor], norm_type)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_mixed_dtypes(norm_type, cpu_backend, generator):
    for dtypes in (DTYPES, DTYPES[1:], DTYPES[2:]):
        tensors = [random_tensor((999,), dtype, generator) * 10**place for place, dtype in enumerate(dtypes)]
        assert_is_norm(functional.total_norm(tensors, norm_type, backend=cpu_backend), tensors, norm_type)


def extremes():
    for dtype in DTYPES:
        limits = torch.finfo(dtype)
        smallest = limits.smallest_normal * limits.eps
        for value in (limits.max, limits.max / 1000, limits.smallest_normal, smallest, 7 * smallest):
            yield dtype, value
    # Where squares begin to leave the range of float32, and of float64.
    yield from ((torch.float32, 10.0**power) for power in (-25, -22, -19, -16, 17, 18, 19, 30))
    yield from ((torch.bfloat16, 10.0**power) for power in (-25, -19, -16, 17, 19, 30))
    yield from ((torch.float64, 10.0**power) for power in (-170, -150, -140, 150, 154, 300))


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # from numpy in Triton's interpreter
@pytest.mark.parametrize(("dtype", "value"), list(extremes()), ids=str)
def test_huge_and_tiny_values(dtype, value, cpu_backend):
    alone = torch.tensor([value], dtype=dtype)
    spread = torch.zeros(9000, dtype=dtype)
    spread[::7] = -value / 64 if value > 1 else value
    spread[8500] = value
    for tensors in ([alone], [torch.zeros(50, dtype=dtype), spread, alone]):
        for norm_type in NORM_TYPES:
            norm, nonfinite = norms.norm_and_nonfinite(tensors, norm_type, cpu_backend)
            assert nonfinite.item() == 0.0
            expected = exact(tensors, norm_type)
            if expected > torch.finfo(norm.dtype).max:
                assert norm.item() == INF or norm.dtype == torch.float64
            else:
                assert_is_norm(norm, tensors, norm_type)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # from numpy in Triton's interpreter
@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inf_and_nan_are_found_wherever_they_are(dtype, norm_type, cpu_backend, generator):
    tensors = [random_tensor((size,), dtype, generator) for size in (5, 1, 9001)]
    tensors.append(random_tensor((7, 90), dtype, generator, "transposed"))
    norm, nonfinite = norms.norm_and_nonfinite(tensors, norm_type, cpu_backend)
    assert nonfinite.dtype == torch.float32
    assert (nonfinite.shape, nonfinite.item()) == ((), 0.0)
    places = ((0, 4), (1, 0), (2, 0), (2, 8191), (2, 8192), (2, 9000), (3, 300))
    for (tensor, place), bad in zip(places, itertools.cycle((INF, -INF, NAN)), strict=False):
        spoilt = list(tensors)
        flat = tensors[tensor].flatten().clone()
        flat[place] = bad
        spoilt[tensor] = lay_out(flat.view(tensors[tensor].shape), "transposed")
        norm, nonfinite = norms.norm_and_nonfinite(spoilt, norm_type, cpu_backend)
        assert nonfinite.item() == 1.0
        assert norm.isnan() if math.isnan(bad) else norm.item() == INF
    both = torch.tensor([INF, NAN, -INF], dtype=dtype)
    assert functional.total_norm([both, *tensors], norm_type, backend=cpu_backend).isnan()


def test_the_norm_of_no_elements_is_zero(cpu_backend):
    for norm_type in NORM_TYPES:
        for tensors in ([], [torch.zeros(0)], [torch.zeros(0, 3), torch.zeros(4, 0)], [torch.zeros(9)]):
            norm, nonfinite = norms.norm_and_nonfinite(tensors, norm_type, cpu_backend)
            assert (norm.item(), nonfinite.item(), norm.dtype) == (0.0, 0.0, torch.float32)
        empty = functional.total_norm([torch.zeros(0, dtype=torch.float64)], norm_type, backend=cpu_backend)
        assert (empty.item(), empty.dtype) == (0.0, torch.float64)


def test_the_host_reads_nothing(cpu_backend, generator):
    if cpu_backend == "triton":
        pytest.skip("the interpreter reads everything")
    tensors = [random_tensor((9000,), dtype, generator) for dtype in DTYPES]
    for norm_type in NORM_TYPES:
        with NoHostRead():
            norm, nonfinite = norms.norm_and_nonfinite(tensors, norm_type, cpu_backend)
            total = functional.total_norm(tensors, norm_type, backend=cpu_backend)
        assert torch.equal(norm, total)
        assert nonfinite == 0


def test_autograd_records_nothing(cpu_backend):
    leaf = torch.ones(4, requires_grad=True)
    result = functional.total_norm([leaf, leaf * 2], backend=cpu_backend)
    assert not result.requires_grad
    assert result.item() == pytest.approx(math.sqrt(20))
    assert leaf._version == 0


BAD = {
    "no list": (lambda: torch.ones(3), TypeError, "tensors is Tensor; allowed: a list or tuple"),
    "no tensor": (lambda: [torch.ones(3), 2.0], TypeError, r"tensors\[1\] is float, not a tensor"),
    "none": (lambda: [None], TypeError, r"tensors\[0\] is NoneType"),
    "sparse": (lambda: [torch.ones(3).to_sparse()], TypeError, r"tensors\[0\] is sparse"),
    "integer": (lambda: [torch.ones(3).int()], TypeError, r"tensors\[0\].*int32.*allowed: float64, float32"),
    "complex": (lambda: [torch.ones(3) * 1j], TypeError, r"tensors\[0\] is complex"),
    "float8": (lambda: [torch.ones(3).to(torch.float8_e5m2)], TypeError, r"\[0\].*float8.*allowed: float64"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_tensors(case, cpu_backend):
    make, error, message = BAD[case]
    with pytest.raises(error, match=message):
        functional.total_norm(make(), backend=cpu_backend)


@pytest.mark.sweep
@pytest.mark.parametrize("norm_type", [1, 0.0, -2.0, NAN, -INF, "inf", None, 2j, torch.tensor(2.0)])
def test_other_norms_are_refused(norm_type, cpu_backend):
    with pytest.raises(ValueError, match=r"norm_type is .*; allowed: 2\.0 and inf"):
        functional.total_norm([torch.ones(3)], norm_type, backend=cpu_backend)


@pytest.mark.parametrize("norm_type", [1.0, 0.0, -INF, NAN])
def test_each_function_of_a_backend_refuses_other_norms(norm_type, cpu_backend):
    """The check in the public function is not the only one."""
    backend, ones = registry.get(cpu_backend), [torch.ones(3)]
    partials = [torch.ones(3, dtype=torch.float64)]
    for call in (
        lambda: backend.norm_partials(ones, norm_type),
        lambda: backend.finish_norm(partials, norm_type, torch.float32),
    ):
        with pytest.raises((ValueError, RuntimeError), match=r"norm_type is .*; allowed: 2"):
            call()


def test_each_part_refuses_other_norms():
    vector = torch.ones(3, dtype=torch.float64)
    triton = pytest.importorskip("fusedacc.kernels.triton.backend")
    for call in (
        lambda: reference.norm_partials([vector], 1.0),
        lambda: reference.finish_norm([vector], 1.0, torch.float64),
        lambda: triton._finish_norm([vector], 1.0, torch.float64),
        lambda: mesh_norm._over_mesh(None, [(0,)], vector, 1.0),
    ):
        with pytest.raises(ValueError, match=r"norm_type is 1\.0; allowed: 2\.0 and inf"):
            call()


# scale_cast_


@pytest.mark.sweep
@pytest.mark.parametrize("pair", PAIRS, ids=PAIR_IDS)
def test_scale_cast(pair, cpu_backend, generator):
    shapes = SHAPES[:8] if cpu_backend == "triton" else SHAPES
    inputs = [random_tensor(shape, pair[0], generator) for shape in shapes]
    for scale in (0.37, torch.tensor(-1.7, dtype=torch.float64)):
        outputs = [torch.full(tensor.shape, NAN, dtype=pair[1]) for tensor in inputs]
        versions = [tensor._version for tensor in outputs]
        functional.scale_cast_(outputs, inputs, scale, backend=cpu_backend)
        wide = computation_dtype(pair[1])
        factor = torch.as_tensor(scale, dtype=torch.float64).to(wide)
        for output, tensor, version in zip(outputs, inputs, versions, strict=True):
            assert torch.equal(output, (tensor.to(wide) * factor).to(pair[1]))
            assert output._version > version
        same = [tensor.clone() for tensor in inputs]
        functional.scale_cast_(same, same, scale, backend=cpu_backend)


def test_errors_of_scale_cast_name_its_arguments(cpu_backend):
    room = torch.ones(8)
    for outputs, inputs, error, message in (
        ([torch.ones(3)], [torch.ones(4)], ValueError, r"inputs\[0\] has shape \(4,\), but outputs\[0\]"),
        ([torch.ones(3)], [], ValueError, "1 outputs, but 0 inputs"),
        ([torch.ones(3).int()], [torch.ones(3)], TypeError, r"outputs\[0\]"),
        ([room[:4]], [room[1:5]], ValueError, r"inputs\[0\] shares .* outputs\[0\]; an input may be"),
    ):
        with pytest.raises(error, match=message):
            functional.scale_cast_(outputs, inputs, 0.5, backend=cpu_backend)
