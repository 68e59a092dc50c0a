"""Tensors with one row for each rank, which let checkpoints store values that differ between ranks.

torch.distributed.checkpoint saves a plain tensor from one rank only. It saves all rows of a DTensor that is
sharded over the ranks, and another number of ranks can read them. torch.distributed.tensor takes a second to
import, so it is imported only when a partly filled window is saved or loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class RankPlace:
    """This rank among the ranks whose sums are reduced. The default is a single process without a group."""

    rank: int = 0
    count: int = 1
    group: dist.ProcessGroup | None = None

    @classmethod
    def within(cls, group: dist.ProcessGroup) -> RankPlace:
        return cls(dist.get_rank(group), dist.get_world_size(group), group)

    def share_of(self, rows: int) -> range:
        """Return the indices of this rank's rows, out of `rows`, as a sharded DTensor distributes them."""
        each = -(-rows // self.count)
        return range(min(self.rank * each, rows), min((self.rank + 1) * each, rows))


def spread(own: Tensor, place: RankPlace, rows: int | None = None) -> Any:
    """Return a DTensor of `rows` rows (None: one for each rank), of which this rank has `own`."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    assert place.group is not None
    mesh = DeviceMesh.from_group(place.group, own.device.type)
    shape = torch.Size((place.count if rows is None else rows, *own.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def room(shape: torch.Size, dtype: torch.dtype, place: RankPlace) -> Any:
    """Return an uninitialised tensor into which torch.distributed.checkpoint reads this rank's rows."""
    own = torch.empty((len(place.share_of(shape[0])), *shape[1:]), dtype=dtype)
    return own if place.group is None else spread(own, place, shape[0])


def own_rows(saved: Tensor, place: RankPlace) -> Tensor:
    """Return this rank's rows of a result of `spread`, or of a plain tensor with all rows.

    Raises ValueError if it does not have this rank's rows.
    """
    from torch.distributed.tensor import DTensor

    if saved.dim() == 0:
        raise ValueError("it has no rows")
    if not isinstance(saved, DTensor):
        share = place.share_of(saved.shape[0])
        return saved[share.start : share.stop]
    ranks = saved.device_mesh.size()
    if ranks != place.count:
        raise ValueError(
            f"it holds the rows of one of {ranks} ranks, but the optimizer has {place.count}. Allowed: the "
            "same number of ranks and data_parallel=, each rank with its own file; or another number with "
            "torch.distributed.checkpoint"
        )
    return saved.to_local()
