"""Grouped products with Triton on a GPU: compared with float64, without waiting, beyond 2^31 elements."""

import functools
import itertools

import pytest
import torch
from cases import PAIR_IDS, PAIRS
from gemm_cases import NAN, OPERAND_LAYOUTS, TF32_UNIT, float32_setting
from gpu import captured, needs, needs_memory, nothing_waits, on_gpu, side_stream
from grouped_cases import (
    COUNTS,
    SHAPES,
    SUM_LAYOUTS,
    assert_adds,
    assert_are_products,
    assert_gaps_stay,
    assert_idle_experts_stay,
    assert_written_unread,
    groups,
    offsets_of,
)

from fusedacc.kernels.triton.backend import grouped_accumulate_

pytestmark = pytest.mark.cuda

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
#: Shapes, and tokens of experts as a layer has them; in the second no width is a multiple of 16 bytes.
LARGE = (((512, 768), (0, 700, 1, 0, 333, 2048)), ((333, 451), (129, 0, 500)))


@pytest.fixture(autouse=True)
def _triton_runs():
    needs("triton")


def make(pair, shape, counts, generator, layouts=("rows", "rows", "rows")):
    return groups(pair, shape, counts, generator, layouts, "cuda")


run = functools.partial(assert_adds, grouped_accumulate_)


@pytest.mark.sweep
@pytest.mark.parametrize("pair", PAIRS, ids=PAIR_IDS)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_pair_and_shape(pair, counts, shape, generator):
    """Triton compiles each dtype, stride and kind of number separately, so use few of them."""
    for scale, beta in ((-0.3, 1.0), (on_gpu(0.7), on_gpu(0.25))):
        run(make(pair, shape, counts, generator), scale, beta)


@pytest.mark.parametrize("pair", PAIRS, ids=PAIR_IDS)
@pytest.mark.parametrize("large", LARGE, ids=["even", "odd"])
def test_every_number(pair, large, generator):
    scales = (1.0, 0.3, on_gpu(0.7), on_gpu(0.7, F64), on_gpu(0.5, BF16), 0.3)
    betas = (1.0, 0.0, 0.25, on_gpu(0.25), on_gpu(0.0), on_gpu(1.0, F16))
    for scale, beta in zip(scales, betas, strict=True):
        run(make(pair, *large, generator), scale, beta)


@pytest.mark.parametrize("pair", [(BF16, F32), (F32, F32), (F32, F16)], ids=str)
@pytest.mark.parametrize("layout", SUM_LAYOUTS)
def test_every_layout(pair, layout, generator):
    for layouts in itertools.product([layout], OPERAND_LAYOUTS, OPERAND_LAYOUTS):
        for shape, counts in (((5, 7), (3, 0, 2)), ((96, 160), (70, 0, 31))):
            run(make(pair, shape, counts, generator, layouts), 0.3, 0.5)


@pytest.mark.parametrize("layout", ["long rows", "long columns"])
def test_memory_between_rows_is_not_written(layout, generator):
    assert_gaps_stay(grouped_accumulate_, layout, generator, "cuda")


@pytest.mark.parametrize("pair", PAIRS, ids=PAIR_IDS)
@pytest.mark.parametrize("on_device", [False, True])
def test_with_beta_zero_sums_are_written_and_not_read(pair, on_device, generator):
    for case in (((66, 34), (0, 7, 0, 40)), LARGE[0]):
        beta = on_gpu(0.0) if on_device else 0.0
        assert_written_unread(grouped_accumulate_, make(pair, *case, generator), beta)


@pytest.mark.parametrize("on_device", [False, True])
def test_with_beta_one_experts_without_rows_keep_their_bits(on_device, generator):
    beta = on_gpu(1.0) if on_device else 1.0
    assert_idle_experts_stay(grouped_accumulate_, NAN, beta, generator, "cuda")


@pytest.mark.parametrize("pair", PAIRS, ids=PAIR_IDS)
def test_the_same_bits_on_every_run(pair, generator):
    accumulator, *others = make(pair, *LARGE[0], generator)
    first = accumulator.clone()
    grouped_accumulate_(first, *others, on_gpu(0.3), 1.0)
    for _ in range(3):
        again = accumulator.clone()
        grouped_accumulate_(again, *others, on_gpu(0.3), 1.0)
        assert torch.equal(again, first)


