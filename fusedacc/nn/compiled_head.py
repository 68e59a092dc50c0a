"""`linear_cross_entropy` in a graph of torch.compile: forward and backward are one operator each.

The compiler does not see the slices. The operators run as written, and use as little memory as in eager mode.
If a weight's gradient is added to its sum, the backward's operator gets the weight's ticket (see `compiled`).
Any other weight gets a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import compiled, head
from .head import Backward, Options


@torch.library.custom_op(f"{compiled.NAMESPACE}::head_loss", mutates_args=())
def loss(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss and the values that the backward needs, as `head.loss_of` does."""
    options = Options(reduction, ignore_index, label_smoothing, slice_size)
    head.check_targets(target, ignore_index, len(weight))
    own = head.head_with(options, None, input, weight, bias, target, class_weights)
    found, log_sum, divisor = head.loss_of(own, options)
    return found, log_sum, log_sum.new_ones(()) if divisor is None else divisor


def _gradients(ticket: Tensor | None, gradient: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """Return the gradients of input, weight and bias, each empty if not wanted.

    With a ticket, the weight's gradient is added to its sum.
    """
    input, weight, bias, target, class_weights, log_sum, divisor, *given, wanted = others
    holder: Any = None if ticket is None else compiled.holder_of(ticket)
    options = Options(*given)
    own = head.head_with(options, holder, input, weight, bias, target, class_weights)
    factors = head.factors_of(own, options, gradient, log_sum, divisor)
    backward, of_weight = Backward(own, factors, wanted[0], wanted[2]), None
    if holder is not None:
        compiled.add(holder, lambda: backward.of_weight(weight), backward, gradient)
    elif wanted[1]:
        of_weight = backward.of_weight(weight)
    of_input, of_bias = backward.finish()
    made = of_input, of_weight, of_bias
    return tuple(weight.new_empty(0) if each is None else each for each in made)


def _fake_gradients(ticket: Any, gradient: Tensor, *others: Any) -> tuple[Tensor, ...]:
    weight = others[1]
    return tuple(
        torch.empty_like(like, memory_format=torch.contiguous_format)
        if like is not None and wants
        else weight.new_empty(0)
        for like, wants in zip(others[:3], others[-1], strict=True)
    )


_OTHERS = (
    "Tensor gradient, Tensor input, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weights, "
    "Tensor log_sum, Tensor divisor, str reduction, int ignore_index, float label_smoothing, "
    "int? slice_size, bool[] wanted"
)
_RETURNS = "(Tensor, Tensor, Tensor)"
_add_head = compiled.define("add_head", _OTHERS, _gradients, _RETURNS, _fake_gradients)
_give_gradients = torch.library.custom_op(
    f"{compiled.NAMESPACE}::head_gradients",
    _gradients,
    mutates_args=(),
    schema=f"(Tensor? ticket, {_OTHERS}) -> {_RETURNS}",
)
_give_gradients.register_fake(_fake_gradients)


@loss.register_fake
def _(input: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    reduction = others[4]
    dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    log_sum, number = (input.new_empty(shape, dtype=dtype) for shape in (input.shape[:1], ()))
    return torch.empty_like(log_sum if reduction == "none" else number), log_sum, number


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    *operands, ticket, _, _, _, _ = inputs
    ctx.options = inputs[-4:]
    ctx.save_for_backward(ticket, *operands, *output[1:])


def _backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Any, ...]:
    ticket, *saved = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:3])
    wanted[1] = wanted[1] and ticket is None
    run = _give_gradients if ticket is None else _add_head
    made = run(ticket, gradient, *saved, *ctx.options, wanted)
    return *(own if wants else None for own, wants in zip(made, wanted, strict=True)), *[None] * 7


loss.register_autograd(_backward, setup_context=_save)
