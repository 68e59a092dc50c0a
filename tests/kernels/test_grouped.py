"""Grouped products that are added directly to their sums, with every backend that runs on a CPU."""

import functools

import pytest
import torch
from cases import PAIR_IDS, native
from gemm_cases import GEMM_PAIRS, NAN, OPERAND_LAYOUTS, ways
from grouped_cases import (
    COUNTS,
    METHODS,
    SHAPES,
    SUM_LAYOUTS,
    assert_are_products,
    groups,
    lay_out_sums,
    offsets_of,
    operator,
)
from memory import largest_allocation

from fusedacc.kernels import dtypes, matmul_eager
from fusedacc.kernels.grouped import grouped_accumulate_
from fusedacc.traffic import TrafficMeter

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
WAYS = ways(
    grouped_accumulate_,
    {name: functools.partial(operator, **method) for name, method in METHODS.items()},
)


def run(way, tensors, scale=1.0, beta=1.0):
    accumulator, left, right, offsets = tensors
    before = accumulator.clone()
    way(accumulator, left, right, offsets, scale, beta)
    assert_are_products(accumulator, before, left, right, offsets, scale, beta)


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pair", GEMM_PAIRS, ids=PAIR_IDS)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_pair_shape_and_number(way, pair, counts, shape, generator):
    scales = (1.0, -0.3, torch.tensor(0.7), torch.tensor(0.7, dtype=F64), torch.tensor(0.5, dtype=BF16))
    betas = (1.0, 0.0, 0.25, torch.tensor(0.25), torch.tensor(0.0))
    for scale, beta in (*zip(scales, betas, strict=True), *zip(scales, reversed(betas), strict=True)):
        run(way, groups(pair, shape, counts, generator), scale, beta)


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pair", GEMM_PAIRS, ids=PAIR_IDS)
@pytest.mark.parametrize("sums", SUM_LAYOUTS)
@pytest.mark.parametrize("left", OPERAND_LAYOUTS)
@pytest.mark.parametrize("right", OPERAND_LAYOUTS)
def test_every_layout(way, pair, sums, left, right, generator):
    for shape in ((5, 7), (1, 6), (6, 1), (3, 4)):
        run(way, groups(pair, shape, (2, 0, 1, 6), generator, (sums, left, right)), 0.3, 0.5)


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pair", GEMM_PAIRS, ids=PAIR_IDS)
@pytest.mark.parametrize(
    ("shape", "counts"),
    [((650, 200), (1, 3, 0, 9)), ((300, 400), (64, 0, 0)), ((1030, 64), (5, 200, 1, 0, 40))],
    ids=str,
)
@pytest.mark.parametrize("layout", ["rows", "long columns"])
def test_large_products_are_split(way, pair, shape, counts, layout, generator, threads):
    threads(2)
    run(way, groups(pair, shape, counts, generator, (layout, "long rows", "rows")), 0.3, 0.5)
    run(way, groups(pair, shape, counts, generator, (layout, "rows", "columns")), 0.3, 0.0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pair", GEMM_PAIRS, ids=PAIR_IDS)
@pytest.mark.parametrize("beta", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
def test_with_beta_zero_the_old_sum_is_not_read(way, pair, beta, generator):
    for counts in COUNTS:
        accumulator, *others = groups(pair, (5, 7), counts, generator)
        accumulator.fill_(NAN)
        way(accumulator, *others, 0.5, beta)
        assert_are_products(accumulator, torch.zeros_like(accumulator), *others, 0.5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pair", GEMM_PAIRS, ids=PAIR_IDS)
def test_rows_after_the_last_offset_are_not_read(way, pair, generator):
    """On CPUs with AMX, oneDNN reads bfloat16 rows in pairs. Here the second row of the last pair is NaN."""
    for layout in ("columns", "rows"):
        for shape in ((64, 90), (1200, 2), (3, 70)):
            run(way, groups(pair, shape, (2, 9), generator, ("rows", layout, "columns")), 0.3, 0.5)


@pytest.mark.parametrize("way", WAYS)
def test_memory_between_the_sums_is_not_written(way, generator):
    room = torch.full((3, 9, 12), NAN)
    accumulator = room[:, :6, :7].zero_()
    _, left, right, offsets = groups((F32, F32), (6, 7), (2, 0, 9), generator)
    way(accumulator, left, right, offsets, 1.0, 0.5)
    assert not accumulator.isnan().any()
    accumulator.fill_(NAN)
    assert room.isnan().all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [1, 3, 8])
def test_infinities_and_nans_reach_only_their_sums(way, count):
    left, right = torch.ones(2 * count, 2), torch.ones(2 * count, 9)
    left[0, 1], right[count, 8] = float("inf"), NAN
    accumulator = torch.zeros(2, 2, 9)
    way(accumulator, left, right, offsets_of((count, count)))
    expected = torch.full((2, 2, 9), float(count))
    expected[0, 1], expected[1, :, 8] = float("inf"), NAN
    torch.testing.assert_close(accumulator, expected, rtol=0, atol=0, equal_nan=True)


@native
@pytest.mark.parametrize("pair", GEMM_PAIRS, ids=PAIR_IDS)
def test_own_loops_give_the_same_bits_with_any_number_of_threads(pair, generator, threads):
    accumulator, *others = groups(pair, (300, 260), (1, 3, 0, 17, 64, 2), generator)
    results = [accumulator, accumulator.clone()]
    for number, result in enumerate(results, 1):
        threads(number)
        operator(result, *others, 0.3, 0.5, **METHODS["rank-k"])
    assert torch.equal(*results)


@native
def test_more_elements_than_32_bits_count():
    accumulator = torch.empty(4100, 1024, 512, dtype=BF16)  # most pages are never touched
    accumulator[-1] = 1
    left, right = torch.ones(3, 1024, dtype=BF16), torch.ones(3, 512, dtype=BF16)
    offsets = torch.zeros(4100, dtype=torch.int32)
    offsets[-1] = 3
    for method in METHODS.values():
        operator(accumulator, left, right, offsets, **method)
    assert accumulator[-1].eq(1 + 3 * len(METHODS)).all()


# Allocations and bytes moved


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pair", GEMM_PAIRS, ids=PAIR_IDS)
@pytest.mark.parametrize("layout", ["long rows", "columns"])
def test_no_allocation_is_as_large_as_the_sums(way, pair, layout):
    accumulator = lay_out_sums(torch.zeros(2, 2048, 1024, dtype=pair[1]), layout)
    left, right = torch.ones(6, 2048, dtype=pair[0]), torch.ones(6, 2048, dtype=pair[0])[:, ::2]
    call = functools.partial(way, accumulator, left, right, offsets_of((4, 2)), 0.3, 0.5)
    call()  # do not count what is kept after a first call
    largest = largest_allocation(call)
    assert largest <= matmul_eager.PART_ELEMENTS * dtypes.computation_dtype(accumulator.dtype).itemsize
    assert largest < accumulator.nbytes


@native
@pytest.mark.parametrize("pair", GEMM_PAIRS, ids=PAIR_IDS)
def test_bytes(pair, generator):
    accumulator, left, right, offsets = groups(pair, (64, 32), (5, 0, 2, 0), generator)
    operands = 7 * (64 + 32) * left.itemsize + offsets.nbytes
    half, whole = accumulator.nbytes // 2, accumulator.nbytes
    for beta, moved in ((1.0, 2 * half), (0.0, whole), (0.5, 2 * whole), (torch.tensor(0.0), whole)):
        scalar = beta.nbytes if isinstance(beta, torch.Tensor) else 0
        with TrafficMeter() as meter:
            grouped_accumulate_(accumulator, left, right, offsets, 0.5, beta)
        assert not meter.uncounted
        assert meter.total_bytes == operands + moved + scalar
