"""Inputs, layouts and the float64 oracle for tests of grouped products, on every device and backend."""

import itertools
from collections.abc import Sequence

import torch
from cases import random_tensor
from gemm_cases import NAN, assert_is_product, lay_out_operand
from torch import Tensor

from fusedacc.kernels.constants import GemmMethod
from fusedacc.kernels.native import as_argument

#: Tokens per expert: some experts without tokens, no tokens, a single expert, and a large imbalance.
COUNTS = ((2, 0, 3, 1), (0, 0, 0), (5,), (0,), (), (0, 70, 0, 1, 2, 0, 0, 1), (33, 1, 64, 65, 4, 5, 16, 32))
#: Rows and columns of an expert's sum: none, one, exactly one tile, several tiles, and partial tiles.
SHAPES = ((5, 7), (1, 4), (4, 1), (1, 1), (0, 3), (3, 0), (37, 133), (64, 64), (70, 90))
SUM_LAYOUTS = ("rows", "columns", "long rows", "long columns", "rows of all experts", "misaligned")
#: Rows after the last offset.
TAIL = 3


def lay_out_sums(values: Tensor, layout: str) -> Tensor:
    """Return a stack of matrices equal to `values` in a layout that accumulators may have."""
    if "columns" in layout:
        return lay_out_sums(values.mT, layout.replace("columns", "rows")).mT
    if layout == "rows of all experts":
        return lay_out_sums(values.transpose(0, 1), "rows").transpose(0, 1)
    if layout == "misaligned":
        return values.new_zeros(values.numel() + 1)[1:].view(values.shape).copy_(values)
    longer = 3 if "long" in layout else 0
    room = values.new_zeros(values.shape[0], values.shape[1] + longer, values.shape[2] + longer)
    return room[:, : values.shape[1], : values.shape[2]].copy_(values)


def offsets_of(counts: Sequence[int], device: str = "cpu") -> Tensor:
    return torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32, device=device)


def groups(pair, shape, counts, generator, layouts=("rows", "rows", "rows"), device="cpu"):
    """Return the accumulator, left, right and offsets. Rows after the last offset are NaN."""
    operand, accumulator = pair
    tokens = sum(counts)

    def operands(columns: int, layout: str) -> Tensor:
        values = random_tensor((tokens + TAIL, columns), operand, generator, device=device)
        values[tokens:] = NAN
        return lay_out_operand(values, layout)

    sums = random_tensor((len(counts), *shape), accumulator, generator, device=device)
    return (
        lay_out_sums(sums, layouts[0]),
        operands(shape[0], layouts[1]),
        operands(shape[1], layouts[2]),
        offsets_of(counts, device),
    )


def assert_are_products(result, before, left, right, offsets, scale=1.0, beta=1.0, *, unit=None):
    """Check each expert's sum with `assert_is_product`."""
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        own = left[start:end], right[start:end]
        assert_is_product(result[expert], before[expert], *own, scale, beta, unit=unit)
        start = end


def assert_gaps_stay(way, layout, generator, device):
    """Check that `way` writes nothing between the rows of sums in that layout."""
    accumulator, *others = groups(
        (torch.bfloat16, torch.float32), (130, 70), (4, 9), generator, device=device
    )
    accumulator = lay_out_sums(torch.zeros_like(accumulator), layout)
    way(accumulator, *others, 1.0, 1.0)
    assert accumulator.any()
    accumulator.zero_()
    assert not accumulator._base.any()


def assert_written_unread(way, tensors, beta):
    """Check that with `beta=0` the old sums have no influence. Sums of experts without rows become zero."""
    accumulator, *others = tensors
    accumulator.fill_(NAN)
    way(accumulator, *others, 0.5, beta)
    assert_are_products(accumulator, torch.zeros_like(accumulator), *others, 0.5)
    empty = others[-1].diff(prepend=others[-1].new_zeros(1)) == 0
    assert not accumulator[empty].any()
    way(accumulator.fill_(NAN), *others, torch.tensor(torch.inf, device=accumulator.device), beta)
    assert not accumulator[empty].any()


def assert_idle_experts_stay(way, scale, beta, generator, device):
    """Check that with `beta=1` the sums of experts without rows keep their bits, even if `scale` is NaN."""
    accumulator, *others = groups(
        (torch.bfloat16, torch.float32), (66, 34), (0, 7, 0), generator, device=device
    )
    accumulator[0], accumulator[2] = NAN, -0.0
    before = accumulator.clone()
    way(accumulator, *others, scale, beta)
    assert torch.equal(accumulator[::2].view(torch.int32), before[::2].view(torch.int32))
    assert accumulator[1].isnan().all()


def assert_adds(add, tensors, scale=1.0, beta=1.0):
    """Call `add` with the result of `groups`, and check the sums with `assert_are_products`."""
    accumulator, *others = tensors
    before = accumulator.clone()
    add(accumulator, *others, scale, beta)
    assert_are_products(accumulator, before, *others, scale, beta)


#: Keyword arguments of `operator`.
METHODS = {
    "blas": {"method": GemmMethod.WHOLE},
    "rank-k": {"rank_k_tokens": 64, "method": GemmMethod.RANK_K},
    "onednn": {"method": GemmMethod.ONEDNN},
    "mkl": {"rank_k_tokens": 2, "method": GemmMethod.MKL},
}


def operator(
    accumulator, left, right, offsets, scale=1.0, beta=1.0, *, rank_k_tokens=0, method=GemmMethod.WHOLE
):
    """Call the operator with a given method, whichever this processor would choose."""
    numbers = *as_argument(scale), *as_argument(beta), rank_k_tokens, int(method)
    torch.ops.fusedacc.grouped_accumulate_(accumulator, left, right, offsets, *numbers)
