"""Products of groups of rows by Triton on a GPU: against float64, without waiting, beyond 2^31 elements."""

from __future__ import annotations

import itertools

import pytest
import torch
from cases import PAIR_IDS, PAIRS
from gemm_cases import NAN
from grouped_rows_cases import (
    GROUP_IDS,
    GROUPED_OPERAND_LAYOUTS,
    GROUPED_SUM_LAYOUTS,
    GROUPS,
    assert_are_products,
    float32_setting,
    grouped,
    lay_out_sums,
)

from fusedacc.kernels import registry
from fusedacc.kernels.triton.grouped import grouped_accumulate_

pytestmark = pytest.mark.cuda

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
TF32_UNIT = 2.0**-10
#: Experts as a layer has them: uneven, some idle; in the second no width is a multiple of 16 bytes.
LARGE = [((0, 700, 1, 0, 333, 2048), 512, 768), ((129, 0, 500), 333, 451)]


@pytest.fixture(autouse=True)
def _triton_runs():
    problem = registry.obstacle("triton", torch.device("cuda"), F32, F32)
    if problem is not None:
        pytest.skip(f"the triton backend cannot run here: {problem}")


def on_gpu(value, dtype=F32):
    return torch.tensor(value, dtype=dtype, device="cuda")


def run(case, sizes, scale, keep):
    accumulator, left, right, offsets = case
    before = accumulator.clone()
    grouped_accumulate_(accumulator, left, right, offsets, scale, keep)
    assert_are_products(accumulator, before, left, right, sizes, scale, keep)


@pytest.mark.parametrize("pair", PAIRS, ids=PAIR_IDS)
@pytest.mark.parametrize("group", [*GROUPS, *LARGE], ids=[*GROUP_IDS, "large", "large and odd"])
def test_every_pair_and_group(pair, group, generator):
    """Each dtype, stride and kind of number is compiled for itself: no more of them than are needed."""
    for scale, keep in ((-0.3, 1.0), (on_gpu(0.7), on_gpu(0.25))):
        run(grouped(pair, group, generator, device="cuda"), group[0], scale, keep)


@pytest.mark.parametrize("pair", PAIRS, ids=PAIR_IDS)
def test_every_number(pair, generator):
    scales = (1.0, 0.3, on_gpu(0.7), on_gpu(0.7, F64), on_gpu(0.5, BF16), 0.3)
    keeps = (1.0, 0.0, 0.25, on_gpu(0.25), on_gpu(0.0), on_gpu(1.0, F16))
    for scale, keep in zip(scales, keeps, strict=True):
        run(grouped(pair, LARGE[0], generator, device="cuda"), LARGE[0][0], scale, keep)


@pytest.mark.parametrize("pair", [(BF16, F32), (F32, F32), (F32, F16)], ids=str)
@pytest.mark.parametrize("layout", GROUPED_SUM_LAYOUTS)
def test_every_layout(pair, layout, generator):
    for layouts in itertools.product([layout], GROUPED_OPERAND_LAYOUTS, GROUPED_OPERAND_LAYOUTS):
        for group in (((3, 0, 2), 5, 7), ((70, 0, 31), 96, 160)):
            run(grouped(pair, group, generator, layouts, "cuda"), group[0], 0.3, 0.5)


@pytest.mark.parametrize("layout", ["long rows", "long columns"])
def test_what_lies_between_rows_stays(layout, generator):
    accumulator, left, right, offsets = grouped((BF16, F32), ((4, 9), 130, 70), generator, device="cuda")
    accumulator = lay_out_sums(torch.zeros_like(accumulator), layout)
    grouped_accumulate_(accumulator, left, right, offsets, 1.0, 1.0)
    assert accumulator.any()
    accumulator.zero_()
    assert not accumulator._base.any()


@pytest.mark.parametrize("pair", PAIRS, ids=PAIR_IDS)
@pytest.mark.parametrize("on_device", [False, True])
def test_without_keeping_nothing_is_read_and_all_is_written(pair, on_device, generator):
    keep = on_gpu(0.0) if on_device else 0.0
    for group in (((0, 7, 0, 40), 66, 34), LARGE[0]):
        accumulator, left, right, offsets = grouped(pair, group, generator, device="cuda")
        accumulator.fill_(NAN)
        grouped_accumulate_(accumulator, left, right, offsets, 0.5, keep)
        assert_are_products(accumulator, torch.zeros_like(accumulator), left, right, group[0], 0.5)
        assert not accumulator[0].any()


