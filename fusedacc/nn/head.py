"""A language model's head and cross-entropy, without a tensor of all logits or of the weight's gradient.

If a wrapper with `model=` has the weight, the weight gets no gradient. Each slice's product is added to its
rows of the sum. These are read and written once in a micro-batch, or once for each block of tokens if memory
is scarce.

In a graph of torch.compile, forward and backward are one operator each. The compiler does not see the slices.
The operators run as written, and use as little memory as in eager mode.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..accumulators import Slot
from ..autograd.capture import Capture
from ..kernels import matmul, softmax
from ..kernels.dtypes import PAIRS, Number
from ..kernels.softmax import Gradients, Head, Options
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

    def adds(self, own: Gradients, gradient: Tensor, armed: bool, node: Any = None) -> bool:
        """Try to add the weight's gradient to the sum. Return whether nothing is left to do.

        `gradient` is the loss's. `armed`: whether the graph ends in the node that carries the weight's hook.
        `node`: the weight's node in the running graph; None: the node that carries the hook.
        """
        (device, _, total), capture, input = self.slot.lane, self._capture(), own.head.input
        if capture is None or not armed or (input.dtype, total) not in PAIRS:
            return False
        backend = capture.accumulators.backend
        product = matmul.select(device, total, input.dtype, backend, tokens=len(input), in_slices=True)

        def write(accumulator: Tensor, scale: Number, keep: Number) -> None:
            def add(rows: Tensor, left: Tensor, right: Tensor, keep: Number) -> None:
                product.run(rows, left, right, scale, keep)

            own.run(accumulator, add, keep, product.in_place)

        self.declare_head()
        return self.accumulate_in_place(node or self.node, write, (input, gradient))


#: The sums of wrappers that were created with `model=`, by the parameter's id.
_heads: weakref.WeakValueDictionary[int, HeadSum] = weakref.WeakValueDictionary()


def head_of(weight: Tensor) -> HeadSum | None:
    """Return the sum of this parameter, or None if no wrapper with `model=` accumulates it."""
    found = _heads.get(id(weight))
    return found if found is not None and found.slot.param is weight and found.accumulates else None


def head_with(owner: HeadSum | None, options: Options, input: Tensor, *others: Any) -> Head:
    """Return a head with its backend. `others`: weight, bias, target and class weights."""
    weight, bias, target, class_weights = others
    backend, _ = softmax.select(input.device, input.dtype, "auto" if owner is None else owner.backend)
    return Head(input.contiguous(), weight, bias, target, class_weights, options, backend)


def logits_loss(options: Options, operands: tuple[Any, ...], target: Tensor, class_weights: Any) -> Tensor:
    """Return PyTorch's loss of all logits, in float32 for 16-bit logits.

    `operands`: input (..., width), weight (classes, ..., width), and bias (classes, ...) or None.
    """
    input, weight, bias = operands
    whole, more = weight.shape[:-1], weight.shape[1:-1]
    logits = F.linear(
        input.reshape(-1, input.shape[-1]),
        weight.reshape(-1, weight.shape[-1]),
        None if bias is None else bias.reshape(-1),
    )
    logits = logits.view(-1, *whole).to(softmax.compute_dtype(logits.dtype))
    target = target.reshape(len(logits), *(whole if target.is_floating_point() else more))
    class_weights = None if class_weights is None else class_weights.to(logits.dtype)
    given = {name: value for name, value in options._asdict().items() if name != "slice_size"}
    loss = F.cross_entropy(logits, target, class_weights, **given)
    return loss.view(*input.shape[:-1], *more) if options.reduction == "none" else loss


class HeadFunction(torch.autograd.Function):
    """The loss of `input` (tokens, width), which has the products' dtype. Weight and bias are cast to it.

    The other arguments of `forward` are bias, target and class weights as in `Head`, `Options`, and the
    weight's `HeadSum` or None.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, *others: Any) -> Tensor:
        *rest, options, owner = others
        ctx.options, ctx.owner = options, owner
        ctx.set_materialize_grads(False)
        # Not the parameter itself, because its `.data` may be replaced.
        used = weight.detach() if owner is None else owner.used(weight, input.dtype)
        loss, log_sum = head_with(owner, options, input, used, *rest).loss()
        ctx.save_for_backward(input, weight if owner is None else used, *rest, log_sum)
        return loss

    @staticmethod
    @runs_as_written
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return (None,) * 7
        options, owner, wanted = ctx.options, ctx.owner, ctx.needs_input_grad[:3]
        input, weight, *others, log_sum = ctx.saved_tensors
        if torch.is_grad_enabled():
            if owner is not None:  # double backward needs the weight as a function of the parameter
                weight = CastFunction.apply(owner.slot.param, weight)
            return *_differentiable(options, gradient, wanted, input, weight, *others), *[None] * 4
        head = head_with(owner, options, input, weight.detach(), *others)
        own = Gradients(head, head.factors(gradient, log_sum), wanted[0], wanted[2])
        left = head.weight if wanted[1] else None
        if owner is not None and wanted[1]:
            left = None if owner.adds(own, gradient, True, ctx.next_functions[1][0]) else owner.slot.param
        return *own.all(left), None, None, None, None


