"""`linear_cross_entropy`: checks arguments, and decides when PyTorch computes the loss from all logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from ..kernels import softmax
from . import compiled, compiled_head, head
from .patched_forward import TRACED

_transform_at_hand = torch._C._functorch.peek_interpreter_stack


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    slice_size: int | None = None,
) -> Tensor:
    """Compute cross_entropy(linear(input, linear_weight, linear_bias), target) without storing all logits.

    The vocabulary is processed in slices, once in the forward and once in the backward. Temporary memory is
    at most a sixteenth of the logits or 1 MiB, whichever is more, and less than the weight.

    If an `AccumulatingOptimizer(..., model=...)` has the weight, the weight's gradient is added to its sum
    slice by slice. Any other weight gets a gradient as usual.

    PyTorch computes the loss, with a warning, if the target has class probabilities or the weight has more
    than two dimensions. torch's function of the same name supports both.

    Args:
        input: (..., width). Under autocast it is cast, and so is each slice of the weight.
        linear_weight: (classes, width).
        target: int64 or uint8 (...), a class for each token, or `ignore_index`.
        linear_bias: (classes), or None.
        weight: (classes), the weight of each class, or None.
        reduction: "none", "mean" or "sum". "mean" divides by the total weight of tokens that are not ignored.
        ignore_index: targets with this value are ignored; None: -100.
        label_smoothing: from 0 to 1, the share of each label that is spread over all classes.
        slice_size: classes in a slice; None: as many as fit the memory limit and a cache.

    Returns:
        The loss, in float32 for 16-bit logits: a number, or (...) for "none".

    Raises:
        ValueError: a shape or an option is invalid. Nothing has been accumulated.
        RuntimeError: the dtypes of input, weight and bias differ, outside autocast or with one in float64.
        IndexError: on a CPU, a target is no class. On a GPU, torch's assertion on the device fails.
    """
    whole = *input.shape[:-1], *linear_weight.shape[:-1]
    probable = target.is_floating_point() and target.shape == whole
    _check_head(input, linear_weight, target, linear_bias, weight, probable)
    _check_options(reduction, label_smoothing, slice_size)
    if probable and ignore_index is not None:
        raise ValueError(f"ignore_index={ignore_index} does not go with class probabilities as the target")
    options = head.Options(
        reduction, -100 if ignore_index is None else ignore_index, label_smoothing, slice_size
    )
    if probable or linear_weight.dim() > 2:
        head.warn_once("class probabilities" if probable else "a weight of more than two dimensions")
        return _reference(options, input, linear_weight, target, linear_bias, weight)
    dtype, device, compiling = linear_weight.dtype, input.device.type, torch.compiler.is_compiling()
    plain = softmax.is_plain(input, linear_weight, target, linear_bias, weight)
    operand_dtypes = {each.dtype for each in (input, linear_weight, linear_bias) if each is not None}
    autocasts = plain and torch.is_autocast_enabled(device) and torch.float64 not in operand_dtypes
    if autocasts:
        dtype = torch.get_autocast_dtype(device)
    if (
        (torch._C._are_functorch_transforms_active() if compiling else _transform_at_hand() is not None)
        or forward_ad._current_level >= 0
        or (not compiling and torch._C._is_tracing())
        or not plain
        or dtype not in _DTYPES
        or target.dtype not in (torch.int64, torch.uint8)
        or (len(operand_dtypes) > 1 and not autocasts)
        or (weight is not None and weight.requires_grad)
    ):
        return _reference(options, input, linear_weight, target, linear_bias, weight)
    weight = None if weight is None else weight.to(softmax.compute_dtype(dtype)).contiguous()
    rows = input.reshape(-1, input.shape[-1]).to(dtype)
    labels = target.reshape(-1).long().contiguous()
    operands = rows, linear_weight, linear_bias, labels, weight
    if compiling:
        traced: Any = getattr(linear_weight, TRACED, None)
        ticket = traced.ticket if compiled.accumulates(traced, linear_weight) else None
        given = reduction, options.ignore_index, label_smoothing, slice_size
        loss, *_ = compiled_head.loss(*operands, ticket, *given)
        return loss.view(target.shape) if reduction == "none" else loss
    head.check_targets(labels, options.ignore_index, len(linear_weight))
    owner = head.head_of(linear_weight) if torch.is_grad_enabled() else None
    if owner is not None:
        owner.declare_head()
    loss = head.HeadFunction.apply(*operands, options, owner)
    return loss.view(target.shape) if reduction == "none" else loss


#: The supported dtypes of matrix products.
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _check_head(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Any, weight: Any, probable: bool
) -> None:
    """Raise ValueError if the shapes do not match."""
    if linear_weight.dim() < 2 or not len(linear_weight):
        raise ValueError(f"linear_weight has shape {tuple(linear_weight.shape)}; allowed: (classes, width)")
    width = linear_weight.shape[-1]
    if not input.dim() or input.shape[-1] != width:
        raise ValueError(f"input has shape {tuple(input.shape)}; allowed for linear_weight: (..., {width})")
    classes, more = len(linear_weight), linear_weight.shape[1:-1]
    wanted = (*input.shape[:-1], *more)
    if not probable and target.shape != wanted:
        raise ValueError(f"target has shape {tuple(target.shape)}; allowed for this input: {tuple(wanted)}")
    if linear_bias is not None and linear_bias.shape != linear_weight.shape[:-1]:
        allowed = tuple(linear_weight.shape[:-1])
        raise ValueError(f"linear_bias has shape {tuple(linear_bias.shape)}; allowed: {allowed}")
    if weight is not None and weight.shape != (classes,):
        raise ValueError(f"weight has shape {tuple(weight.shape)}; allowed: ({classes},)")


def _check_options(reduction: str, label_smoothing: float, slice_size: int | None) -> None:
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"reduction={reduction!r}; allowed: 'none', 'mean' and 'sum'")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing={label_smoothing}; allowed: 0 to 1")
    if slice_size is not None and (not isinstance(slice_size, int) or slice_size < 1):
        raise ValueError(f"slice_size={slice_size!r}; allowed: an integer of at least 1, or None")


def _reference(options: head.Options, input: Tensor, linear_weight: Tensor, *others: Any) -> Tensor:
    """Return PyTorch's loss, which holds all logits. `others`: target, bias and class weights."""
    target, linear_bias, weight = others
    classes, *more = linear_weight.shape[:-1]
    logits = F.linear(
        input.reshape(-1, input.shape[-1]),
        linear_weight.reshape(-1, linear_weight.shape[-1]),
        None if linear_bias is None else linear_bias.reshape(-1),
    )
    shape = (len(logits), classes, *more) if target.is_floating_point() else (len(logits), *more)
    loss = options.loss(logits.view(-1, classes, *more), target.reshape(shape), weight)
    return loss.view(*input.shape[:-1], *more) if options.reduction == "none" else loss
