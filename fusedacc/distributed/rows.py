"""Tensors of which every rank has one row: so checkpoints carry what differs from rank to rank.

torch.distributed.checkpoint keeps one rank's part of a plain tensor. Of a DTensor that is sharded over the
ranks it keeps all, and another number of ranks reads each its share. torch.distributed.tensor takes a second
to import, which only who saves or loads a part-filled window waits for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class RankPlace:
    """A rank among those whose sums come together; the only one, without a group, if nothing is given."""

    rank: int = 0
    count: int = 1
    group: dist.ProcessGroup | None = None

    @classmethod
    def within(cls, group: dist.ProcessGroup) -> RankPlace:
        return cls(dist.get_rank(group), dist.get_world_size(group), group)

    def share_of(self, rows: int) -> range:
        """Which of so many rows are this rank's, as a DTensor has them."""
        each = -(-rows // self.count)
        return range(min(self.rank * each, rows), min((self.rank + 1) * each, rows))


def spread(own: Tensor, place: RankPlace, rows: int | None = None) -> Any:
    """A DTensor of which `own` are this rank's of `rows` (None: one a rank); no rank waits for another."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    assert place.group is not None
    mesh = DeviceMesh.from_group(place.group, own.device.type)
    shape = torch.Size((place.count if rows is None else rows, *own.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def room(shape: torch.Size, dtype: torch.dtype, place: RankPlace) -> Any:
    """Where torch.distributed.checkpoint reads this rank's rows of a tensor to."""
    own = torch.empty((len(place.share_of(shape[0])), *shape[1:]), dtype=dtype)
    return own if place.group is None else spread(own, place, shape[0])


def own_rows(saved: Tensor, place: RankPlace) -> Tensor:
    """This rank's rows of what `spread` has made, or of all rows in a plain tensor.

    Raises:
        ValueError: it is of no rows, or spread over another number of ranks.
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
            f"it holds the rows of one of {ranks} ranks; the optimizer's sums are of {place.count}. Allowed: "
            "as many ranks, each with what it has saved, and data_parallel= as it was; or another number by "
            "torch.distributed.checkpoint"
        )
    return saved.to_local()
