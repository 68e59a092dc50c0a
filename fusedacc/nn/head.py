"""A language model's head and cross-entropy, without a tensor of all logits or of the weight's gradient.

If a wrapper with `model=` has the weight, the weight gets no gradient. Each slice's product is added to its
rows of the sum. These are read and written once in a micro-batch, or once for each block of tokens if memory
is scarce.

In a graph of torch.compile, forward and backward are one operator each. The compiler does not see the slices.
The operators run as written, and use as little memory as in eager mode.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..accumulators import Slot
from ..autograd.capture import Capture
from ..kernels import matmul, softmax
from ..kernels.dtypes import PAIRS, Number
from ..kernels.softmax import Gradients, Head, Options
from ..kernels.torch_private import runs_as_written
from . import compiled
from .kept_cast import CastFunction
from .patched_forward import TRACED, WeightSum


class HeadSum(WeightSum):
    """The sum of a weight (classes, width). `head_of` finds it while it exists."""

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

    def weight_or_cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight, or its cast that is kept over the window."""
        if self.kept is not None and weight.dtype is not dtype:
            cast = self.kept.of(self.slot, weight, dtype)
            if cast is not None:
                return cast
        return weight.detach()

    def add_gradients(self, node: Any, gradients: Gradients, gradient: Tensor) -> bool:
        """Try to add the weight's gradient to the sum. Return whether nothing is left to do.

        node: as in `Capture.take_in_place`. gradient: the loss's.
        """
        device, _, accumulate_dtype = self.slot.lane
        input = gradients.head.input
        capture = self._capture()
        if capture is None or (input.dtype, accumulate_dtype) not in PAIRS:
            return False
        product = matmul.select(
            device,
            accumulate_dtype,
            input.dtype,
            capture.accumulators.backend,
            tokens=len(input),
            in_slices=True,
        )

        def write(accumulator: Tensor, scale: Number, keep: Number) -> None:
            def add(rows: Tensor, left: Tensor, right: Tensor, keep: Number) -> None:
                product.run(rows, left, right, scale, keep)

            gradients.run(accumulator, add, keep, product.in_place)

        self.declare_head()
        return self.accumulate_in_place(node, write, (input, gradient))


#: The sums of wrappers that were created with `model=`, by the parameter's id.
_heads: weakref.WeakValueDictionary[int, HeadSum] = weakref.WeakValueDictionary()


def head_of(weight: Tensor) -> HeadSum | None:
    """Return the sum of this parameter, or None if no wrapper with `model=` accumulates it."""
    head_sum = _heads.get(id(weight))
    if head_sum is None or head_sum.slot.param is not weight or not head_sum.accumulates:
        return None
    return head_sum


class Operands(NamedTuple):
    """The tensors of a head, as in `softmax.Head`."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    class_weights: Tensor | None


class Wanted(NamedTuple):
    """Which gradients a backward needs."""

    input: bool
    weight: bool
    bias: bool


def make_head(operands: Operands, options: Options, owner: HeadSum | None = None) -> Head:
    """Return a head with its backend. owner: the weight's sum, if it has one."""
    input = operands.input
    backend, _ = softmax.select(input.device, input.dtype, "auto" if owner is None else owner.backend)
    return Head(
        input=input.contiguous(),
        weight=operands.weight,
        bias=operands.bias,
        target=operands.target,
        class_weights=operands.class_weights,
        options=options,
        backend=backend,
    )


def logits_loss(operands: Operands, options: Options) -> Tensor:
    """Return PyTorch's loss of all logits, in float32 for 16-bit logits.

    The input is (..., width), the weight (classes, ..., width), the bias (classes, ...) or None.
    """
    input = operands.input
    weight = operands.weight
    bias = operands.bias
    classes, *more, width = weight.shape
    logits = F.linear(
        input.reshape(-1, input.shape[-1]),
        weight.reshape(-1, width),
        None if bias is None else bias.reshape(-1),
    )
    logits = logits.view(-1, classes, *more).to(softmax.compute_dtype(logits.dtype))
    target = operands.target
    class_weights = operands.class_weights
    has_probabilities = target.is_floating_point()
    loss = F.cross_entropy(
        logits,
        target.reshape(len(logits), *(weight.shape[:-1] if has_probabilities else more)),
        None if class_weights is None else class_weights.to(logits.dtype),
        ignore_index=options.ignore_index,
        reduction=options.reduction,
        label_smoothing=options.label_smoothing,
    )
    return loss.view(*input.shape[:-1], *more) if options.reduction == "none" else loss


