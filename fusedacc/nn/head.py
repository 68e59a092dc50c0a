"""A language model's head and cross-entropy, without a tensor of all logits or of the weight's gradient.

If a wrapper with `model=` has the weight, the weight gets no gradient. Each slice's product is added to its
rows of the sum, which are read and written once in a micro-batch.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..accumulators import Slot
from ..autograd.capture import Capture
from ..kernels import matmul, softmax
from ..kernels.dtypes import PAIRS
from ..kernels.matmul_eager import Number
from ..kernels.rounding import Noise
from ..kernels.softmax import Head
from ..kernels.torch_state import runs_as_written
from . import compiled
from .kept_cast import CastFunction, KeptCasts
from .patched_forward import TRACED, WeightSum


class HeadSum(WeightSum):
    """The sum of a weight (classes, width). `head_of` finds it while it exists."""

    #: Keeps the weight's autocast cast over a window; None: casts are not kept.
    kept: KeptCasts | None = None

    def __init__(self, slot: Slot, capture: Capture) -> None:
        super().__init__(slot, capture)
        _heads[id(slot.param)] = self
        if self.is_ordinary and slot.param.numel() > compiled.SMALL:
            slot.param.__dict__[TRACED] = compiled.Traced(self)

    def remove(self) -> None:
        """Leave the parameter to PyTorch, even if a graph still refers to this object."""
        if _heads.get(id(self.slot.param)) is self:
            del _heads[id(self.slot.param)]
            self.slot.param.__dict__.pop(TRACED, None)

    def declare_head(self) -> None:
        """Make `explain()` show the path "head", also if the weight belongs to a Linear with another path."""
        if "head" not in self.slot.paths:
            self.slot.paths = (*(path for path in self.slot.paths if path != "gemm"), "head")

    def used(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight, or its cast that is kept over the window."""
        kept = None if self.kept is None or weight.dtype is dtype else self.kept.of(self.slot, weight, dtype)
        return weight.detach() if kept is None else kept

    def adds(self, own: Backward, gradient: Tensor, armed: bool, node: Any = None) -> bool:
        """Try to add the weight's gradient to the sum. Return whether nothing is left to do.

        Args:
            own: computes the gradient.
            gradient: of the loss.
            armed: whether the graph ends in the node that carries the weight's hook.
            node: the weight's node in the running graph; None: the node that carries the hook.
        """
        (device, _, total), capture = self.slot.lane, self._capture()
        operand, tokens = own.head.input.dtype, len(own.head.input)
        if capture is None or not armed or (operand, total) not in PAIRS:
            return False
        backend, kept = capture.accumulators.backend, capture.accumulators.choices
        multiply = matmul.select(device, total, operand, backend, tokens=tokens, kept=kept).run

        def write(accumulator: Tensor, scale: Number, keep: Number, noise: Noise | None) -> None:
            own.run(softmax.adder(multiply, accumulator, scale, keep, noise))

        self.declare_head()
        return self.accumulate_in_place(node or self.node, write, (own.head.input, gradient))


#: The sums of wrappers that were created with `model=`, by the parameter's id.
_heads: weakref.WeakValueDictionary[int, HeadSum] = weakref.WeakValueDictionary()


def head_of(weight: Tensor) -> HeadSum | None:
    """Return the sum of this parameter, or None if no wrapper with `model=` accumulates it."""
    found = _heads.get(id(weight))
    return found if found is not None and found.slot.param is weight and found.accumulates else None


