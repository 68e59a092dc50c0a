"""Functions whose backward adds the weight's gradient to its sum."""

from __future__ import annotations

import torch
from torch import Tensor

from .cross_entropy import linear_cross_entropy
from .sinks import linear_into_sum
from .stacked import grouped_product, plain_of

__all__ = ["grouped_linear", "linear", "linear_cross_entropy"]


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute input @ weight.T + bias, as `torch.nn.functional.linear`.

    If an `AccumulatingOptimizer` has the weight, with or without `model=`, the backward adds the weight's
    gradient to its sum, as `model=` does for Linear modules. Any other weight gets the gradient of
    `torch.nn.functional.linear`, bit for bit. Output and input gradient are always bit-identical to that
    function's.

    Args:
        input: (..., in), in the weight's dtype. Under autocast it is cast, and so is the weight.
        weight: (out, in): the parameter itself.
        bias: (out), or None.

    Returns:
        (..., out).

    Raises:
        RuntimeError: as `torch.nn.functional.linear`.
    """
    output = linear_into_sum(input, weight, bias)
    return torch.nn.functional.linear(input, weight, bias) if output is None else output


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
