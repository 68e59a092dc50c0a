"""The list-level API on a CPU: the results of every backend that can run here."""

import itertools
import sys

import pytest
import torch
from cases import (
    GRADIENT_LAYOUTS,
    LAYOUTS,
    PAIR_IDS,
    PAIRS,
    assert_matches_oracle,
    copies,
    random_lists,
    random_tensor,
)

from fusedacc import functional

# Sizes around the widths of vector registers, of the kernels' blocks and of a program's chunk.
SHAPES = [(), (0,), (1,), (7,), (3, 5), (4, 0, 2), (2, 3, 4, 5), (1023,), (1024,), (16385,)]
#: Numbers, and a tensor of each dtype.
SCALES = [1.0, 0.37, 0.0, -8.0] + [
    torch.tensor(-1.7, dtype=dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
]


def check(accumulators, gradients, scale, overwrite, prepared, backend):
    """Compare a call, or a plan, with the oracle. `overwrite` may be "some": every third tensor.

    Triton's interpreter rounds a multiply-add twice, and so does PyTorch for an expanded operand.
    """
    if overwrite == "some":
        overwrite = [index % 3 == 0 for index in range(len(accumulators))]
    before = copies(accumulators)
    if prepared:
        functional.prepare(accumulators, backend=backend)(gradients, scale, overwrite=overwrite)
    else:
        functional.scale_accumulate_(accumulators, gradients, scale, overwrite=overwrite, backend=backend)
    assert_matches_oracle(accumulators, before, gradients, scale, overwrite, fused=backend == "cpu")


@pytest.mark.sweep
@pytest.mark.parametrize("pair", PAIRS, ids=PAIR_IDS)
@pytest.mark.parametrize("overwrite", [False, True, "some"])
@pytest.mark.parametrize("scale", SCALES, ids=str)
@pytest.mark.parametrize("prepared", [False, True])
def test_matches_the_oracle(pair, overwrite, scale, prepared, cpu_backend, generator):
    accumulators, gradients = random_lists([pair], SHAPES, generator)
    check(accumulators, gradients, scale, overwrite, prepared, cpu_backend)


@pytest.mark.sweep
@pytest.mark.parametrize("gradient_layout", GRADIENT_LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("overwrite", [False, "some"])
@pytest.mark.parametrize("prepared", [False, True])
def test_any_strides(layout, gradient_layout, overwrite, prepared, cpu_backend, generator):
    """One list has many pairs, and every other tensor is contiguous."""
    shapes = [(3, 5), (2, 3, 4, 5), (9, 33), (6,), (1, 4), (0, 3)]
    pairs = PAIRS[::3] if cpu_backend == "triton" else PAIRS  # Triton's interpreter is slow
    laid_out = random_lists(pairs, shapes, generator, layout=layout, gradient_layout=gradient_layout)
    contiguous = random_lists(pairs, shapes, generator)
    lists = [[*itertools.chain(*zip(*both, strict=True))] for both in zip(laid_out, contiguous, strict=True)]
    strides = [tensor.stride() for tensor in lists[0]]
    check(*lists, 0.7, overwrite, prepared, cpu_backend)
    assert [tensor.stride() for tensor in lists[0]] == strides


def test_gaps_between_elements_are_not_written(cpu_backend):
    room = torch.zeros(4, 10)
    functional.scale_accumulate_([room[:, 1::3]], [torch.ones(4, 3)], backend=cpu_backend)
    expected = torch.zeros(4, 10)
    expected[:, 1::3] = 1
    assert torch.equal(room, expected)


def test_scale_one_gives_exactly_the_sum(cpu_backend, generator):
    accumulators, gradients = random_lists(PAIRS, [(1000,)], generator)
    expected = [
        (accumulator.to(wide) + gradient.to(wide)).to(accumulator.dtype)
        for accumulator, gradient in zip(accumulators, gradients, strict=True)
        for wide in [torch.float64 if accumulator.dtype == torch.float64 else torch.float32]
    ]
    functional.scale_accumulate_(accumulators, gradients, backend=cpu_backend)
    assert all(map(torch.equal, accumulators, expected))


def test_ties_round_to_even(cpu_backend):
    for dtype in (torch.bfloat16, torch.float16):
        step = torch.finfo(dtype).eps
        # 1 and 1 + step, each plus half a step, round down to the even 1 and up to the even 1 + 2 * step.
        accumulators = [torch.tensor([1.0, 1.0 + step], dtype=dtype)]
        functional.scale_accumulate_(accumulators, [torch.full((2,), step / 2)], backend=cpu_backend)
        assert accumulators[0].tolist() == [1.0, 1.0 + 2 * step]


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # from numpy in Triton's interpreter
def test_inf_nan_overflow_and_signed_zero(cpu_backend):
    inf, nan = float("inf"), float("nan")
    for gradient_dtype, accumulator_dtype in PAIRS:
        accumulators = [torch.tensor([1.0, inf, 1.0, inf, -0.0, 0.0], dtype=accumulator_dtype)]
        gradients = [torch.tensor([inf, -inf, nan, 1.0, -0.0, -0.0], dtype=gradient_dtype)]
        functional.scale_accumulate_(accumulators, gradients, 2.0, backend=cpu_backend)
        expected = torch.tensor([inf, nan, nan, inf, -0.0, 0.0], dtype=torch.float64)
        torch.testing.assert_close(accumulators[0].double(), expected, rtol=0, atol=0, equal_nan=True)
        assert accumulators[0].signbit()[4:].tolist() == [True, False]
        # An overwritten accumulator is not read, and a product of -0 keeps its sign.
        accumulators = [torch.full((4,), nan, dtype=accumulator_dtype)]
        gradients = [torch.tensor([1.0, -0.0, inf, -2.0], dtype=gradient_dtype)]
        functional.scale_accumulate_(accumulators, gradients, 0.5, overwrite=True, backend=cpu_backend)
        assert accumulators[0].tolist() == [0.5, 0.0, inf, -1.0]
        assert accumulators[0].signbit().tolist() == [False, True, False, True]
    large = [torch.tensor([60000.0], dtype=torch.float16)]
    functional.scale_accumulate_(large, [torch.tensor([60000.0])], backend=cpu_backend)
    assert large[0].item() == inf


def test_a_gradient_may_be_its_accumulator(cpu_backend, generator):
    for layout in LAYOUTS:
        accumulators = [random_tensor((3, 5, 7), dtype, generator, layout) for dtype, _ in PAIRS[:4]]
        before = copies(accumulators)
        functional.scale_accumulate_(
            accumulators, accumulators, 0.25, overwrite=[True, False, True, False], backend=cpu_backend
        )
        for index, (result, old) in enumerate(zip(accumulators, before, strict=True)):
            assert torch.equal(result, old * (0.25 if index % 2 == 0 else 1.25))


def test_empty_lists(cpu_backend):
    plan = functional.prepare([], backend=cpu_backend)
    plan([])
    assert plan.backends == ()
    functional.scale_accumulate_((), (), torch.tensor(2.0), overwrite=[], backend=cpu_backend)


def test_a_plan_keeps_the_memory_it_was_prepared_with(cpu_backend):
    accumulator = torch.zeros(1000)
    old = accumulator.detach()
    plan = functional.prepare([accumulator], backend=cpu_backend)
    accumulator.data = torch.zeros(1000)
    plan([torch.ones(1000)])
    assert old.eq(1).all()
    assert accumulator.eq(0).all()


def test_versions_are_bumped(cpu_backend):
    leaf = torch.ones(3, requires_grad=True)
    saved = torch.ones(3)
    loss = (leaf * saved).sum()
    functional.scale_accumulate_([saved], [torch.ones(3)], backend=cpu_backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    arena = torch.zeros(8)
    accumulators = [arena[:4], arena[4:], torch.zeros(2)]
    plan = functional.prepare(accumulators, backend=cpu_backend)
    versions = [tensor._version for tensor in accumulators]
    plan([torch.ones(4), torch.ones(4), torch.ones(2)])
    assert all(now._version > then for now, then in zip(accumulators, versions, strict=True))


@pytest.mark.parametrize("elements", [10, 300_000])
def test_calls_keep_no_reference(elements, cpu_backend):
    sums, fresh = [torch.zeros(elements)], [torch.ones(elements)]
    plan = functional.prepare(sums, backend=cpu_backend)
    before = [sys.getrefcount(each) for each in (sums[0], fresh[0], fresh)]
    for _ in range(3):
        functional.scale_accumulate_(sums, fresh, backend=cpu_backend)
        plan(fresh)
        functional.total_norm(fresh, backend=cpu_backend)
    assert [sys.getrefcount(each) for each in (sums[0], fresh[0], fresh)] == before


def test_autograd_records_nothing(cpu_backend):
    accumulator, gradient = (torch.full((3,), value, requires_grad=True) for value in (0.0, 1.0))
    functional.scale_accumulate_([accumulator], [gradient * 2], 0.5, backend=cpu_backend)
    assert accumulator.is_leaf
    assert accumulator.tolist() == [1.0, 1.0, 1.0]


def test_meta_tensors_and_subclasses_use_the_eager_backend():
    class Tagged(torch.Tensor):
        pass

    sums = [torch.zeros(3, device="meta"), torch.zeros(3).as_subclass(Tagged), torch.zeros(3)]
    fresh = [torch.ones(3, device="meta"), torch.ones(3).as_subclass(Tagged), torch.ones(3)]
    functional.scale_accumulate_(sums, fresh, 0.5)
    assert type(sums[1]) is Tagged
    assert sums[1].tolist() == sums[2].tolist() == [0.5] * 3
