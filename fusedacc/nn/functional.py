"""Functions whose backward adds the weight's gradient to its sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..kernels.checks import ORDINARY_TYPES
from . import compiled
from .cross_entropy import linear_cross_entropy
from .offered_sums import LINEAR, offer_to_compiler, sum_of_parameter
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
    output = _linear_into_sum(input, weight, bias)
    return torch.nn.functional.linear(input, weight, bias) if output is None else output


def _linear_into_sum(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return input @ weight.T + bias. Its backward adds the gradient of the weight to its sum.

    Returns None if PyTorch must compute it, or raise.
    """
    if is_compiling():
        offer_to_compiler(LINEAR)
        traced: Any = getattr(weight, LINEAR, None)
        is_large = weight.numel() > compiled.SMALL
        if not (is_large and compiled.accumulates(traced, weight)) or not (
            bias is None or type(bias) in ORDINARY_TYPES
        ):
            return None
        return compiled.linear(input, weight, bias, traced.ticket, False, False)
    found = sum_of_parameter(weight, LINEAR)
    if found is None or weight.dim() != 2 or not found.announce():
        return None
    return found.output(input, weight, bias)


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