class HeadFunction(torch.autograd.Function):
    """The loss of `input` (tokens, width), which has the products' dtype. Weight and bias are cast to it.

    The arguments of `forward` are those of `Operands`, `Options`, and the weight's `HeadSum` or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weights: Tensor | None,
        options: Options,
        owner: HeadSum | None,
    ) -> Tensor:
        ctx.options = options
        ctx.owner = owner
        ctx.set_materialize_grads(False)
        # Not the parameter itself, because its `.data` may be replaced.
        used = weight.detach() if owner is None else owner.weight_or_cast(weight, input.dtype)
        operands = Operands(input, used, bias, target, class_weights)
        loss, log_sum = make_head(operands, options, owner).loss()
        saved_weight = weight if owner is None else used
        ctx.save_for_backward(input, saved_weight, bias, target, class_weights, log_sum)
        return loss

    @staticmethod
    @runs_as_written
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None, None, None, None, None, None
        input, weight, bias, target, class_weights, log_sum = ctx.saved_tensors
        operands = Operands(input, weight, bias, target, class_weights)
        owner: HeadSum | None = ctx.owner
        wanted = Wanted(*ctx.needs_input_grad[:3])
        if torch.is_grad_enabled():
            if owner is not None:  # double backward needs the weight as a function of the parameter
                operands = operands._replace(weight=CastFunction.apply(owner.slot.param, weight))
            of_input, of_weight, of_bias = _differentiable(operands, ctx.options, gradient, wanted)
            return of_input, of_weight, of_bias, None, None, None, None
        head = make_head(operands._replace(weight=weight.detach()), ctx.options, owner)
        gradients = Gradients(head, head.factors(gradient, log_sum), wanted.input, wanted.bias)
        weight_like = head.weight if wanted.weight else None
        if owner is not None and wanted.weight:
            was_added = owner.add_gradients(ctx.next_functions[1][0], gradients, gradient)
            weight_like = None if was_added else owner.slot.param
        of_input, of_weight, of_bias = gradients.all(weight_like)
        return of_input, of_weight, of_bias, None, None, None, None


def _differentiable(
    operands: Operands, options: Options, gradient: Tensor, wanted: Wanted
) -> list[Tensor | None]:
    """Return gradients of input, weight and bias that have a graph, by PyTorch's functions."""
    input = operands.input
    weight = operands.weight
    bias = operands.bias
    cast = operands._replace(
        weight=weight.to(input.dtype), bias=None if bias is None else bias.to(input.dtype)
    )
    loss = logits_loss(cast, options)
    candidates = zip((input, weight, bias), wanted, strict=True)
    chosen = [tensor for tensor, is_wanted in candidates if is_wanted and tensor is not None]
    gradients = iter(torch.autograd.grad(loss, chosen, gradient, create_graph=True))
    return [next(gradients) if is_wanted else None for is_wanted in wanted]


# The operators of compiled graphs. A schema has no records, so the fields of `Operands` and `Options` are
# arguments.


def _loss(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weights: Tensor | None,
    ticket: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    slice_size: int | None,
) -> tuple[Tensor, Tensor]:
    """Return the loss, and each token's log-sum-exp for the backward."""
    operands = Operands(input, weight, bias, target, class_weights)
    options = Options(reduction, ignore_index, label_smoothing, slice_size)
    return make_head(operands, options).loss()


