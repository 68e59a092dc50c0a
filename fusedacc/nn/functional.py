"""Functions of weights whose gradients are added to their sums inside the backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import compiled
from .cross_entropy import linear_cross_entropy
from .patched_forward import TRACED
from .stacked import apply, plain_of, target_of

__all__ = ["grouped_linear", "linear_cross_entropy"]

_transform_at_hand = torch._C._functorch.peek_interpreter_stack


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
    if torch.compiler.is_compiling():
        traced: Any = getattr(weight, TRACED, None)
        if compiled.accumulates(traced, weight):
            return compiled.grouped(input, weight, offs, traced.ticket)
    elif torch.is_grad_enabled() and _transform_at_hand() is None and forward_ad._current_level < 0:
        target = target_of(plain_of(weight))
        output = None if target is None else apply(input, target, offs, inward=False)
        if output is not None:
            return output
    return torch.nn.functional.grouped_mm(input, weight.transpose(-2, -1), offs=offs)
