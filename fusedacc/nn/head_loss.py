"""A `torch.nn.LinearCrossEntropyLoss` (torch 2.13 or newer) without a tensor of all logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from .cross_entropy import linear_cross_entropy
from .patched_forward import PATCHED, PatchedForward, is_stock

#: Read at import, before a user can replace it. None before torch 2.13.
_STOCK = getattr(getattr(nn, "LinearCrossEntropyLoss", None), "forward", None)


class PatchedHeadLoss(PatchedForward):
    """Replaces the forward of a `LinearCrossEntropyLoss`. The weight is that of its Linear."""

    @staticmethod
    def forward(  # type: ignore[override]  # a criterion takes targets too
        module: Any, input: Tensor, target: Tensor
    ) -> Tensor:
        ours = is_compiling() or module.__dict__.get(PATCHED) is not None
        if not ours or module.options is not None or module.out_features:
            return type(module).forward(module, input, target)
        return linear_cross_entropy(
            input,
            module.linear.weight,
            target,
            linear_bias=module.linear.bias,
            weight=module.weight,
            reduction=module.reduction,
            ignore_index=module.ignore_index,
            label_smoothing=module.label_smoothing,
        )


def weight_of(module: nn.Module) -> Tensor | None:
    """Return the weight of a `LinearCrossEntropyLoss` that can be replaced; None for all other modules."""
    loss: Any = module
    if _STOCK is None or type(module).forward is not _STOCK or not is_stock(module):
        return None
    if loss.options is not None or loss.out_features or hasattr(type(module), "__copy__"):
        return None
    weight = getattr(loss.linear, "weight", None)
    return weight if isinstance(weight, torch.nn.Parameter) else None
