"""A tensor that has a weight's elements, recorded by autograd as a function of the weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.uncompiled import runs_as_written


class CastFunction(torch.autograd.Function):
    """`weight.to(kept.dtype)` without a copy: `kept` has its elements already, and the output has its memory.

    The gradient is cast as autocast casts it.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, kept: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        ctx.set_materialize_grads(False)
        return kept.detach()

    @staticmethod
    @runs_as_written
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        return None if gradient is None else gradient.to(ctx.dtype), None
