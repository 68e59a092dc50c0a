"""Reduces a group of FSDP2 with fewer roundings, bytes and copies than FSDP2's own reduction on gloo."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import functional
from ..kernels import launch_events
from .torch_names import missing


class _Taken(Tensor):
    """Takes the place of a gradient that FSDP2 need not copy: it has a shape and a dtype, and no memory."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types its own as a C function without arguments
        cls, func: Any, types: Any, args: Any, kwargs: Any
    ) -> None:
        if func is not torch.ops.fsdp.chunk_cat.default:
            raise NotImplementedError(f"{func}: the gradient was given to a ShardExchange")


class ShardExchange:
    """Replaces FSDP2's `ReduceScatter` in one reduction of a group.

    FSDP2 copies all gradients of a group into one tensor of the wire's dtype, and gloo adds the tensors of
    all ranks in that dtype. Here each rank sends the others only their parts, in the same dtype, and adds
    what it receives to its own part in float32. So a gradient is rounded only where it is sent. On gloo this
    sends half as many bytes, and takes less time.

    If `take` has got the gradients, FSDP2 copies nothing: it handles tensors without memory in their place.

    wire: the dtype that is sent.
    """

    def __init__(self, wire: torch.dtype) -> None:
        self.wire = wire
        self._taken: list[Tensor] = []
        self._has_input = False

    def may_take(self, gradients: Mapping[Any, Tensor]) -> bool:
        """Whether `take` supports all of these gradients of FSDP2's parameters."""
        divides = self.wire == torch.float16  # FSDP2 divides its copy before it is sent
        return not divides and all(
            type(gradient) is Tensor
            and gradient.dtype == torch.float32
            and not missing("reduced FSDP2 parameter", sharded)
            and sharded.fsdp_placement.dim == 0
            for sharded, gradient in gradients.items()
        )

    def take(self, gradient: Tensor) -> Tensor:
        """Keep a gradient for the reduction, and return what FSDP2 must get in its place."""
        self._taken.append(gradient)
        return Tensor._make_wrapper_subclass(_Taken, gradient.shape, dtype=self.wire, device=gradient.device)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the reduction's input in the first call, and in the second its float32 result."""
        if self._has_input:
            return torch.empty(size, dtype=torch.float32, device=device)
        self._has_input = True
        return torch.empty(size, dtype=self.wire, device="meta" if self._taken else device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        with launch_events.phase("reduce"):
            self._exchange(output_tensor, input_tensor, group, op)

    def _exchange(self, total: Tensor, parts: Tensor, group: Any, op: Any) -> None:
        """Send each other rank its part, and write the sum of this rank's parts to `total`."""
        ranks, own, size = group.size(), group.rank(), len(total)
        scale = 1 / ranks if op == dist.ReduceOp.AVG else 1.0
        others = [rank for rank in range(ranks) if rank != own]
        gradients, self._taken = self._taken or [parts], []
        sent = torch.empty(len(others), size, dtype=self.wire, device=total.device)
        if any(len(gradient) % ranks for gradient in gradients):
            sent.zero_()  # FSDP2 pads the last parts
        _write([total], gradients, [own], ranks, scale)
        _write(sent, gradients, others, ranks, 1.0)
        gradients.clear()
        received, sizes = torch.empty_like(sent), [int(rank != own) for rank in range(ranks)]
        dist.all_to_all_single(received, sent, sizes, sizes, group=group)
        for part in received:
            functional.scale_accumulate_([total], [part], scale)


def _write(
    places: Iterable[Tensor], gradients: Sequence[Tensor], to: Sequence[int], ranks: int, scale: float
) -> None:
    """Write these ranks' parts of all gradients, times `scale`, to a place for each rank."""
    outputs: list[Tensor] = []
    inputs: list[Tensor] = []
    for place, rank in zip(places, to, strict=True):
        at = 0
        for gradient in gradients:
            rows = -(-len(gradient) // ranks)
            part = gradient[rank * rows : (rank + 1) * rows]
            inputs.append(part)
            outputs.append(place[at : at + part.numel()].view(part.shape))
            at += rows * gradient[:1].numel()
    functional.scale_cast_(outputs, inputs, scale)


def exchange_for(group: Any) -> ShardExchange | None:
    """Return the reduction for a group, or None if FSDP2's own must do it.

    The choice depends only on what all ranks have in common, because all must do the same.
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
    backends = dist.get_backend_config(ranks).split(",")  # by device, such as "cpu:gloo"
    on_gloo = info.mesh.device_type == "cpu" and "cpu:gloo" in backends
    known = wire in (torch.float32, torch.bfloat16, torch.float16)
    return ShardExchange(wire) if on_gloo and known and ranks.size() > 1 else None


def wire_dtype(group: Any) -> torch.dtype:
    """Return the dtype in which FSDP2 reduces the gradients of a group."""
    sharded = group.fsdp_params[0]
    if hasattr(sharded, "unsharded_grad_dtype"):  # torch 2.15
        return sharded.unsharded_grad_dtype or sharded.orig_dtype
    return sharded.reduce_dtype or sharded._unsharded_param.dtype
