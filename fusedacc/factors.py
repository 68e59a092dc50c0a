"""Factors: what is multiplied by, a float or a 0-dim tensor, which is read on its device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .checks import computation_dtype


def is_one(scale: float | Tensor) -> bool:
    """Whether there is nothing to multiply; what is on a device is not asked."""
    return not isinstance(scale, Tensor) and scale == 1.0


def is_deferrable(factor: float | Tensor, dtype: torch.dtype) -> bool:
    """Whether a sum of this dtype that is multiplied later has the bits of one that is multiplied now.

    What is computed in its own dtype is not rounded in between. bfloat16 is, but has float32's exponents, so
    that powers of two round nothing above its smallest normal number.
    """
    if is_one(factor) or computation_dtype(dtype) == dtype:
        return True
    return dtype is torch.bfloat16 and not isinstance(factor, Tensor) and math.frexp(factor)[0] == 0.5


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
