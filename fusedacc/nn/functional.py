"""Functions of weights whose gradients are added to their sums inside the backward."""

from __future__ import annotations

import torch
from torch import Tensor

from .cross_entropy import linear_cross_entropy
from .stacked import grouped_product, plain_of

__all__ = ["grouped_linear", "linear_cross_entropy"]


def grouped_linear(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """input[s_e:t_e] @ weight[e].T for every expert e: a Linear layer for each group of rows.

    The gradient of a weight that an `AccumulatingOptimizer(..., model=...)` has is added to its sum inside
    the backward, where experts without rows cost nothing but in a window's first micro-batch. Any other
    weight's is that of `torch.nn.functional.grouped_mm`, bit for bit, as are output and input gradient.

    Args:
        input: (S, in), rows of the same expert one after another; of the weight's dtype.
        weight: (experts, out, in), each matrix on addresses that are multiples of 16 bytes.
        offs: int32 (experts), the end of each expert's rows, on the same device.

    Returns:
        (S, out); rows from the last end on are uninitialised.

    Raises:
        RuntimeError, ValueError: as `torch.nn.functional.grouped_mm`.
    """
    output = grouped_product(input, plain_of(weight), offs, inward=False)
    if output is not None:
        return output
    return torch.nn.functional.grouped_mm(input, weight.transpose(-2, -1), offs=offs)
