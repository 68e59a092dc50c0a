"""Reduce FSDP2's gradients with one rounding, to the dtype of the wire, and keep the float32 result.

FSDP2's own reduction rounds up to three times if the wire and the shards are bfloat16: each rank's gradient
before it is sent, the sum of the ranks, and the shard. `Reduction` sends each part to its rank in the same
dtype, and that rank adds the parts in float32. The hook on the shard takes that sum instead of its cast.

On gloo this sends half as much as its reduce-scatter, and takes less time. It was not measured on other
backends, so they reduce-scatter as FSDP2 does: there only the last cast is avoided.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import functional
from ..kernels import launch_events
from ..kernels.local_parts import local, placed_as
from .torch_names import missing

#: Tells these messages from others between the same ranks.
_TAG = 35


class Reduction:
    """FSDP2's `ReduceScatter`, for one reduction of one group.

    Args:
        own: FSDP2's.
        exchanges: whether ranks send each other their parts; else they reduce-scatter as FSDP2 does.
        wire: the dtype of what is sent.
        fresh: whether FSDP2 stores the result in p.grad, instead of adding it to a gradient there.
    """

    def __init__(self, own: Any, exchanges: bool, wire: torch.dtype, fresh: bool) -> None:
        self._own, self._exchanges, self._wire, self._fresh = own, exchanges, wire, fresh
        self._sent: Tensor | None = None
        self._sum: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate in the first call what is sent, and in the second the float32 sum."""
        if self._sent is None:
            self._sent = self._own.allocate(size, dtype=self._wire, device=device)
            return self._sent
        self._sum = self._own.allocate(size, dtype=torch.float32, device=device)
        return self._sum

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        if not self._exchanges:
            return self._own(output_tensor, input_tensor, group, op, async_op)
        with launch_events.phase("reduce"):
            self._exchange(output_tensor, input_tensor, group, op)
        return None

    def _exchange(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any) -> None:
        """Send each rank its part, and add what the others send."""
        ranks, own = group.size(), group.rank()
        scale, parts = 1 / ranks if op == dist.ReduceOp.AVG else 1.0, input_tensor.view(ranks, -1)
        functional.scale_accumulate_([output_tensor], [parts[own]], scale, overwrite=True)
        received = torch.empty_like(parts[own])
        for distance in range(1, ranks):
            to, of = (own + distance) % ranks, (own - distance) % ranks
            works = [
                dist.isend(parts[to], group=group, group_dst=to, tag=_TAG),
                dist.irecv(received, group=group, group_src=of, tag=_TAG),
            ]
            for work in works:
                assert work is not None
                work.wait()
            functional.scale_accumulate_([output_tensor], [received], scale)

    def exact(self, gradient: Any) -> Any:
        """Return a shard's gradient, a view of the cast result, as a view of the float32 sum."""
        part, total = local(gradient), self._sum
        if total is None or not self._fresh or part.dtype == total.dtype or part.device != total.device:
            return gradient
        return placed_as(gradient, total.as_strided(part.shape, part.stride(), part.storage_offset()))


def reduction_for(group: Any) -> Reduction | None:
    """Return a reduction of a group with fewer roundings than FSDP2's own, or None if there is none.

    Whether ranks exchange parts depends only on what all ranks have in common, because all must do the same.
    """
    info = group.mesh_info
    if (
        missing("FSDP2 group's reduction", group)
        or type(group._reduce_scatter_comm).__name__ != "DefaultReduceScatter"
        or group._all_reduce_hook is not None  # expects a tensor of the wire's dtype
        or group.gradient_divide_factor is not None  # NCCL multiplies by it
        or info.shard_mesh_dim is None
        or info.replicate_mesh_dim is not None  # the replicas' all-reduce would send float32
    ):
        return None
    ranks, wire = info.mesh.get_group(info.shard_mesh_dim), wire_dtype(group)
    shards = [each.sharded_param for each in group.fsdp_params]
    fresh = all(shard.grad is None for shard in shards)
    backends = dist.get_backend_config(ranks).split(",")  # by device, such as "cpu:gloo"
    on_gloo = info.mesh.device_type == "cpu" and "cpu:gloo" in backends
    exchanges = on_gloo and ranks.size() > 1 and wire in (torch.float32, torch.bfloat16, torch.float16)
    keeps_sum = wire == torch.float32 and fresh and any(shard.dtype != wire for shard in shards)
    return Reduction(group._reduce_scatter_comm, exchanges, wire, fresh) if exchanges or keeps_sum else None


def wire_dtype(group: Any) -> torch.dtype:
    """Return the dtype in which FSDP2 reduces the gradients of a group."""
    sharded = group.fsdp_params[0]
    return sharded.reduce_dtype or sharded._unsharded_param.dtype
