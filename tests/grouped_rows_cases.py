"""Products of groups of rows, each into a matrix of its own: inputs and the float64 oracle."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from cases import random_tensor
from gemm_cases import NAN, OPERAND_LAYOUTS, SUM_LAYOUTS, assert_is_product, lay_out_operand, lay_out_sum
from torch import Tensor

#: (rows of each expert, M, N): groups that are empty, alone, or no multiple of a tile or of a step.
GROUPS = [
    ((5,), 5, 7),
    ((0, 3, 0, 0, 33, 1, 0), 6, 5),
    ((16, 32, 64), 64, 64),
    ((100, 1, 31), 70, 90),
    ((0, 0), 4, 3),
    ((), 4, 3),
    ((2, 3), 0, 3),
    ((2, 3), 3, 0),
    ((4, 0, 3), 1, 5),
    ((4, 0, 3), 5, 1),
    ((1, 2), 1, 1),
]
GROUP_IDS = ["-".join(map(str, sizes)) + f"x{rows}x{columns}" for sizes, rows, columns in GROUPS]
#: How the experts' matrices may lie: one after the other, or row by row.
GROUPED_SUM_LAYOUTS = (*SUM_LAYOUTS, "experts inside")
GROUPED_OPERAND_LAYOUTS = OPERAND_LAYOUTS
#: Rows of the operands behind the last group; they hold NaN.
SPARE = 5


def lay_out_sums(values: Tensor, layout: str) -> Tensor:
    """Matrices equal to `values` in a layout fit for accumulators."""
    if layout == "experts inside":
        return values.transpose(0, 1).contiguous().transpose(0, 1)
    experts, rows, columns = values.shape
    if "columns" in layout:
        return lay_out_sums(values.mT, layout.replace("columns", "rows")).mT
    return lay_out_sum(values.reshape(experts * rows, columns), layout).unflatten(0, (experts, rows))


def grouped(pair, group, generator, layouts=("rows", "rows", "rows"), device="cpu"):
    """Accumulator, left, right and offsets."""
    operand, accumulator = pair
    sizes, rows, columns = group
    sums = random_tensor((len(sizes), rows, columns), accumulator, generator, device=device)
    operands = []
    for width, layout in ((rows, layouts[1]), (columns, layouts[2])):
        values = random_tensor((sum(sizes) + SPARE, width), operand, generator, device=device)
        values[sum(sizes) :] = NAN
        operands.append(lay_out_operand(values, layout))
    offsets = torch.tensor(list(accumulate(sizes)), dtype=torch.int32, device=device)
    return lay_out_sums(sums, layouts[0]), *operands, offsets


@contextlib.contextmanager
def float32_setting(name: str, value: bool | str) -> Iterator[None]:
    """torch's setting for products of float32, by the older interface or by the newer."""
    before = getattr(torch.backends.cuda.matmul, name)
    setattr(torch.backends.cuda.matmul, name, value)
    try:
        yield
    finally:
        setattr(torch.backends.cuda.matmul, name, before)


def assert_are_products(
    result: Tensor,
    before: Tensor,
    left: Tensor,
    right: Tensor,
    sizes: Sequence[int],
    scale: float | Tensor = 1.0,
    keep: float | Tensor = 1.0,
    *,
    unit: float | None = None,
) -> None:
    """Holds each expert's matrix to the float64 product of its rows."""
    for expert, (begin, end) in enumerate(pairwise(accumulate(sizes, initial=0))):
        rows = slice(begin, end)
        assert_is_product(result[expert], before[expert], left[rows], right[rows], scale, keep, unit=unit)
