"""Copies of small tensors between devices, for which the host waits only where it must."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to another device; return it as it is if it is there already.

    What is read on a GPU needs no wait: streams order the copy and its readers. A copy to the CPU has no such
    order. The CPU would read memory that the GPU has not written yet, so the host waits for it.
    """
    return tensor.to(device, non_blocking=device.type != "cpu")


def common_device(tensors: Sequence[Tensor]) -> torch.device:
    """Return where to bring numbers of several devices together: the first GPU, or the first device.

    On a GPU nothing has to wait for numbers of the others.
    """
    first = tensors[0].device
    return next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), first)
