"""Grouped products in the Triton backend: compared with float64, in every layout, without other writes."""

import functools

import pytest
import torch
from cases import PAIR_IDS, PAIRS
from gemm_cases import NAN, OPERAND_LAYOUTS, float32_setting
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
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedacc.kernels import launch_events, registry
from fusedacc.kernels.triton import backend
from fusedacc.kernels.triton.backend import grouped_accumulate_
from fusedacc.traffic import TrafficMeter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROBLEM = registry.obstacle("triton", torch.device(DEVICE), torch.float32, torch.float32)
if PROBLEM is not None:
    pytest.skip(f"the triton backend cannot run here: {PROBLEM}", allow_module_level=True)

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def number(value, dtype=F32):
    return torch.tensor(value, dtype=dtype, device=DEVICE)


def make(pair, shape, counts, generator, layouts=("rows", "rows", "rows")):
    return groups(pair, shape, counts, generator, layouts, DEVICE)


run = functools.partial(assert_adds, grouped_accumulate_)


@pytest.mark.sweep
@pytest.mark.parametrize("pair", PAIRS, ids=PAIR_IDS)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("numbers", [(-0.3, 1.0), (number(0.7), number(0.25))], ids=["numbers", "tensors"])
def test_every_pair_and_shape(pair, counts, shape, numbers, generator):
    """Triton compiles each dtype, stride and kind of number separately, so use few of them."""
    run(make(pair, shape, counts, generator), *numbers)


@pytest.mark.parametrize("pair", [(BF16, F32), (F32, F32), (F32, F16)], ids=str)
@pytest.mark.parametrize("layout", SUM_LAYOUTS)
def test_every_layout(pair, layout, generator):
    """Each layout of an operand meets two of the other's."""
    turned = [OPERAND_LAYOUTS[-by:] + OPERAND_LAYOUTS[:-by] for by in (1, 4)]
    for left_layout, *others in zip(OPERAND_LAYOUTS, *turned, strict=True):
        layouts = layout, left_layout, others[SUM_LAYOUTS.index(layout) % 2]
        run(make(pair, (5, 7), (3, 0, 2), generator, layouts), 0.3, 0.5)


@pytest.mark.parametrize("layout", ["long rows", "long columns"])
def test_memory_between_rows_is_not_written(layout, generator):
    assert_gaps_stay(grouped_accumulate_, layout, generator, DEVICE)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy warns of inf * 0 in the interpreter
@pytest.mark.parametrize("beta", [0.0, number(0.0)], ids=["number", "on the device"])
@pytest.mark.parametrize("pair", PAIRS, ids=PAIR_IDS)
def test_with_beta_zero_sums_are_written_and_not_read(pair, beta, generator):
    assert_written_unread(grouped_accumulate_, make(pair, (20, 34), (0, 7, 0, 40), generator), beta)


@pytest.mark.parametrize("scale", [NAN, number(NAN)], ids=["nan", "nan on the device"])
@pytest.mark.parametrize("beta", [1.0, number(1.0)], ids=["number", "on the device"])
def test_with_beta_one_experts_without_rows_keep_their_bits(scale, beta, generator):
    assert_idle_experts_stay(grouped_accumulate_, scale, beta, generator, DEVICE)


def test_experts_without_rows_are_multiplied_by_beta(generator):
    accumulator, *others = make((F32, F32), (6, 5), (0, 0), generator)
    before = accumulator.clone()
    grouped_accumulate_(accumulator, *others, torch.inf, 0.5)
    assert torch.equal(accumulator, before / 2)


def test_more_tiles_than_a_band_has(generator):
    """Each tile is computed once, in full bands and in a partial one."""
    from fusedacc.kernels.triton.kernels import TILES

    run(make((F64, F64), (TILES[8][0] * 17 + 3, TILES[8][1] * 2 + 1), (2, 1), generator), 0.5)


def test_offsets_outside_the_operands_are_clamped(generator):
    accumulator, left, right, _ = make((F32, F32), (6, 5), (4, 3), generator)
    left, right = left[2:4], right[2:4]  # there are numbers before and after them
    before = accumulator.clone()
    offsets = torch.tensor([-2, 9], dtype=torch.int32, device=DEVICE)
    grouped_accumulate_(accumulator, left, right, offsets, 1.0, 1.0)
    assert_are_products(accumulator, before, left, right, offsets_of((0, 2)))


def test_gaps_in_rows_and_columns_are_refused():
    accumulator = torch.zeros(2, 6, 8, device=DEVICE)[:, ::2, ::2]
    operand, offsets = torch.ones(2, 4, device=DEVICE), torch.ones(2, dtype=torch.int32, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"strides \(48, 16, 2\): one of the last two must be 1"):
        grouped_accumulate_(accumulator, operand[:, :3], operand, offsets, 1.0, 1.0)


@pytest.mark.parametrize(
    ("name", "allowed", "refused"), [("allow_tf32", True, False), ("fp32_precision", "tf32", "ieee")]
)
def test_pytorchs_settings_allow_tf32(name, allowed, refused):
    assert backend._precision() == "ieee"
    for value, wanted in ((allowed, "tf32" if torch.version.hip is None else "ieee"), (refused, "ieee")):
        with float32_setting(name, value):
            assert backend._precision() == wanted


@pytest.mark.parametrize("beta", [1.0, 0.0, 0.5, number(0.5)], ids=str)
def test_one_launch_and_its_bytes(beta, generator):
    counts, rows, columns = (3, 0, 4, 2), 6, 5
    tensors = make((BF16, F32), (rows, columns), counts, generator)
    with TrafficMeter() as meter:
        grouped_accumulate_(*tensors, 0.5, beta)
    written = rows * columns * 4 * (3 if isinstance(beta, float) and beta == 1 else 4)
    read = (0 if isinstance(beta, float) and beta == 0 else written) + 9 * (rows + columns) * 2 + 4 * 4
    read += 4 if isinstance(beta, torch.Tensor) else 0
    assert not meter.uncounted
    counted = meter.as_dict()["by_op"]["triton::grouped_accumulate"]
    assert (counted["calls"], counted["read_bytes"], counted["written_bytes"]) == (1, read, written)


def test_bytes_of_fake_offsets_are_unknown():
    with FakeTensorMode(), TrafficMeter() as meter:
        sums, left, right = torch.zeros(2, 3, 4), torch.ones(5, 3), torch.ones(5, 4)
        offsets = torch.ones(2, dtype=torch.int32)
        launch_events.launched("triton::grouped_accumulate", sums, left, right, offsets, 1.0, 1.0)
    assert meter.uncounted["triton::grouped_accumulate"] == 1