def _fake_loss(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weights: Tensor | None,
    ticket: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    slice_size: int | None,
) -> tuple[Tensor, Tensor]:
    log_sum = input.new_empty(input.shape[:1], dtype=softmax.compute_dtype(input.dtype))
    return torch.empty_like(log_sum) if reduction == "none" else log_sum.new_empty(()), log_sum


def _gradients(
    ticket: Tensor | None,
    gradient: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weights: Tensor | None,
    log_sum: Tensor,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    slice_size: int | None,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input, weight and bias, each empty if not wanted.

    With a ticket (see `compiled`), the weight's gradient is added to its sum.
    """
    holder: Any = None if ticket is None else compiled.holder_of(ticket)
    operands = Operands(input, weight, bias, target, class_weights)
    head = make_head(operands, Options(reduction, ignore_index, label_smoothing, slice_size), holder)
    wants = Wanted(*wanted)
    gradients = Gradients(head, head.factors(gradient, log_sum), wants.input, wants.bias)
    if holder is not None:
        compiled.add(holder, lambda: gradients.of_weight(head.weight), "add_gradients", gradients, gradient)
    of_input, of_weight, of_bias = gradients.all(head.weight if wants.weight else None)
    nothing = head.weight.new_empty
    return (
        nothing(0) if of_input is None else of_input,
        nothing(0) if of_weight is None else of_weight,
        nothing(0) if of_bias is None else of_bias,
    )


def _fake_gradients(
    ticket: Tensor | None,
    gradient: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weights: Tensor | None,
    log_sum: Tensor,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    slice_size: int | None,
    wanted: list[bool],
) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty_like(operand, memory_format=torch.contiguous_format)
        if is_wanted and operand is not None
        else weight.new_empty(0)
        for operand, is_wanted in zip((input, weight, bias), wanted, strict=True)
    )


_OPERANDS = "Tensor input, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weights"
_OPTIONS = "str reduction, int ignore_index, float label_smoothing, int? slice_size"
_RETURNS = "(Tensor, Tensor, Tensor)"
_AFTER_TICKET = f"Tensor gradient, {_OPERANDS}, Tensor log_sum, {_OPTIONS}, bool[] wanted"
_add_head = compiled.define("add_head", _AFTER_TICKET, _gradients, _RETURNS, _fake_gradients)
compiled_loss = torch.library.custom_op(
    f"{compiled.NAMESPACE}::head_loss",
    _loss,
    mutates_args=(),
    schema=f"({_OPERANDS}, Tensor? ticket, {_OPTIONS}) -> (Tensor, Tensor)",
)
_give_gradients = torch.library.custom_op(
    f"{compiled.NAMESPACE}::head_gradients",
    _gradients,
    mutates_args=(),
    schema=f"(Tensor? ticket, {_AFTER_TICKET}) -> {_RETURNS}",
)
compiled_loss.register_fake(_fake_loss)
_give_gradients.register_fake(_fake_gradients)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save what `_backward` needs. inputs, output: those of `_loss`."""
    input, weight, bias, target, class_weights, ticket, *options = inputs
    _, log_sum = output
    ctx.options = options
    ctx.save_for_backward(ticket, input, weight, bias, target, class_weights, log_sum)


def _backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Any, ...]:
    ticket, input, weight, bias, target, class_weights, log_sum = ctx.saved_tensors
    reduction, ignore_index, label_smoothing, slice_size = ctx.options
    wanted = Wanted(*ctx.needs_input_grad[:3])
    run: Callable[..., Any] = _give_gradients
    if ticket is not None:  # the operator adds the weight's gradient to its sum
        run = _add_head
        wanted = wanted._replace(weight=False)
    of_input, of_weight, of_bias = run(
        ticket,
        gradient,
        input,
        weight,
        bias,
        target,
        class_weights,
        log_sum,
        reduction,
        ignore_index,
        label_smoothing,
        slice_size,
        list(wanted),
    )
    return (
        of_input if wanted.input else None,
        of_weight if wanted.weight else None,
        of_bias if wanted.bias else None,
        *[None] * 7,  # target, class_weights, ticket, and the options
    )


compiled_loss.register_autograd(_backward, setup_context=_save)
