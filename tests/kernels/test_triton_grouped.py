"""Products of groups of rows by Triton: against float64, in every layout, and what must not be touched."""

from __future__ import annotations

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
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedacc.kernels import launch_events, registry
from fusedacc.traffic import TrafficMeter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROBLEM = registry.obstacle("triton", torch.device(DEVICE), torch.float32, torch.float32)
if PROBLEM is not None:
    pytest.skip(f"the triton backend cannot run here: {PROBLEM}", allow_module_level=True)

from fusedacc.kernels.triton import grouped as module  # noqa: E402
from fusedacc.kernels.triton import grouped_kernels as kernels  # noqa: E402
from fusedacc.kernels.triton.grouped import grouped_accumulate_  # noqa: E402

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def number(value, dtype=F32):
    return torch.tensor(value, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("pair", PAIRS, ids=PAIR_IDS)
@pytest.mark.parametrize("group", GROUPS, ids=GROUP_IDS)
def test_every_pair_and_group(pair, group, generator):
    for scale, keep in ((-0.3, 1.0), (number(0.7), number(0.25))):
        accumulator, left, right, offsets = grouped(pair, group, generator, device=DEVICE)
        before = accumulator.clone()
        grouped_accumulate_(accumulator, left, right, offsets, scale, keep)
        assert_are_products(accumulator, before, left, right, group[0], scale, keep)


@pytest.mark.parametrize("pair", PAIRS, ids=PAIR_IDS)
def test_numbers_of_every_kind(pair, generator):
    accumulator, left, right, offsets = grouped(pair, ((4, 0, 3), 6, 5), generator, device=DEVICE)
    numbers = [kind(value) for kind in (float, number) for value in (1.0, 0.0, -0.3)]
    numbers += [number(0.7, dtype) for dtype in (BF16, F16, F64)]
    for scale, keep in zip([*numbers, *numbers], [*reversed(numbers), *numbers], strict=True):
        result = accumulator.clone()
        grouped_accumulate_(result, left, right, offsets, scale, keep)
        assert_are_products(result, accumulator, left, right, (4, 0, 3), scale, keep)


@pytest.mark.parametrize("pair", [(BF16, F32), (F32, F32), (F32, F16)], ids=str)
@pytest.mark.parametrize("layout", GROUPED_SUM_LAYOUTS)
def test_every_layout(pair, layout, generator):
    """Each layout of an operand meets two of the other's."""
    turned = [GROUPED_OPERAND_LAYOUTS[-by:] + GROUPED_OPERAND_LAYOUTS[:-by] for by in (1, 4)]
    for left_layout, *others in zip(GROUPED_OPERAND_LAYOUTS, *turned, strict=True):
        sizes, layouts = (3, 0, 2), (layout, left_layout, others[GROUPED_SUM_LAYOUTS.index(layout) % 2])
        accumulator, left, right, offsets = grouped(pair, (sizes, 5, 7), generator, layouts, DEVICE)
        before = accumulator.clone()
        grouped_accumulate_(accumulator, left, right, offsets, 0.3, 0.5)
        assert_are_products(accumulator, before, left, right, sizes, 0.3, 0.5)


@pytest.mark.parametrize("layout", ["long rows", "long columns"])
def test_what_lies_between_rows_stays(layout, generator):
    accumulator, left, right, offsets = grouped((BF16, F32), ((4, 9), 6, 70), generator, device=DEVICE)
    accumulator = lay_out_sums(torch.zeros_like(accumulator), layout)
    grouped_accumulate_(accumulator, left, right, offsets, 1.0, 1.0)
    assert accumulator.any()
    accumulator.zero_()
    assert not accumulator._base.any()


@pytest.mark.filterwarnings(
    "ignore::RuntimeWarning:triton"
)  # the interpreter's numpy warns of infinity times 0
@pytest.mark.parametrize("keep", [0.0, number(0.0)], ids=["number", "on the device"])
@pytest.mark.parametrize("pair", PAIRS, ids=PAIR_IDS)
def test_without_keeping_nothing_is_read_and_all_is_written(pair, keep, generator):
    sizes = (0, 7, 0, 40)
    accumulator, left, right, offsets = grouped(pair, (sizes, 66, 34), generator, device=DEVICE)
    accumulator.fill_(NAN)
    grouped_accumulate_(accumulator, left, right, offsets, 0.5, keep)
    assert_are_products(accumulator, torch.zeros_like(accumulator), left, right, sizes, 0.5)
    assert not accumulator[0].any()
    grouped_accumulate_(accumulator.fill_(NAN), left, right, offsets, number(torch.inf), keep)
    assert not accumulator[::2].any()


@pytest.mark.parametrize("keep", [1.0, number(1.0)], ids=["number", "on the device"])
def test_experts_without_rows_stay_whatever_they_hold(keep, generator):
    accumulator, left, right, offsets = grouped((BF16, F32), ((0, 7, 0), 6, 5), generator, device=DEVICE)
    accumulator[0], accumulator[2] = NAN, -0.0
    before = accumulator.clone()
    grouped_accumulate_(accumulator, left, right, offsets, number(NAN), keep)
    assert torch.equal(accumulator[::2].view(torch.int32), before[::2].view(torch.int32))
    assert accumulator[1].isnan().all()


def test_experts_without_rows_are_kept_in_part(generator):
    accumulator, left, right, offsets = grouped((F32, F32), ((0, 0), 6, 5), generator, device=DEVICE)
    before = accumulator.clone()
    grouped_accumulate_(accumulator, left, right, offsets, torch.inf, 0.5)
    assert torch.equal(accumulator, before / 2)


def test_operands_without_rows():
    accumulator = torch.full((2, 3, 4), NAN, device=DEVICE)
    left, right = torch.empty(0, 3, device=DEVICE), torch.empty(0, 4, device=DEVICE)
    offsets = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    grouped_accumulate_(accumulator, left, right, offsets, 1.0, 0.0)
    assert not accumulator.any()


@pytest.mark.parametrize("pair", PAIRS, ids=PAIR_IDS)
def test_the_same_bits_on_every_run(pair, generator):
    accumulator, left, right, offsets = grouped(pair, ((50, 0, 33), 70, 65), generator, device=DEVICE)
    results = [accumulator.clone() for _ in range(2)]
    for result in results:
        grouped_accumulate_(result, left, right, offsets, 0.3, 0.7)
    assert torch.equal(*results)


def test_more_tiles_than_a_band_has(generator):
    """Each tile is made once, in bands that are full and in one that is not."""
    rows, columns = (kernels.TILES[8][0] * 17 + 3, kernels.TILES[8][1] * 2 + 1)
    accumulator, left, right, offsets = grouped((F64, F64), ((2, 1), rows, columns), generator, device=DEVICE)
    before = accumulator.clone()
    grouped_accumulate_(accumulator, left, right, offsets, 0.5, 1.0)
    assert_are_products(accumulator, before, left, right, (2, 1), 0.5)


def test_offsets_that_leave_the_operands_are_not_followed(generator):
    accumulator, left, right, _ = grouped((F32, F32), ((4, 3), 6, 5), generator, device=DEVICE)
    left, right = left[2:4], right[2:4]  # memory on either side holds numbers
    before = accumulator.clone()
    offsets = torch.tensor([-2, 9], dtype=torch.int32, device=DEVICE)
    grouped_accumulate_(accumulator, left, right, offsets, 1.0, 1.0)
    assert_are_products(accumulator, before, left, right, (0, 2))


def test_gaps_in_rows_and_columns_are_refused():
    accumulator = torch.zeros(2, 6, 8, device=DEVICE)[:, ::2, ::2]
    operand, offsets = torch.ones(2, 4, device=DEVICE), torch.ones(2, dtype=torch.int32, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"strides \(48, 16, 2\): one of the last two must be 1"):
        grouped_accumulate_(accumulator, operand[:, :3], operand, offsets, 1.0, 1.0)


def test_which_dtypes_go_together():
    assert all(module.supports(accumulator, operand) for operand, accumulator in PAIRS)
    assert not module.supports(F64, BF16)
    assert not module.supports(BF16, F16)


@pytest.mark.parametrize(
    ("name", "allowed", "refused"), [("allow_tf32", True, False), ("fp32_precision", "tf32", "ieee")]
)
def test_float32_is_multiplied_as_torch_is_set(name, allowed, refused):
    assert module._precision() == "ieee"
    with float32_setting(name, allowed):
        assert module._precision() == ("tf32" if torch.version.hip is None else "ieee")
    with float32_setting(name, refused):
        assert module._precision() == "ieee"


@pytest.mark.parametrize("keep", [1.0, 0.0, 0.5, number(0.5)], ids=str)
def test_one_launch_and_its_bytes(keep, generator):
    sizes, rows, columns = (3, 0, 4, 2), 6, 5
    accumulator, left, right, offsets = grouped((BF16, F32), (sizes, rows, columns), generator, device=DEVICE)
    with TrafficMeter() as meter:
        grouped_accumulate_(accumulator, left, right, offsets, 0.5, keep)
    written = rows * columns * 4 * (3 if isinstance(keep, float) and keep == 1 else 4)
    read = (0 if isinstance(keep, float) and keep == 0 else written) + 9 * (rows + columns) * 2 + 4 * 4
    read += 4 if isinstance(keep, torch.Tensor) else 0
    assert not meter.uncounted
    counted = meter.as_dict()["by_op"]["triton::grouped_accumulate"]
    assert (counted["calls"], counted["read_bytes"], counted["written_bytes"]) == (1, read, written)


def test_bytes_of_fake_offsets_are_unknown():
    with FakeTensorMode(), TrafficMeter() as meter:
        sums, left, right = torch.zeros(2, 3, 4), torch.ones(5, 3), torch.ones(5, 4)
        offsets = torch.ones(2, dtype=torch.int32)
        launch_events.launched("triton::grouped_accumulate", sums, left, right, offsets, 1.0, 1.0)
    assert meter.uncounted["triton::grouped_accumulate"] == 1
