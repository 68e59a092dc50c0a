"""FSDP2's private objects: the states of its modules, and their parameter groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..kernels.torch_private import composable_states


def fsdp_states() -> Iterator[tuple[torch.nn.Module, Any]]:
    """Yield the modules of this process that `fully_shard` was applied to, with their states."""
    from torch.distributed.fsdp import FSDPModule

    references: dict[torch.nn.Module, Any] = composable_states()._module_state_mapping
    for module, reference in list(references.items()):
        if isinstance(module, FSDPModule):
            yield module, reference()


def groups_of(state: Any) -> list[Any]:
    """Return the parameter groups of a module's state."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = getattr(state, "_fsdp_param_group", None)  # before torch 2.12
    return [] if group is None else [group]


def sums_apart(sharded: Any) -> bool:
    """Whether FSDP2 keeps sums in `unsharded_accumulated_grad`. Since torch 2.15 it keeps them in p.grad."""
    return not isinstance(getattr(type(sharded), "unsharded_accumulated_grad", None), property)


def wire_dtype(group: Any) -> torch.dtype:
    """Return the dtype in which FSDP2 reduces the gradients of a group."""
    sharded = group.fsdp_params[0]
    if hasattr(sharded, "unsharded_grad_dtype"):  # torch 2.15
        return sharded.unsharded_grad_dtype or sharded.orig_dtype
    return sharded.reduce_dtype or sharded._unsharded_param.dtype