@pytest.mark.parametrize("pair", PAIRS, ids=PAIR_IDS)
def test_nothing_waits_for_the_device_and_nothing_large_is_allocated(pair, generator):
    tensors = make(pair, *LARGE[0], generator)
    numbers = ((1.0, 1.0), (0.5, 0.0), (on_gpu(0.5), on_gpu(0.5)))
    for scale, beta in numbers:
        grouped_accumulate_(*tensors, scale, beta)  # is compiled
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with nothing_waits():
        for scale, beta in numbers:
            grouped_accumulate_(*tensors, scale, beta)
    assert torch.cuda.max_memory_allocated() - before <= 2048


def test_pytorchs_setting_allows_tf32(generator):
    errors = {}
    accumulator, left, right, offsets = make((F32, F32), (256, 320), (256, 300), generator)
    for tf32 in (False, True):
        result, unit = accumulator.clone(), TF32_UNIT if tf32 else None
        with float32_setting("allow_tf32", tf32):
            grouped_accumulate_(result, left, right, offsets, 1.0, 1.0)
        assert_are_products(result, accumulator, left, right, offsets, unit=unit)
        exact = accumulator[0].double() + left[:256].double().t() @ right[:256].double()
        errors[tf32] = (result[0].double() - exact).abs().max()
    if torch.version.hip is None:
        assert errors[True] > 4 * errors[False]


@pytest.mark.parametrize("pair", [(BF16, F32), (F32, F32), (F64, F64)], ids=str)
def test_in_a_graph(pair, generator):
    """Each replay reads the current numbers and offsets."""
    accumulator, left, right, offsets = make(pair, (96, 64), (20, 0, 44), generator)
    scale, beta, before = on_gpu(0.5), on_gpu(1.0), accumulator.clone()
    graph, _ = captured(lambda: grouped_accumulate_(accumulator, left, right, offsets, scale, beta))
    for value, part, counts in ((0.25, 1.0, (20, 0, 44)), (2.0, 0.5, (0, 33, 31)), (1.0, 0.0, (64, 0, 0))):
        accumulator.copy_(before)
        scale.fill_(value)
        beta.fill_(part)
        offsets.copy_(offsets_of(counts))
        graph.replay()
        assert_are_products(accumulator, before, left, right, offsets, value, part)


def test_on_the_current_stream(generator):
    accumulator, left, right, offsets = make((BF16, F32), (96, 64), (20, 44), generator)
    before = accumulator.clone()
    grouped_accumulate_(accumulator.clone(), left, right, offsets, 0.5, 1.0)  # is compiled
    with side_stream():
        torch.cuda._sleep(20_000_000)
        left.mul_(2)
        grouped_accumulate_(accumulator, left, right, offsets, 0.5, 1.0)
    assert_are_products(accumulator, before, left, right, offsets, 0.5)


@pytest.mark.parametrize("experts", [1, 3])
def test_sums_that_32_bits_cannot_index(experts):
    rows, columns = 2**21 + 3, {1: 1024, 3: 352}[experts]
    needs_memory(3 * 2 * experts * rows * columns)
    accumulator = torch.zeros(experts, rows, columns, dtype=BF16, device="cuda")
    left = torch.ones(2 * experts, rows, dtype=BF16, device="cuda")
    right = torch.ones(2 * experts, columns, dtype=BF16, device="cuda")
    left[-1, -1] = 3
    offsets = torch.arange(2, 2 * experts + 1, 2, dtype=torch.int32, device="cuda")
    grouped_accumulate_(accumulator, left, right, offsets, 0.5, 1.0)
    assert accumulator[-1, -1].eq(2).all()
    accumulator[-1, -1] = 1
    assert accumulator.amin() == accumulator.amax() == 1


def test_operands_that_32_bits_cannot_index():
    tokens, rows = 2**21 + 40, 1024
    needs_memory(6 * 2**30)
    left = torch.zeros(tokens, rows, dtype=BF16, device="cuda")
    left[-40:] = 1
    right = torch.ones(tokens, 16, dtype=BF16, device="cuda")
    accumulator = torch.zeros(2, rows, 16, device="cuda")
    offsets = on_gpu([tokens - 20, tokens], torch.int32)
    grouped_accumulate_(accumulator, left, right, offsets, 1.0, 1.0)
    assert accumulator.eq(20).all()
