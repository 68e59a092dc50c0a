"""One expert's part of a stacked weight, whose gradient is added to that part of the sum.

Stock's backward of `weight[e]` makes zeros as large as the whole weight for every expert that was used, and
adds them up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..functional import accumulate_rounded_
from ..kernels.rounding import Noise
from ..kernels.uncompiled import runs_as_written
from .weight_sum import WeightSum


class SelectedFunction(torch.autograd.Function):
    """weight[index]: weight (experts, ...), index at least 0."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, index: int, target: WeightSum) -> Tensor:
        ctx.target, ctx.index, ctx.shape = target, index, weight.shape
        ctx.set_materialize_grads(False)
        return weight.detach()[index]

    @staticmethod
    @runs_as_written
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None, None
        target, index = ctx.target, ctx.index

        def write(
            accumulator: Tensor, scale: float | Tensor, beta: float | Tensor, noise: Noise | None
        ) -> None:
            part, first = accumulator[index], bool(beta == 0)
            accumulate_rounded_([part], [gradient], scale, first, target.backend, noise)

        if target.accumulate_in_place(ctx.next_functions[0][0], write, (gradient,), part=index):
            return None, None, None
        return torch.ops.aten.select_backward(gradient, ctx.shape, 0, index), None, None
