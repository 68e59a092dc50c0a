"""`linear_cross_entropy`: checks arguments, and decides when PyTorch computes the loss from all logits.

`PatchedHeadLoss` does the same for a `torch.nn.LinearCrossEntropyLoss` (torch 2.13 or newer).
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from ..kernels import checks, torch_state
from ..kernels.softmax import Options, compute_dtype
from ..kernels.torch_private import innermost_transform, transforms_are_active
from . import compiled, head
from .patched_forward import PATCHED, TRACED, PatchedForward, is_stock


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
    probable = target.is_floating_point() and target.shape == (*input.shape[:-1], *linear_weight.shape[:-1])
    _check_shapes(input, linear_weight, None if probable else target, linear_bias, weight)
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"reduction={reduction!r}; allowed: 'none', 'mean' and 'sum'")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing={label_smoothing}; allowed: 0 to 1")
    if slice_size is not None and (not isinstance(slice_size, int) or slice_size < 1):
        raise ValueError(f"slice_size={slice_size!r}; allowed: an integer of at least 1, or None")
    if probable and ignore_index is not None:
        raise ValueError(f"ignore_index={ignore_index} does not go with class probabilities as the target")
    ignored = -100 if ignore_index is None else ignore_index
    options = Options(reduction, ignored, label_smoothing, slice_size)
    operands = head.Operands(input, linear_weight, linear_bias, target, weight)
    if probable or linear_weight.dim() > 2:
        _warn_once("class probabilities" if probable else "a weight of more than two dimensions")
        return head.logits_loss(operands, options)
    dtype = linear_weight.dtype
    device = input.device.type
    compiling = is_compiling()
    tensors = [tensor for tensor in operands if tensor is not None]
    plain = all(checks.is_plain(tensor) and tensor.device == input.device for tensor in tensors)
    operand_dtypes = {tensor.dtype for tensor in (input, linear_weight, linear_bias) if tensor is not None}
    autocasts = plain and torch.is_autocast_enabled(device) and torch.float64 not in operand_dtypes
    if autocasts:
        dtype = torch.get_autocast_dtype(device)
    if (
        (transforms_are_active() if compiling else innermost_transform() is not None)
        or forward_ad._current_level >= 0
        or (not compiling and torch.jit.is_tracing())
        or torch_state.no_python_functions
        or not plain
        or dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        or target.dtype not in (torch.int64, torch.uint8)
        or (len(operand_dtypes) > 1 and not autocasts)
        or (weight is not None and weight.requires_grad)
    ):
        return head.logits_loss(operands, options)
    class_weights = None if weight is None else weight.to(compute_dtype(dtype)).contiguous()
    rows = input.reshape(-1, input.shape[-1]).to(dtype)
    labels = target.reshape(-1).long().contiguous()
    if compiling:
        traced: Any = getattr(linear_weight, TRACED, None)
        ticket = traced.ticket if compiled.accumulates(traced, linear_weight) else None
        loss, _ = head.compiled_loss(
            rows,
            linear_weight,
            linear_bias,
            labels,
            class_weights,
            ticket,
            reduction,
            ignored,
            label_smoothing,
            slice_size,
        )
    else:
        owner = head.head_of(linear_weight) if torch.is_grad_enabled() else None
        if owner is not None:
            owner.declare_head()
        loss = head.HeadFunction.apply(
            rows, linear_weight, linear_bias, labels, class_weights, options, owner
        )
    return loss.view(target.shape) if reduction == "none" else loss


def _check_shapes(
    input: Tensor, linear_weight: Tensor, target: Tensor | None, linear_bias: Any, weight: Any
) -> None:
    """Raise ValueError if the shapes do not match."""
    if linear_weight.dim() < 2 or not len(linear_weight):
        raise ValueError(f"linear_weight has shape {tuple(linear_weight.shape)}; allowed: (classes, width)")
    classes, *more, width = linear_weight.shape
    if not input.dim() or input.shape[-1] != width:
        raise ValueError(f"input has shape {tuple(input.shape)}; allowed for linear_weight: (..., {width})")
    for name, tensor, shape in (
        ("target", target, (*input.shape[:-1], *more)),
        ("linear_bias", linear_bias, (classes, *more)),
        ("weight", weight, (classes,)),
    ):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; allowed: {shape}")


@functools.cache
def _warn_once(why: str) -> None:
    """Warn that PyTorch computes the loss, once for each reason."""
    warnings.warn(
        f"fusedacc.nn.functional.linear_cross_entropy: {why}; PyTorch computes the loss from all logits",
        stacklevel=3,
    )


#: Read at import, before a user can replace it. None before torch 2.13.
_STOCK = getattr(getattr(nn, "LinearCrossEntropyLoss", None), "forward", None)


class PatchedHeadLoss(PatchedForward):
    """Replaces the forward of a `LinearCrossEntropyLoss`. The weight is that of its Linear."""

    # The forward of a loss takes a target too, which mypy does not accept of a subclass.
    @staticmethod
    def forward(module: Any, input: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        ours = is_compiling() or module.__dict__.get(PATCHED) is not None
        ours = ours and type(module).forward is _STOCK
        if not ours or module.options is not None or module.out_features:
            return type(module).forward(module, input, target)
        linear = module.linear
        weight = linear.weight
        bias = linear.bias
        shape = module.num_classes, linear.in_features
        if weight.shape != shape:
            weight = weight.reshape(shape)
        if bias is not None and bias.shape != shape[:1]:
            bias = bias.reshape(shape[:1])
        names = "weight", "reduction", "ignore_index", "label_smoothing"
        given = {name: getattr(module, name) for name in names}
        return linear_cross_entropy(input, weight, target, linear_bias=bias, **given)


def loss_weight(module: nn.Module) -> Tensor | None:
    """Return the weight of a `LinearCrossEntropyLoss` that can be replaced; None for all other modules."""
    loss: Any = module
    if _STOCK is None or type(module).forward is not _STOCK or not is_stock(module):
        return None
    if loss.options is not None or loss.out_features or hasattr(type(module), "__copy__"):
        return None
    # Not the attribute, because a property may compute another value each time.
    weight = getattr(loss.linear, "_parameters", {}).get("weight")
    return weight if isinstance(weight, nn.Parameter) else None
