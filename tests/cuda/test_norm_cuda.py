"""Norms on a GPU with the CUDA kernels and Triton: compared with float64, in one read, in graphs."""

import math

import gpu
import pytest
import torch
from cases import GRADIENT_LAYOUTS, PAIRS, random_lists, random_tensor

from fusedacc import functional
from fusedacc.kernels import norms, registry

pytestmark = pytest.mark.cuda

NORM_TYPES = (2.0, math.inf)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(), (0, 3), (1,), (7,), (257,), (3, 4, 2), (2, 3, 4, 5), (300, 67), (8192,), (24581,), (100_003,)]


@pytest.fixture(params=["cuda", "triton"])
def backend(request):
    return gpu.needs(request.param)


def assert_is_norm(result, tensors, norm_type):
    """A thread adds at most 128 squares in float32, and a block adds 256 sums. The root halves the error."""
    values = torch.cat([tensor.double().flatten().cpu() for tensor in tensors])
    largest = values.abs().max()
    expected = largest if norm_type == math.inf else torch.linalg.vector_norm(values / largest) * largest
    single = any(tensor.dtype != torch.float64 for tensor in tensors)
    sums = (128 + 8 + 1) * torch.finfo(torch.float32 if single else torch.float64).eps / 4
    rounding = torch.finfo(result.dtype).eps / 2 + values.numel() * torch.finfo(torch.float64).eps
    allowed = rounding if norm_type == math.inf else rounding + sums
    assert (result.double().cpu() - expected).abs() <= expected * allowed


@pytest.mark.sweep
@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("layout", GRADIENT_LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_layout(dtype, layout, norm_type, backend, generator):
    tensors = [random_tensor(shape, dtype, generator, layout, "cuda") for shape in SHAPES]
    result = functional.total_norm(tensors, norm_type, backend=backend)
    assert result.device == tensors[0].device
    assert_is_norm(result, tensors, norm_type)
    assert torch.equal(result, functional.total_norm(tensors, norm_type, backend=backend))


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.float32, 1e30), (torch.float32, 1e-40), (torch.bfloat16, 1e-30), (torch.float64, 1e300)],
    ids=str,
)
def test_huge_and_tiny_values(dtype, value, norm_type, backend):
    tensors = [torch.full((9000,), value, dtype=dtype, device="cuda"), torch.ones(3, device="cuda") * 0]
    norm, nonfinite = norms.norm_and_nonfinite(tensors, norm_type, backend)
    assert nonfinite.item() == 0.0
    assert_is_norm(norm, [tensors[0]], norm_type)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inf_and_nan_are_found(dtype, norm_type, backend, generator):
    tensor = random_tensor((20001,), dtype, generator, device="cuda")
    for place in (0, 8191, 8192, 20000):
        for bad in (math.inf, -math.inf, math.nan):
            spoilt = tensor.clone()
            spoilt[place] = bad
            norm, nonfinite = norms.norm_and_nonfinite([tensor, spoilt], norm_type, backend)
            assert (nonfinite.item(), nonfinite.dtype) == (1.0, torch.float32)
            assert norm.isnan() if math.isnan(bad) else norm.item() == math.inf


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("sizes", [(1,), (32763, 0, 5), (32769,), (7, 100_000, 1, 8192)], ids=str)
def test_the_end_of_a_norm_of_many_partials(sizes, norm_type, generator):
    """If there are more than 32,768 partial norms, several blocks reduce them first."""
    partials = [torch.rand(size, generator=generator, dtype=torch.float64).cuda() for size in sizes]
    wanted = torch.linalg.vector_norm(torch.cat(partials), norm_type)
    for bad in (0.0, math.nan, math.inf):
        if bad:
            partials[-1][-1] = bad
        norm, nonfinite = torch.ops.fusedacc.finish_norm(partials, norm_type, True)
        assert nonfinite.item() == (1.0 if bad else 0.0)
        expected = torch.full_like(norm, bad) if bad else wanted
        torch.testing.assert_close(norm, expected, rtol=2.0**-46, atol=0.0, equal_nan=True)


def test_a_norm_needs_two_launches_and_waits_for_nothing(generator):
    sizes = [1 + index % 50 for index in range(900)]
    tensors = [random_tensor((size,), torch.float32, generator, device="cuda") for size in sizes]
    functional.total_norm(tensors, backend="cuda")

    def run():
        with gpu.nothing_waits():
            functional.total_norm(tensors, backend="cuda")

    assert len(found := gpu.launches(run)) == 2, found


def test_captured_in_a_graph(backend, generator):
    accumulators, gradients = random_lists(PAIRS[:4], [(5,), (9000,)], generator, device="cuda")
    scale = torch.tensor(0.5, device="cuda")
    run = registry.get(backend).prepare(accumulators)

    def step():
        run(gradients, scale, True)
        return norms.norm_and_nonfinite(accumulators, 2.0, backend)

    graph, (norm, nonfinite) = gpu.captured(step)
    for factor in (0.25, 3.0, math.inf):
        scale.fill_(factor)
        graph.replay()
        torch.cuda.synchronize()
        assert nonfinite.item() == (0.0 if factor < math.inf else 1.0)
        if factor < math.inf:
            assert_is_norm(norm, accumulators, 2.0)


def test_more_elements_than_32_bits_count(backend):
    count = 2**31 + 8192 + 5
    gpu.needs_memory(2 * count + 2**30)
    tensor = torch.ones(count, dtype=torch.bfloat16, device="cuda")
    tensor[-3:] = 2
    norm = functional.total_norm([tensor], backend=backend)
    assert norm.item() == pytest.approx(math.sqrt(count + 9))
    assert functional.total_norm([tensor], math.inf, backend=backend).item() == 2.0
