"""The gradient norm if each rank has a part of the gradients: one all-reduce for a mesh of shards.

Sums of squares are reduced in float64. They propagate inf and nan, and are bit-identical on all ranks, so
their square roots are too. Each mesh has one vector, with an entry for each combination of sharded mesh
dimensions. Each mesh dimension that shards a tensor costs one collective: one for FSDP2, also with replicas
(HSDP).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels import norms
from ..kernels.constants import norm_kind
from ..kernels.local_parts import is_distributed

#: The dimensions of a mesh along which a tensor is sharded.
ShardedDims = tuple[int, ...]


def norm_with_partials(
    tensors: Sequence[Tensor], partials: list[Tensor], norm_type: float, dtype: torch.dtype, backend: str
) -> tuple[Tensor, Tensor]:
    """Return what `norms.norm_with_partials` does, with DTensors as wholes. All ranks of a mesh call it."""
    plain = [tensor for tensor in tensors if not is_distributed(tensor)]
    partials = list(partials)
    for mesh, parts_by_dims in _parts_of_rank(tensors).items():
        norms_of_rank = [_norm_of_parts(parts, norm_type, backend) for parts in parts_by_dims.values()]
        of_rank = torch.stack(norms_of_rank)
        partials.append(_over_mesh(mesh, list(parts_by_dims), of_rank, norm_type).to(of_rank.device))
    return norms.norm_with_partials(plain, partials, norm_type, dtype, backend)


def _parts_of_rank(tensors: Sequence[Tensor]) -> dict[Any, dict[ShardedDims, list[Tensor]]]:
    """Return this rank's parts of the DTensors, by mesh and by the dimensions that shard them.

    The keys decide the collectives. They and their order depend on the placements alone, so all ranks of a
    mesh have the same ones, even if a rank's part is empty.
    """
    parts: dict[Any, dict[ShardedDims, list[Tensor]]] = {}
    for tensor in tensors:
        if is_distributed(tensor):
            summed = _without_terms(tensor)
            sharded_dims = tuple(
                dim for dim, placement in enumerate(summed.placements) if not placement.is_replicate()
            )
            of_mesh = parts.setdefault(summed.device_mesh, {})
            of_mesh.setdefault(sharded_dims, []).append(summed.to_local())
    return parts


def over_group(of_rank: Tensor, norm_type: float, group: Any) -> Tensor:
    """Return the norm over the ranks of a group, 0-dim. of_rank: norms of this rank's parts, in float64."""
    kind = norm_kind(norm_type)
    values = kind.values(of_rank)
    # Combine the parts of this rank in the same way as those of different ranks.
    values = values.sum(-1, keepdim=True) if kind.over_ranks == "SUM" else values.amax(-1, keepdim=True)
    dist.all_reduce(values, getattr(dist.ReduceOp, kind.over_ranks), group=group)
    return kind.norms(values)[0]


def _norm_of_parts(parts: list[Tensor], norm_type: float, backend: str) -> Tensor:
    """Return the norm of this rank's parts, in float64."""
    zero = parts[0].new_zeros(1, dtype=torch.float64)
    norm, _ = norms.norm_with_partials(parts, [zero], norm_type, torch.float64, backend)
    return norm


def _without_terms(tensor: Any) -> Any:
    """Return the DTensor with partial values (`Partial` placements) summed over the ranks."""
    from torch.distributed.tensor import Replicate

    if not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    return tensor.redistribute(placements=placements)


def _over_mesh(mesh: Any, sharded_dims: list[ShardedDims], of_rank: Tensor, norm_type: float) -> Tensor:
    """Return the norms over a mesh, a float64 vector.

    Args:
        mesh: the mesh.
        sharded_dims: the entries of the vector, by the mesh dimensions that shard their tensors.
        of_rank: for each entry, the norm of this rank's parts.
        norm_type: of one of the `NORM_KINDS`.
    """
    kind = norm_kind(norm_type)
    values = kind.values(of_rank).to(mesh.device_type)
    # After the turn of a dimension, an entry that it shards has the value over its ranks. Entries that it
    # does not shard are equal on its ranks, before and after.
    for dim in range(mesh.ndim):
        is_sharded = [dim in dims for dims in sharded_dims]
        if mesh.size(dim) == 1 or not any(is_sharded):
            continue
        if kind.over_ranks == "SUM" and mesh.get_local_rank(dim) != 0:
            # One collective adds all entries. Only the first rank gives those that are equal on all ranks.
            values = torch.where(torch.tensor(is_sharded, device=values.device), values, 0.0)
        dist.all_reduce(values, getattr(dist.ReduceOp, kind.over_ranks), group=mesh.get_group(dim))
    return kind.norms(values)
