"""The part of a DTensor that this rank has, which kernels work on, and DTensors made of such parts.

A DTensor has no memory of its own: address, storage and size are those of its local tensor.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor


def is_distributed(tensor: Any) -> bool:
    """Whether it is a DTensor. Asked of every parameter: nothing is imported for those that are none."""
    return hasattr(tensor, "_local_tensor")


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, as it is in memory; another tensor as it is."""
    return cast("Tensor", getattr(tensor, "_local_tensor", tensor))


def placed_as(whole: Any, part: Tensor) -> Tensor:
    """A DTensor of this rank's `part`, of the shape and placement of the DTensor `whole`."""
    from torch.distributed.tensor import DTensor

    mesh, placements = whole.device_mesh, whole.placements
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def are_alike(first: Any, second: Any) -> bool:
    """Whether two DTensors have the same parts of the same ranks, none of them a term of a sum."""
    return (
        first.device_mesh == second.device_mesh
        and first.placements == second.placements
        and not any(placement.is_partial() for placement in first.placements)
    )


def distributed_as(saved: Tensor, whole: Any) -> Tensor:
    """A saved tensor where the DTensor `whole` is; what is no DTensor is all of it, which every rank has."""
    from torch.distributed.tensor import distribute_tensor

    if is_distributed(saved) or not is_distributed(whole):
        return saved
    here = saved.to(whole.device)
    return distribute_tensor(here, whole.device_mesh, whole.placements, src_data_rank=None)