@pytest.mark.parametrize("keep", [1.0, "on the device"])
def test_experts_without_rows_stay_whatever_they_hold(keep, generator):
    accumulator, left, right, offsets = grouped((BF16, F32), ((0, 7, 0), 66, 34), generator, device="cuda")
    accumulator[0], accumulator[2] = NAN, -0.0
    before = accumulator.clone()
    grouped_accumulate_(accumulator, left, right, offsets, NAN, on_gpu(1.0) if keep != 1 else keep)
    assert torch.equal(accumulator[::2].view(torch.int32), before[::2].view(torch.int32))
    assert accumulator[1].isnan().all()


@pytest.mark.parametrize("pair", PAIRS, ids=PAIR_IDS)
def test_the_same_bits_on_every_run(pair, generator):
    accumulator, left, right, offsets = grouped(pair, LARGE[0], generator, device="cuda")
    first = accumulator.clone()
    grouped_accumulate_(first, left, right, offsets, on_gpu(0.3), 1.0)
    for _ in range(3):
        again = accumulator.clone()
        grouped_accumulate_(again, left, right, offsets, on_gpu(0.3), 1.0)
        assert torch.equal(again, first)


@pytest.mark.parametrize("pair", PAIRS, ids=PAIR_IDS)
def test_nothing_waits_for_the_device_and_nothing_large_is_allocated(pair, generator):
    accumulator, left, right, offsets = grouped(pair, LARGE[0], generator, device="cuda")
    numbers = ((1.0, 1.0), (0.5, 0.0), (on_gpu(0.5), on_gpu(0.5)))
    for scale, keep in numbers:
        grouped_accumulate_(accumulator, left, right, offsets, scale, keep)  # is compiled
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for scale, keep in numbers:
            grouped_accumulate_(accumulator, left, right, offsets, scale, keep)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - held <= 2048


def test_tf32_is_as_torch_is_set(generator):
    errors, sizes = {}, (256, 300)
    accumulator, left, right, offsets = grouped((F32, F32), (sizes, 256, 320), generator, device="cuda")
    for tf32 in (False, True):
        result, unit = accumulator.clone(), TF32_UNIT if tf32 else None
        with float32_setting("allow_tf32", tf32):
            grouped_accumulate_(result, left, right, offsets, 1.0, 1.0)
        assert_are_products(result, accumulator, left, right, sizes, unit=unit)
        exact = accumulator[0].double() + left[:256].double().t() @ right[:256].double()
        errors[tf32] = (result[0].double() - exact).abs().max()
    if torch.version.hip is None:
        assert errors[True] > 4 * errors[False]


@pytest.mark.parametrize("pair", [(BF16, F32), (F32, F32), (F64, F64)], ids=str)
def test_in_a_graph(pair, generator):
    """Replayed, it reads the numbers and the offsets that there are then."""
    accumulator, left, right, offsets = grouped(pair, ((20, 0, 44), 96, 64), generator, device="cuda")
    scale, keep, before = on_gpu(0.5), on_gpu(1.0), accumulator.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        grouped_accumulate_(accumulator, left, right, offsets, scale, keep)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_accumulate_(accumulator, left, right, offsets, scale, keep)
    for value, part, sizes in ((0.25, 1.0, (20, 0, 44)), (2.0, 0.5, (0, 33, 31)), (1.0, 0.0, (64, 0, 0))):
        accumulator.copy_(before)
        scale.fill_(value)
        keep.fill_(part)
        offsets.copy_(torch.tensor(sizes).cumsum(0))
        graph.replay()
        assert_are_products(accumulator, before, left, right, sizes, value, part)


def test_on_the_current_stream(generator):
    accumulator, left, right, offsets = grouped((BF16, F32), ((20, 44), 96, 64), generator, device="cuda")
    before = accumulator.clone()
    grouped_accumulate_(accumulator.clone(), left, right, offsets, 0.5, 1.0)  # is compiled
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        left.mul_(2)
        grouped_accumulate_(accumulator, left, right, offsets, 0.5, 1.0)
    torch.cuda.current_stream().wait_stream(stream)
    assert_are_products(accumulator, before, left, right, (20, 44), 0.5)


@pytest.mark.parametrize("experts", [1, 3])
def test_sums_that_32_bits_cannot_index(experts):
    rows, columns = 2**21 + 3, {1: 1024, 3: 352}[experts]
    if torch.cuda.mem_get_info()[0] < 3 * 2 * experts * rows * columns:
        pytest.skip("needs 13 GiB of device memory")
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
    if torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.skip("needs 6 GiB of device memory")
    left = torch.zeros(tokens, rows, dtype=BF16, device="cuda")
    left[-40:] = 1
    right = torch.ones(tokens, 16, dtype=BF16, device="cuda")
    accumulator = torch.zeros(2, rows, 16, device="cuda")
    offsets = on_gpu([tokens - 20, tokens], torch.int32)
    grouped_accumulate_(accumulator, left, right, offsets, 1.0, 1.0)
    assert accumulator.eq(20).all()
