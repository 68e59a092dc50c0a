"""FSDP2 on a mesh of replicas and shards (HSDP): sums of shards that are not all-reduced yet.

After `set_requires_all_reduce(False)`, FSDP2 reduce-scatters the gradients of each micro-batch inside each
replica, and adds the shards to one flat tensor for each parameter group. The next backward pass with
`set_requires_all_reduce(True)` all-reduces this tensor over the replicas. Two things differ with a wrapper:

- The flat tensor is float32 if FSDP2 reduces in bfloat16 or float16: adding rounds to 16 bits only once.
- The flat tensor has room for each parameter that has had a gradient in this window, and a parameter without
  a gradient adds zeros. FSDP2 leaves out parameters without a gradient. If these differ between
  micro-batches, FSDP2 raises, or adds gradients of one parameter to those of another.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.torch_private import missing, runs_as_written
from .fsdp_objects import sums_apart, wire_dtype

#: For each group: the positions in `fsdp_params` of the parameters in its flat tensor.
_positions: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()


def is_hybrid(group: Any) -> bool:
    """Whether a parameter group is sharded inside replicas, on a mesh of two dimensions."""
    info = group.mesh_info
    return info.replicate_mesh_dim is not None and info.shard_mesh_dim is not None


def why_not(group: Any) -> str:
    """Return which private attribute of FSDP2 this file needs and torch lacks; empty if it has all."""
    why = missing("hybrid FSDP2 group", group)
    for sharded in group.fsdp_params:
        why = why or missing("hybrid FSDP2 parameter", sharded)
    return why


def waits(group: Any) -> bool:
    """Whether the group's backward passes skip the all-reduce, or have skipped it in this window."""
    return is_hybrid(group) and (not group.all_reduce_grads or group._partial_reduce_output is not None)


def is_known(group: Any) -> bool:
    """Whether the group has no flat tensor, or has one whose parameters are known."""
    return group._partial_reduce_output is None or group in _positions


def replace_post_backward(group: Any) -> None:
    """Replace the group's `post_backward` by this file's, unless another one calls it already."""
    if "post_backward" not in group.__dict__ and not why_not(group):
        group.post_backward = functools.partial(_replaced, weakref.ref(group))


def restore_post_backward(group: Any) -> None:
    """Restore FSDP2's own `post_backward` if `replace_post_backward` has replaced it."""
    if getattr(group.__dict__.get("post_backward"), "func", None) is _replaced:
        del group.post_backward


@runs_as_written
def _replaced(reference: weakref.ref[Any], *arguments: Any) -> None:
    group = reference()
    if group is not None:
        post_backward(group, *arguments)


@runs_as_written
def post_backward(group: Any, *arguments: Any) -> None:
    """Run FSDP2's own `post_backward`, which reduces the gradients of a backward pass.

    Args:
        group: the parameter group.
        arguments: those with which autograd calls it.
    """
    run = functools.partial(type(group).post_backward, group, *arguments)
    if not (group.reduce_grads and waits(group)) or why_not(group) or not is_known(group):
        return run()
    total = group._partial_reduce_output
    held = [] if total is None else _positions[group]
    present = [index for index, sharded in enumerate(group.fsdp_params) if _has_gradient(group, sharded)]
    if not (present or group.all_reduce_grads):
        return run()  # nothing to add
    positions = sorted({*held, *present})
    with torch.no_grad():
        _add_zeros(group, [index for index in positions if index not in present])
        if total is not None and positions != held:
            group._partial_reduce_output = _with_room(group, total, held, positions)
    run()
    if group._partial_reduce_output is None:
        _positions.pop(group, None)
        return None
    _positions[group] = positions
    _widen(group)
    return None


def _has_gradient(group: Any, sharded: Any) -> bool:
    """Whether FSDP2 reduces a gradient of this parameter in its next `post_backward`."""
    unsharded = getattr(sharded, "_unsharded_param", None)
    if unsharded is None:
        return False
    reduces_zeros = getattr(group, "reduce_scatter_unused_params", False) and unsharded.requires_grad
    return reduces_zeros or unsharded.grad is not None or sharded.unsharded_accumulated_grad is not None


def _add_zeros(group: Any, positions: Sequence[int]) -> None:
    """Give zero gradients to the unsharded parameters at these positions, in the dtype of the others."""
    gradients = [_gradient(sharded) for sharded in group.fsdp_params]
    dtype = next((gradient.dtype for gradient in gradients if gradient is not None), None)
    for index in positions:
        sharded = group.fsdp_params[index]
        zeros = torch.zeros_like(sharded._unsharded_param, dtype=dtype or wire_dtype(group))
        if sums_apart(sharded):
            sharded.unsharded_accumulated_grad = zeros
        else:
            sharded._unsharded_param.grad = zeros


def _gradient(sharded: Any) -> Tensor | None:
    """Return the gradient of an unsharded parameter that FSDP2 reduces next."""
    unsharded = getattr(sharded, "_unsharded_param", None)
    if unsharded is None:
        return None
    sum_apart: Tensor | None = sharded.unsharded_accumulated_grad
    return unsharded.grad if sum_apart is None else sum_apart


def _with_room(group: Any, total: Tensor, held: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Return the flat tensor with zeros for the positions that it does not hold yet."""
    sizes = [sharded.padded_sharded_param_size.numel() for sharded in group.fsdp_params]
    with _reducing(group):
        parts = dict(zip(held, total.split([sizes[index] for index in held]), strict=True))
        return torch.cat(
            [parts[index] if index in parts else total.new_zeros(sizes[index]) for index in positions]
        )


def _widen(group: Any) -> None:
    """Cast a flat tensor of 16 bits to float32. FSDP2 then adds the next shards in float32."""
    total = group._partial_reduce_output
    if total.dtype in (torch.bfloat16, torch.float16):
        with torch.no_grad(), _reducing(group):
            group._partial_reduce_output = total.float()


def _reducing(group: Any) -> Any:
    """Return the context of the stream on which FSDP2 makes the flat tensor and adds to it."""
    return group.device_handle.stream(group.comm_ctx.reduce_scatter_stream)
