"""Products into sums on a GPU, which PyTorch computes: compared with float64, in place, without waiting."""

import itertools

import pytest
import torch
from cases import PAIR_IDS
from gemm_cases import (
    GEMM_PAIRS,
    NAN,
    OPERAND_LAYOUTS,
    SHAPES,
    SUM_LAYOUTS,
    TF32_UNIT,
    assert_is_product,
    float32_setting,
    lay_out_sum,
    matrices,
)
from gpu import captured, needs_memory, nothing_waits, on_gpu, side_stream

from fusedacc.kernels import matmul
from fusedacc.kernels.matmul import gemm_accumulate_
from fusedacc.traffic import TrafficMeter

pytestmark = pytest.mark.cuda

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def run(tensors, scale=1.0, beta=1.0, unit=None):
    accumulator, left, right = tensors
    before = accumulator.clone()
    gemm_accumulate_(accumulator, left, right, scale, beta)
    assert_is_product(accumulator, before, left, right, scale, beta, unit=unit)


@pytest.mark.sweep
@pytest.mark.parametrize("pair", GEMM_PAIRS, ids=PAIR_IDS)
@pytest.mark.parametrize("shape", [*SHAPES, (256, 384, 512)], ids=str)
def test_every_pair_shape_and_number(pair, shape, generator):
    scales = (1.0, -0.3, on_gpu(0.7), on_gpu(0.7, F64), on_gpu(0.5, BF16), 0.3, on_gpu(0.3))
    betas = (1.0, 0.0, 0.25, on_gpu(0.25), on_gpu(0.0), on_gpu(0.25, F64), 0.0)
    for scale, beta in zip(scales, betas, strict=True):
        run(matrices(pair, shape, generator, device="cuda"), scale, beta)


@pytest.mark.parametrize("pair", GEMM_PAIRS, ids=PAIR_IDS)
@pytest.mark.parametrize("sum_layout", SUM_LAYOUTS)
def test_every_layout(pair, sum_layout, generator):
    for left, right in itertools.product(OPERAND_LAYOUTS, OPERAND_LAYOUTS):
        for shape in ((5, 7, 3), (1, 6, 4), (6, 1, 4), (3, 4, 1)):
            run(matrices(pair, shape, generator, (sum_layout, left, right), device="cuda"), 0.3, 0.5)


@pytest.mark.parametrize("pair", GEMM_PAIRS, ids=PAIR_IDS)
@pytest.mark.parametrize("on_device", ["neither", "scale", "beta", "both"])
def test_with_beta_zero_the_old_sum_is_not_read(pair, on_device, generator):
    scale = on_gpu(0.5) if on_device in ("scale", "both") else 0.5
    beta = on_gpu(0.0) if on_device in ("beta", "both") else 0.0
    for shape in ((5, 7, 3), (6, 5, 0), (256, 384, 512), (64, 64, 8192)):
        accumulator, left, right = matrices(pair, shape, generator, device="cuda")
        accumulator.fill_(NAN)
        gemm_accumulate_(accumulator, left, right, scale, beta)
        assert_is_product(accumulator, torch.zeros_like(accumulator), left, right, 0.5)


def test_pytorchs_setting_allows_tf32(generator):
    errors = {}
    accumulator, left, right = matrices((F32, F32), (256, 256, 256), generator, device="cuda")
    exact = accumulator.double() + left.double().t() @ right.double()
    for tf32 in (False, True):
        result = accumulator.clone()
        with float32_setting("allow_tf32", tf32):
            gemm_accumulate_(result, left, right)
        assert_is_product(result, accumulator, left, right, unit=TF32_UNIT if tf32 else None)
        errors[tf32] = (result.double() - exact).abs().max()
    if torch.cuda.get_device_capability() >= (8, 0):
        assert errors[True] > 4 * errors[False]


@pytest.mark.parametrize("pair", GEMM_PAIRS, ids=PAIR_IDS)
def test_the_same_bits_on_every_run(pair, generator):
    accumulator, left, right = matrices(pair, (768, 512, 1024), generator, device="cuda")
    first = accumulator.clone()
    gemm_accumulate_(first, left, right, on_gpu(0.3))
    for _ in range(3):
        again = accumulator.clone()
        gemm_accumulate_(again, left, right, on_gpu(0.3))
        assert torch.equal(again, first)