@dataclass(frozen=True)
class Options:
    """The options of the loss, as in `linear_cross_entropy`."""

    reduction: str
    ignore_index: int
    label_smoothing: float
    slice_size: int | None

    def loss(self, logits: Tensor, target: Tensor, class_weights: Tensor | None) -> Tensor:
        """Return PyTorch's loss of all logits (tokens, classes, ...), in float32 for 16-bit logits."""
        logits = logits.to(softmax.compute_dtype(logits.dtype))
        weights = None if class_weights is None else class_weights.to(logits.dtype)
        return F.cross_entropy(
            logits,
            target,
            weights,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


def check_targets(target: Tensor, ignore_index: int, classes: int) -> None:
    """Raise IndexError for targets that are no class. On a GPU, assert without waiting for it."""
    wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if target.device.type != "cpu":
        torch._assert_async(
            ~wrong.any(), f"a target is no class and not ignored: allowed are 0 to {classes - 1}"
        )
    elif type(target) is Tensor and wrong.any():
        raise IndexError(f"Target {int(target[wrong][0])} is out of bounds; allowed: 0 to {classes - 1}")


class HeadFunction(torch.autograd.Function):
    """The loss of `input` (tokens, width), which has the products' dtype. Weight and bias are cast to it.

    The arguments `others` of `forward`:
        bias: or None.
        target: int64 (tokens), each a class or `ignore_index`.
        class_weights: in the loss's dtype, or None.
        options: `Options`.
        owner: a `HeadSum`, or None.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, *others: Any) -> Tensor:
        bias, target, class_weights, options, owner = others
        ctx.options, ctx.owner = options, owner
        ctx.set_materialize_grads(False)
        # Not the parameter itself, because its `.data` may be replaced.
        used = weight.detach() if owner is None else owner.used(weight, input.dtype)
        head = head_with(options, owner, input.detach(), used, bias, target, class_weights)
        loss, log_sum, divisor = loss_of(head, options)
        saved = weight if owner is None else used
        ctx.save_for_backward(input, saved, bias, target, class_weights, log_sum, divisor)
        return loss

    @staticmethod
    @runs_as_written
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return (None,) * 7
        input, weight, bias, target, class_weights, log_sum, divisor = ctx.saved_tensors
        options, owner = ctx.options, ctx.owner
        wants_input, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        if torch.is_grad_enabled():
            if owner is not None:  # double backward needs the weight as a function of the parameter
                weight = CastFunction.apply(owner.slot.param, weight)
            return _differentiable(ctx, gradient, input, weight, bias, target, class_weights)
        used = weight.detach()
        head = head_with(options, owner, input, used, bias, target, class_weights)
        own = Backward(head, factors_of(head, options, gradient, log_sum, divisor), wants_input, wants_bias)
        of_weight = None
        if wants_weight and (owner is None or not owner.adds(own, gradient, True, ctx.next_functions[1][0])):
            of_weight = own.of_weight(used if owner is None else owner.slot.param)
        of_input, of_bias = own.finish()
        return of_input, of_weight, of_bias, None, None, None, None


class Backward:
    """Computes the gradients of one head, in one pass over the slices of its vocabulary.

    Args:
        head: with its operands.
        factors: as returned by `factors_of`.
        wants_input: whether to compute the gradient of the input.
        wants_bias: whether to compute the gradient of the bias.
    """

    def __init__(self, head: Head, factors: Tensor, wants_input: bool, wants_bias: bool) -> None:
        self.head, self._factors, self._done = head, factors, False
        self._of_input, self._of_bias = (
            like.new_empty(like.shape, dtype=head.compute_dtype) if like is not None and wanted else None
            for like, wanted in ((head.input, wants_input), (head.bias, wants_bias))
        )

    def run(self, add_rows: softmax.AddRows | None) -> None:
        """Compute the gradients of input and bias, and pass slices of the logits' gradient to `add_rows`."""
        self._done = True
        self.head.gradients(self._factors, self._of_input, self._of_bias, add_rows)

    def of_weight(self, like: Tensor) -> Tensor:
        """Return the weight's gradient as a new tensor. Do not call `run` as well."""
        made = torch.empty_like(like)
        self.run(gradient_writer(made))
        return made

    def finish(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of input and bias, in the operands' dtypes; None if not wanted."""
        if not self._done and not (self._of_input is None and self._of_bias is None):
            self.run(None)
        found = (self._of_input, self.head.input), (self._of_bias, self.head.bias)
        of_input, of_bias = (
            None if own is None or like is None else own.to(like.dtype) for own, like in found
        )
        return of_input, of_bias


def head_with(options: Options, owner: HeadSum | None, input: Tensor, *others: Any) -> Head:
    """Return a head with its backend.

    Args:
        options: of the loss.
        owner: the weight's `HeadSum`, or None.
        input: (tokens, width).
        others: weight, bias, target and class weights, as in `HeadFunction`.
    """
    weight, bias, target, class_weights = others
    backend = softmax.backend_for(input.device, input.dtype, "auto" if owner is None else owner.backend)
    size, smooths = options.slice_size, options.label_smoothing > 0
    bias = None if bias is None else bias.detach()
    return Head(input.contiguous(), weight, bias, target, class_weights, smooths, size, backend)


def loss_of(head: Head, options: Options) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the loss, each token's log-sum-exp, and the divisor of the mean.

    The divisor is 0 if all tokens are ignored, and None for other reductions.
    """
    top, total, own, *weighted = head.statistics()
    log_sum = top + total.log()
    hits, spread = _shares(head, options)
    losses = hits * (log_sum - own)
    if weighted:
        whole = len(head.weight) if head.class_weights is None else head.class_weights.sum()
        losses = losses + spread * (whole * log_sum - weighted[0])
    losses = torch.where(head.target == options.ignore_index, 0, losses)
    if options.reduction == "none":
        return losses, log_sum, None
    divisor = _weights_of_targets(head, options).sum() if options.reduction == "mean" else None
    return losses.sum() if divisor is None else losses.sum() / divisor, log_sum, divisor


def _weights_of_targets(head: Head, options: Options) -> Tensor:
    """Return each token's weight (tokens): 1 or its class's weight, and 0 for ignored tokens."""
    valid = head.target != options.ignore_index
    if head.class_weights is None:
        return valid.to(head.compute_dtype)
    return torch.where(valid, head.class_weights[torch.where(valid, head.target, 0)], 0)


def _shares(head: Head, options: Options) -> tuple[Tensor, float]:
    """Return the factor of each token's own loss, and that of each class's loss under label smoothing."""
    smoothing = options.label_smoothing
    return _weights_of_targets(head, options) * (1 - smoothing), smoothing / len(head.weight)


def factors_of(
    head: Head, options: Options, gradient: Tensor, log_sum: Tensor, divisor: Tensor | None
) -> Tensor:
    """Return the factors (4, tokens) that csrc/common/softmax.h describes."""
    hits, spread = _shares(head, options)
    whole = len(head.weight) if head.class_weights is None else head.class_weights.sum()
    by = gradient if divisor is None else gradient / divisor
    by = torch.where(head.target == options.ignore_index, 0, by)
    return torch.stack([log_sum, by * (hits + spread * whole), by * hits, by * spread])


def gradient_writer(of_weight: Tensor) -> softmax.AddRows:
    """Return a function that writes the slices of the weight's gradient into a tensor."""

    def write(first: int, gradient: Tensor, input: Tensor, fresh: bool) -> None:
        rows = of_weight[first : first + gradient.shape[1]]
        if rows.dtype == gradient.dtype:
            rows.addmm_(gradient.t(), input, beta=0.0 if fresh else 1.0)
        elif fresh:
            rows.copy_(torch.mm(gradient.t(), input))
        else:
            rows.add_(torch.mm(gradient.t(), input))

    return write


def _differentiable(ctx: Any, gradient: Tensor, *operands: Any) -> tuple[Tensor | None, ...]:
    """Return gradients that have a graph, by PyTorch's functions."""
    input, weight, bias, target, class_weights = operands
    wanted = [own for own, needed in zip(operands, ctx.needs_input_grad, strict=False) if needed]
    used = weight.to(input.dtype), None if bias is None else bias.to(input.dtype)
    loss = ctx.options.loss(F.linear(input, *used), target, class_weights)
    found = iter(torch.autograd.grad(loss, wanted, gradient, create_graph=True))
    needed = ctx.needs_input_grad[:3]
    return (*(next(found) if wants else None for wants in needed), None, None, None, None)


@functools.cache
def warn_once(why: str) -> None:
    """Warn that PyTorch computes the loss, once for each reason."""
    warnings.warn(
        f"fusedacc.nn.functional.linear_cross_entropy: {why}; PyTorch computes the loss from all logits",
        stacklevel=3,
    )
