"""Factors: what is multiplied by, a float or a 0-dim tensor, which is read on its device."""

from __future__ import annotations

import torch
from torch import Tensor


def is_one(scale: float | Tensor) -> bool:
    """Whether there is nothing to multiply; what is on a device is not asked."""
    return not isinstance(scale, Tensor) and scale == 1.0


def scaled(tensor: Tensor, scale: float | Tensor) -> Tensor:
    if is_one(scale):
        return tensor
    scale = near(scale, tensor)
    if not tensor.is_sparse or not isinstance(scale, Tensor):
        return tensor * scale
    # A product with a tensor would sum repeated indices, and so round elsewhere than stock.
    indices, values = tensor._indices(), tensor._values() * scale
    return torch.sparse_coo_tensor(indices, values, tensor.shape, is_coalesced=tensor.is_coalesced())


def near(scale: float | Tensor, tensor: Tensor) -> float | Tensor:
    """The scale where the tensor is."""
    return scale.to(tensor.device, non_blocking=True) if isinstance(scale, Tensor) else scale