def _differentiable(
    options: Options, gradient: Tensor, wanted: tuple[bool, ...], *operands: Any
) -> Iterator[Tensor | None]:
    """Return gradients of input, weight and bias that have a graph, by PyTorch's functions."""
    input, weight, bias, target, class_weights = operands
    cast = input, weight.to(input.dtype), None if bias is None else bias.to(input.dtype)
    loss = logits_loss(options, cast, target, class_weights)
    chosen = [own for own, wants in zip(operands, wanted, strict=False) if wants]
    found = iter(torch.autograd.grad(loss, chosen, gradient, create_graph=True))
    return (next(found) if wants else None for wants in wanted)


def _loss(input: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """Return the loss, and each token's log-sum-exp for the backward."""
    bias, target, class_weights, _, *given = others
    return head_with(None, Options(*given), input, weight, bias, target, class_weights).loss()


def _fake_loss(input: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    log_sum = input.new_empty(input.shape[:1], dtype=softmax.compute_dtype(input.dtype))
    return torch.empty_like(log_sum) if others[4] == "none" else log_sum.new_empty(()), log_sum


def _gradients(ticket: Tensor | None, gradient: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """Return the gradients of input, weight and bias, each empty if not wanted.

    With a ticket (see `compiled`), the weight's gradient is added to its sum.
    """
    *operands, log_sum, wanted = *others[:6], others[-1]
    holder: Any = None if ticket is None else compiled.holder_of(ticket)
    head = head_with(holder, Options(*others[6:-1]), *operands)
    own = Gradients(head, head.factors(gradient, log_sum), wanted[0], wanted[2])
    if holder is not None:
        compiled.add(holder, lambda: own.of_weight(head.weight), own, gradient)
    made = own.all(head.weight if wanted[1] else None)
    return tuple(head.weight.new_empty(0) if each is None else each for each in made)


def _fake_gradients(ticket: Any, gradient: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty_like(like, memory_format=torch.contiguous_format) if wants else others[1].new_empty(0)
        for like, wants in zip(others[:3], others[-1], strict=True)
    )


_OPERANDS = "Tensor input, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weights"
_OPTIONS = "str reduction, int ignore_index, float label_smoothing, int? slice_size"
_RETURNS = "(Tensor, Tensor, Tensor)"
_OTHERS = f"Tensor gradient, {_OPERANDS}, Tensor log_sum, {_OPTIONS}, bool[] wanted"
_add_head = compiled.define("add_head", _OTHERS, _gradients, _RETURNS, _fake_gradients)
compiled_loss, _give_gradients = (
    torch.library.custom_op(f"{compiled.NAMESPACE}::{name}", function, mutates_args=(), schema=schema)
    for name, function, schema in (
        ("head_loss", _loss, f"({_OPERANDS}, Tensor? ticket, {_OPTIONS}) -> (Tensor, Tensor)"),
        ("head_gradients", _gradients, f"(Tensor? ticket, {_OTHERS}) -> {_RETURNS}"),
    )
)
compiled_loss.register_fake(_fake_loss)
_give_gradients.register_fake(_fake_gradients)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    *operands, ticket, _, _, _, _ = inputs
    ctx.options = inputs[-4:]
    ctx.save_for_backward(ticket, *operands, output[1])


def _backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Any, ...]:
    ticket, *saved = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:3])
    wanted[1] = wanted[1] and ticket is None
    run = _give_gradients if ticket is None else _add_head
    made = run(ticket, gradient, *saved, *ctx.options, wanted)
    return *(own if wants else None for own, wants in zip(made, wanted, strict=True)), *[None] * 7


compiled_loss.register_autograd(_backward, setup_context=_save)
