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


def norm_with_partials(
    tensors: Sequence[Tensor], partials: list[Tensor], norm_type: float, dtype: torch.dtype, backend: str
) -> tuple[Tensor, Tensor]:
    """Return what `norms.norm_with_partials` does, with DTensors as wholes. All ranks of a mesh call it."""
    plain = [tensor for tensor in tensors if not is_distributed(tensor)]
    meshes: dict[Any, dict[tuple[int, ...], list[Tensor]]] = {}
    for tensor in tensors:
        if is_distributed(tensor):
            whole = _without_terms(tensor)
            dims = tuple(dim for dim, placed in enumerate(whole.placements) if not placed.is_replicate())
            meshes.setdefault(whole.device_mesh, {}).setdefault(dims, []).append(whole.to_local())
    partials = list(partials)
    for mesh, placed in meshes.items():
        own = torch.stack([_own_norm(here, norm_type, backend) for here in placed.values()])
        partials.append(_over_mesh(mesh, list(placed), own, norm_type).to(own.device))
    return norms.norm_with_partials(plain, partials, norm_type, dtype, backend)


def over_group(own: Tensor, norm_type: float, group: Any) -> Tensor:
    """Return the norm over the ranks of a group, 0-dim. own: the norms of this rank's parts, in float64."""
    kind = norm_kind(norm_type)
    values = kind.values(own)
    # Combine the parts of this rank in the same way as those of different ranks.
    values = values.sum(-1, keepdim=True) if kind.over_ranks == "SUM" else values.amax(-1, keepdim=True)
    dist.all_reduce(values, getattr(dist.ReduceOp, kind.over_ranks), group=group)
    return kind.norms(values)[0]


def _own_norm(parts: list[Tensor], norm_type: float, backend: str) -> Tensor:
    """Return the norm of this rank's parts, in float64."""
    nothing = parts[0].new_zeros(1, dtype=torch.float64)
    return norms.norm_with_partials(parts, [nothing], norm_type, torch.float64, backend)[0]


def _without_terms(tensor: Any) -> Any:
    """Return the DTensor with partial values (`Partial` placements) summed over the ranks."""
    from torch.distributed.tensor import Replicate

    if not any(placed.is_partial() for placed in tensor.placements):
        return tensor
    placements = [Replicate() if placed.is_partial() else placed for placed in tensor.placements]
    return tensor.redistribute(placements=placements)


def _over_mesh(mesh: Any, ways: list[tuple[int, ...]], own: Tensor, norm_type: float) -> Tensor:
    """Return the norms over a mesh, a float64 vector.

    For each entry, `ways` has the mesh dimensions along which its tensors are sharded, and `own` the norm of
    this rank's parts.
    """
    kind = norm_kind(norm_type)
    values = kind.values(own).to(mesh.device_type)
    for dim in range(mesh.ndim):
        sharded = [dim in way for way in ways]
        if mesh.size(dim) == 1 or not any(sharded):
            continue
        if kind.over_ranks == "SUM" and mesh.get_local_rank(dim) != 0:
            # Tensors that are replicated over this dimension count once.
            values = torch.where(torch.tensor(sharded, device=values.device), values, 0.0)
        dist.all_reduce(values, getattr(dist.ReduceOp, kind.over_ranks), group=mesh.get_group(dim))
    return kind.norms(values)
