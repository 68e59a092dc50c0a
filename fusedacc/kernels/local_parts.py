"""The local part of a DTensor, which kernels work on, and DTensors made from such parts.

A DTensor has no memory: address, storage and size are those of its local tensor.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from torch import Tensor


def is_distributed(tensor: Any) -> bool:
    """Return whether it is a DTensor, without importing anything."""
    return hasattr(tensor, "_local_tensor")


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; return another tensor unchanged."""
    return cast("Tensor", getattr(tensor, "_local_tensor", tensor))


def placed_as(whole: Any, part: Tensor) -> Tensor:
    """Return a DTensor made of this rank's `part`, with the shape and placement of the DTensor `whole`."""
    from torch.distributed.tensor import DTensor

    spec = whole._spec
    if spec.tensor_meta.dtype != part.dtype:
        spec = dataclasses.replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=part.dtype))
    # `DTensor.from_local` does the same in ten times as long.
    return DTensor(part, spec, requires_grad=False)


def are_alike(first: Any, second: Any) -> bool:
    """Return whether two DTensors have the same placement, and neither is a partial sum."""
    return (
        first.device_mesh == second.device_mesh
        and first.placements == second.placements
        and not any(placement.is_partial() for placement in first.placements)
    )


def distributed_as(saved: Tensor, whole: Any) -> Tensor:
    """Return a saved tensor with the placement of `whole`. A saved plain tensor is complete on every rank."""
    from torch.distributed.tensor import distribute_tensor

    if is_distributed(saved) or not is_distributed(whole):
        return saved
    here = saved.to(whole.device)
    return distribute_tensor(here, whole.device_mesh, whole.placements, src_data_rank=None)
