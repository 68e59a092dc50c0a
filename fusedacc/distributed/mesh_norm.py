"""The norm of gradients of which each rank has a part: one all-reduce for a mesh of shards.

Sums of squares in float64 are reduced: inf and nan show in them, and they are the same on all ranks to the
bit, as their square roots then are. A mesh has one vector, with an entry for each way of being placed on it,
and one collective for each of its dimensions along which anything is sharded: one for FSDP2, with replicas
(HSDP) too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels import norms
from ..kernels.local_parts import is_distributed
from ..kernels.norm_kind import norm_kind


def norm_with_partials(
    tensors: Sequence[Tensor], found: list[Tensor], norm_type: float, dtype: torch.dtype, backend: str
) -> tuple[Tensor, Tensor]:
    """As `norms.norm_with_partials`, of DTensors too, as wholes. Every rank of their meshes calls it."""
    plain = [tensor for tensor in tensors if not is_distributed(tensor)]
    meshes: dict[Any, dict[tuple[int, ...], list[Tensor]]] = {}
    for tensor in tensors:
        if is_distributed(tensor):
            whole = _without_terms(tensor)
            dims = tuple(dim for dim, placed in enumerate(whole.placements) if not placed.is_replicate())
            meshes.setdefault(whole.device_mesh, {}).setdefault(dims, []).append(whole.to_local())
    parts = list(found)
    for mesh, placed in meshes.items():
        own = torch.stack([_own_norm(here, norm_type, backend) for here in placed.values()])
        parts.append(_over_mesh(mesh, list(placed), own, norm_type).to(own.device))
    return norms.norm_with_partials(plain, parts, norm_type, dtype, backend)


def over_group(own: Tensor, norm_type: float, group: Any) -> Tensor:
    """The norm over the ranks of a group, 0-dim; `own`: norms of this rank's parts, a float64 vector."""
    kind = norm_kind(norm_type)
    values = kind.values(own)
    # The parts of one rank are joined as those of ranks are.
    values = values.sum(-1, keepdim=True) if kind.over_ranks == "SUM" else values.amax(-1, keepdim=True)
    dist.all_reduce(values, getattr(dist.ReduceOp, kind.over_ranks), group=group)
    return kind.norms(values)[0]


def _own_norm(parts: list[Tensor], norm_type: float, backend: str) -> Tensor:
    """The norm of what this rank has, in float64."""
    nothing = parts[0].new_zeros(1, dtype=torch.float64)
    return norms.norm_with_partials(parts, [nothing], norm_type, torch.float64, backend)[0]


def _without_terms(tensor: Any) -> Any:
    """The DTensor, its values summed up where ranks have terms of them."""
    from torch.distributed.tensor import Replicate

    if not any(placed.is_partial() for placed in tensor.placements):
        return tensor
    placements = [Replicate() if placed.is_partial() else placed for placed in tensor.placements]
    return tensor.redistribute(placements=placements)


def _over_mesh(mesh: Any, ways: list[tuple[int, ...]], own: Tensor, norm_type: float) -> Tensor:
    """The norms over a mesh of tensors of which this rank's parts have the norms `own`, a float64 vector.

    `ways`: for each entry, the dimensions of the mesh along which these tensors are sharded.
    """
    kind = norm_kind(norm_type)
    values = kind.values(own).to(mesh.device_type)
    for dim in range(mesh.ndim):
        sharded = [dim in way for way in ways]
        if mesh.size(dim) == 1 or not any(sharded):
            continue
        if kind.over_ranks == "SUM" and mesh.get_local_rank(dim) != 0:
            # What all ranks of this dimension have whole counts once.
            values = torch.where(torch.tensor(sharded, device=values.device), values, 0.0)
        dist.all_reduce(values, getattr(dist.ReduceOp, kind.over_ranks), group=mesh.get_group(dim))
    return kind.norms(values)