@pytest.mark.parametrize("pair", GEMM_PAIRS, ids=PAIR_IDS)
def test_nothing_waits_for_the_device(pair, generator):
    accumulator, left, right = matrices(pair, (64, 32, 16), generator, device="cuda")
    scale, beta = on_gpu(0.5), on_gpu(0.5)
    gemm_accumulate_(accumulator, left, right, scale, beta)
    with nothing_waits():
        gemm_accumulate_(accumulator, left, right, 0.5, 0.0)
        gemm_accumulate_(accumulator, left, right, scale, beta)


@pytest.mark.parametrize("pair", GEMM_PAIRS, ids=PAIR_IDS)
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_no_allocation_is_as_large_as_the_sum(pair, layout):
    accumulator = lay_out_sum(torch.zeros(4096, 4096, dtype=pair[1], device="cuda"), layout)
    left, right = (torch.ones(8, 4096, dtype=pair[0], device="cuda") for _ in range(2))
    for scale, beta in ((1.0, 1.0), (0.3, 0.0), (on_gpu(0.3), on_gpu(0.5))):
        gemm_accumulate_(accumulator, left, right, scale, beta)  # cuBLAS's workspace stays
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gemm_accumulate_(accumulator, left, right, scale, beta)
        assert torch.cuda.max_memory_allocated() - before < accumulator.nbytes


@pytest.mark.parametrize("pair", [(BF16, F32), (F32, F32), (BF16, BF16)], ids=str)
def test_in_a_graph(pair, generator):
    accumulator, left, right = matrices(pair, (64, 32, 16), generator, device="cuda")
    scale, beta = on_gpu(0.5), on_gpu(1.0)
    before = accumulator.clone()
    graph, _ = captured(lambda: gemm_accumulate_(accumulator, left, right, scale, beta))
    for value, part in ((0.25, 1.0), (2.0, 0.5)):
        accumulator.copy_(before)
        scale.fill_(value)
        beta.fill_(part)
        graph.replay()
        assert_is_product(accumulator, before, left, right, value, part)


def test_on_the_current_stream(generator):
    accumulator, left, right = matrices((BF16, F32), (64, 32, 16), generator, device="cuda")
    before = accumulator.clone()
    with side_stream():
        torch.cuda._sleep(20_000_000)
        left.mul_(2)
        gemm_accumulate_(accumulator, left, right, on_gpu(0.5))
    assert_is_product(accumulator, before, left, right, 0.5)


@pytest.mark.parametrize("pair", [(BF16, F32), (F32, F32), (F64, F64)], ids=str)
def test_bytes(pair, generator):
    # The first call checks PyTorch's abilities.
    gemm_accumulate_(*matrices(pair, (1, 1, 1), generator, device="cuda"))
    accumulator, left, right = matrices(pair, (64, 32, 16), generator, device="cuda")
    for beta, passes in ((1.0, 2), (0.0, 1)):
        with TrafficMeter() as meter:
            gemm_accumulate_(accumulator, left, right, 0.5, beta)
        assert not meter.uncounted
        assert meter.total_bytes == left.nbytes + right.nbytes + passes * accumulator.nbytes


def test_selection():
    device = torch.device("cuda", 0)
    assert matmul.select(device, F32, BF16, tokens=5).name == "eager"
    asked = matmul.select(device, F32, BF16, "cuda", tokens=5)
    assert asked.name == "eager"
    assert asked.reason == "chosen by backend='cuda', which has no kernel for products"


def test_a_sum_that_32_bits_cannot_index():
    rows = 46_400  # squared more than 2**31
    needs_memory(2 * 4 * rows * rows)
    accumulator = torch.zeros(rows, rows, device="cuda")
    left, right = (torch.ones(2, rows, dtype=BF16, device="cuda") for _ in range(2))
    left[1, -1] = 3
    gemm_accumulate_(accumulator, left, right, 0.5)
    assert accumulator[-1].eq(2).all()
    assert accumulator[:-1].eq(1).all()
