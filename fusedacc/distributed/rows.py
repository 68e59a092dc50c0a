"""Tensors with one row for each rank, which let checkpoints store values that differ between ranks.

torch.distributed.checkpoint saves a plain tensor from one rank only, but all rows of a DTensor that is
sharded over the ranks. torch.distributed.tensor takes a second to import, so it is imported only when a
partly filled window is saved or loaded.
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


def with_rows_of_ranks(row: Tensor, place: RankPlace) -> Any:
    """Return a DTensor of one row for each rank, of which this rank's is `row`."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    assert place.group is not None
    mesh = DeviceMesh.from_group(place.group, row.device.type)
    shape = torch.Size((place.count, *row.shape))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(row[None], mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def row_of_rank(saved: Any, place: RankPlace) -> Tensor:
    """Return this rank's row of a result of `with_rows_of_ranks`, or of a plain tensor with all rows.

    Raises:
        ValueError: it is no tensor with one row for each rank.
    """
    from torch.distributed.tensor import DTensor

    if isinstance(saved, Tensor) and saved.dim() > 0 and saved.shape[0] == place.count:
        if not isinstance(saved, DTensor):
            return saved[place.rank]
        local = saved.to_local()
        if len(local) == 1:
            return local[0]
    raise ValueError(f"it is no tensor with a row for each of {place.count} ranks")
