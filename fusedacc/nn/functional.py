"""Functions whose backward adds the weight's gradient to its sum."""

from __future__ import annotations

import torch
from torch import Tensor

from .cross_entropy import linear_cross_entropy
from .stacked import grouped_product, plain_of

__all__ = ["grouped_linear", "linear_cross_entropy"]


def grouped_linear(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Compute input[s_e:t_e] @ weight[e].T for every expert e: a Linear layer for each group of rows.

    If an `AccumulatingOptimizer(..., model=...)` has the weight, the backward adds the weight's gradient to
    its sum. Experts without rows then cost nothing, except in a window's first micro-batch. Any other weight
    gets the gradient of `torch.nn.functional.grouped_mm`, bit for bit. Output and input gradient are always
    bit-identical to that function's.

    Args:
        input: (S, in), sorted by expert, in the weight's dtype.
        weight: (experts, out, in). The address of each matrix must be a multiple of 16 bytes.
        offs: int32 (experts), the end of each expert's rows, on the same device.

    Returns:
        (S, out). Rows after the last end are uninitialised.

    Raises:
        RuntimeError, ValueError: as `torch.nn.functional.grouped_mm`.
    """
    output = grouped_product(input, plain_of(weight), offs, inward=False)
    if output is not None:
        return output
    return torch.nn.functional.grouped_mm(input, weight.transpose(-2, -1), offs=offs)
