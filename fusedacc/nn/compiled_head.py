"""`linear_cross_entropy` in a graph of torch.compile, where forward and backward are an operator each.

A compiler sees no slice: the operators run as written, and hold as little memory. The weight gets a gradient,
which takes the usual path.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import head
from .head import Options


@torch.library.custom_op("fusedacc_head::loss", mutates_args=())
def loss(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weights: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    slice_size: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and what the backward needs: as `head.loss_of`."""
    options = Options(reduction, ignore_index, label_smoothing, slice_size)
    head.check_targets(target, ignore_index, len(weight))
    own = head.head_with(options, None, input, weight, bias, target, class_weights)
    found, log_sum, divisor = head.loss_of(own, options)
    return found, log_sum, log_sum.new_ones(()) if divisor is None else divisor


@torch.library.custom_op("fusedacc_head::gradients", mutates_args=())
def gradients(
    gradient: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weights: Tensor | None,
    log_sum: Tensor,
    divisor: Tensor,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    slice_size: int | None,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of input, weight and bias; without elements where one is not wanted."""
    options = Options(reduction, ignore_index, label_smoothing, slice_size)
    own = head.head_with(options, None, input, weight, bias, target, class_weights)
    factors = head.factors_of(own, options, gradient, log_sum, divisor)
    of_input, of_weight, of_bias = _room(input, weight, bias, wanted, own.compute_dtype)
    add_rows = head.gradient_writer(of_weight) if wanted[1] else None
    own.gradients(factors, of_input if wanted[0] else None, of_bias if wanted[2] else None, add_rows)
    return of_input.to(input.dtype), of_weight, of_bias if bias is None else of_bias.to(bias.dtype)


def _room(
    input: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool], dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty gradients; those of input and bias of `dtype`, None: of their own."""
    found = []
    for like, own, wants in zip((input, weight, bias), (dtype, None, dtype), wanted, strict=True):
        found.append(weight.new_empty(0))
        if like is not None and wants:
            found[-1] = torch.empty_like(like, dtype=own, memory_format=torch.contiguous_format)
    return found[0], found[1], found[2]


@loss.register_fake
def _(input: Tensor, weight: Tensor, bias: Any, target: Tensor, class_weights: Any, *options: Any) -> Any:
    dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    log_sum, number = (input.new_empty(shape, dtype=dtype) for shape in (input.shape[:1], ()))
    return torch.empty_like(log_sum if options[0] == "none" else number), log_sum, number


@gradients.register_fake
def _(gradient: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None, *others: Any) -> Any:
    return _room(input, weight, bias, others[-1], None)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    input, weight, bias, target, class_weights, *ctx.options = inputs
    ctx.save_for_backward(input, weight, bias, target, class_weights, *output[1:])


def _backward(ctx: Any, gradient: Tensor, *others: Any) -> tuple[Any, ...]:
    wanted = [ctx.needs_input_grad[index] for index in range(3)]
    made = gradients(gradient, *ctx.saved_tensors, *ctx.options, wanted)
    return *(own if wants else None for own, wants in zip(made, wanted, strict=True)), *[None] * 6


loss.register_autograd(_backward, setup_context=_save)
