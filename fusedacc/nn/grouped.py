"""A product of rows with their experts' matrices whose backward adds to the sum of the stacked weight.

Stock's backward writes a gradient of all experts in every micro-batch, zeros for those without a row.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..accumulators import Slot
from ..autograd.capture import Capture
from ..kernels import grouped
from ..kernels.checks import GRADIENT_TYPES, ORDINARY_TYPES
from ..kernels.dtypes import PAIRS
from ..kernels.rounding import Noise
from ..kernels.uncompiled import runs_as_written
from . import compiled
from .cast_function import CastFunction
from .patched_forward import TRACED
from .weight_sum import WeightSum

#: torch.nn.functional.grouped_mm, or what it was before there was one.
multiply = torch._grouped_mm

Number = float | Tensor
Run = Callable[[Tensor, Tensor, Tensor, Tensor, Number, Number, Noise | None], None]


class StackedSum(WeightSum):
    """Of a parameter (experts, out, in); `target_of` finds it as long as it lives."""

    def __init__(self, slot: Slot, capture: Capture) -> None:
        super().__init__(slot, capture)
        self._chosen: tuple[Any, Run] | None = None
        _targets[id(slot.param)] = self
        if self.is_ordinary and (slot.param.dtype, slot.accumulate_dtype) in PAIRS:
            slot.param.__dict__[TRACED] = compiled.Traced(self, self.window)

    def run(self, capture: Capture) -> Run:
        """What multiplies into the sum."""
        lane = self.slot.lane
        if self._chosen is None or self._chosen[0] is not lane:
            device, operand, dtype = lane
            asked, kept = capture.accumulators.backend, capture.accumulators.choices
            stochastic = capture.accumulators.noise.rounds(dtype)
            chosen = grouped.select(device, dtype, operand, asked, kept=kept, stochastic=stochastic)
            self._chosen = lane, chosen.run
        return self._chosen[1]

    def forget_choices(self) -> None:
        """Ask anew how to multiply: a checkpoint has brought other answers."""
        self._chosen = None

    def remove(self) -> None:
        """Leave what is compiled to PyTorch."""
        self.slot.param.__dict__.pop(TRACED, None)

    def adds(self, left: Tensor, right: Tensor, armed: bool, offs: Tensor) -> bool:
        """In the backward of a compiled graph: whether the products left[s:t]^T right[s:t] are done with."""
        capture = self._capture()
        if capture is None or not armed:
            return False
        run = self.run(capture)

        def write(accumulator: Tensor, scale: Number, beta: Number, noise: Noise | None) -> None:
            run(accumulator, left, right, offs, scale, beta, noise)

        self.declare("grouped")
        return self.accumulate_in_place(self.node, write, (left, right))


class GroupedFunction(torch.autograd.Function):
    """rows[s_e:t_e] @ weight[e].T for every expert e, or rows[s_e:t_e] @ weight[e] where `inward`.

    Rows (S, in) of the weight's dtype; weight (experts, out, in), or (experts, in, out) where `inward`; offs
    int32 (experts), the end of each expert's rows. Rows behind the last one's come out uninitialised, as from
    torch's grouped_mm.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, offs: Tensor, target: WeightSum, run: Run, inward: bool
    ) -> Tensor:
        ctx.target, ctx.run, ctx.inward = target, run, inward
        ctx.set_materialize_grads(False)
        used = weight.detach()  # not the parameter itself, whose `.data` may be swapped
        ctx.save_for_backward(rows, offs, used if ctx.needs_input_grad[0] else None)
        return multiply(rows, used if inward else used.transpose(-2, -1), offs=offs)

    @staticmethod
    @runs_as_written
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return (None,) * 6
        rows, offs, used = ctx.saved_tensors
        target, inward = ctx.target, ctx.inward
        weight = target.slot.param
        of_rows = of_weight = None
        if used is not None:
            if torch.is_grad_enabled():  # then it has to be a function of the weight
                used = CastFunction.apply(weight, used)
            of_rows = multiply(gradient, used.transpose(-2, -1) if inward else used, offs=offs)
        left, right = (rows, gradient) if inward else (gradient, rows)

        def write(accumulator: Tensor, scale: Number, beta: Number, noise: Noise | None) -> None:
            ctx.run(accumulator, left, right, offs, scale, beta, noise)

        if not target.accumulate_in_place(ctx.next_functions[1][0], write, (left, right)):
            of_weight = multiply(left.t(), right, offs=offs)
        return of_rows, of_weight, None, None, None, None


def apply(rows: Tensor, target: StackedSum, offs: Any, *, inward: bool) -> Tensor | None:
    """The product with the parameter of `target`, recorded so that its gradient goes to the sum.

    None where torch's own is to make it, or to refuse it; arguments as `GroupedFunction` has them.
    """
    weight, capture = target.slot.param, target._capture()
    if (
        capture is None
        or not target.accumulates
        or type(rows) not in ORDINARY_TYPES
        or type(offs) not in GRADIENT_TYPES
        or rows.dim() != 2
        or rows.dtype is not weight.dtype
        or (weight.dtype, target.slot.accumulate_dtype) not in PAIRS
    ):
        return None
    target.declare("grouped")
    # Before the backward runs: a trial may tell, and would be in its way there.
    return GroupedFunction.apply(rows, weight, offs, target, target.run(capture), inward)


#: By the parameter's id, of wrappers that were made with `model=`.
_targets: weakref.WeakValueDictionary[int, StackedSum] = weakref.WeakValueDictionary()


def target_of(weight: Tensor) -> StackedSum | None:
    """What adds this parameter's gradient to its sum, where a wrapper has it that was made with `model=`."""
    target = _targets.get(id(weight))
    return target if target is not None and target.slot.param is weight else None
