"""Changes by hand of an optimizer's `param_groups` and state, and of shapes through `.data`."""

from typing import Any

import torch
from torch import Tensor, nn


def append(optimizer: Any, params: list[Tensor], as_group: bool) -> None:
    """Add parameters to the first group, or as a new group with its options."""
    first = optimizer.param_groups[0]
    if as_group:
        optimizer.param_groups.append({**first, "params": list(params)})
    else:
        first["params"].extend(params)


def remove(optimizer: Any, p: Tensor) -> None:
    for group in optimizer.param_groups:
        group["params"][:] = [q for q in group["params"] if q is not p]
    optimizer.state.pop(p, None)


def replace(optimizer: Any, old: Tensor, new: Tensor) -> None:
    """Replace a parameter and move its state row by row, as densification does."""
    for group in optimizer.param_groups:
        group["params"][:] = [new if q is old else q for q in group["params"]]
    if old in optimizer.state:
        optimizer.state[new] = fitted(optimizer.state.pop(old), old.shape, new.shape)


def resize(optimizer: Any, p: Tensor, data: Tensor) -> None:
    before, p.data = p.shape, data
    if p in optimizer.state:
        optimizer.state[p] = fitted(optimizer.state[p], before, p.shape)


def fitted(state: dict[str, Any], before: torch.Size, after: torch.Size) -> dict[str, Any]:
    """Return state with as many rows as the parameter."""
    if before == after:
        return state
    rowwise = {
        name
        for name, value in state.items()
        if isinstance(value, Tensor) and value.ndim and value.shape[0] == before[0]
    }
    return {
        name: with_rows(value, after[0], 0.0) if name in rowwise else value for name, value in state.items()
    }


def with_rows(tensor: Tensor, rows: int, fill: float) -> Tensor:
    """Return the tensor with `rows` rows. Cut off the last rows, or add new ones."""
    kept = tensor.detach()[:rows]
    missing = tensor.new_full((rows - kept.shape[0], *tensor.shape[1:]), fill)
    return torch.cat([kept, missing])


def put_in(model: nn.Module, old: Tensor, new: nn.Parameter) -> None:
    """Replace `old` with `new` in all modules of the model."""
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if p is old:
                setattr(module, name, new)


def fit(model: nn.Module, other: nn.Module) -> None:
    """Give a new model the shapes of a resized model."""
    for mine, its in zip(model.modules(), other.modules(), strict=True):
        for name in ("num_embeddings", "out_features"):
            if hasattr(its, name):
                setattr(mine, name, getattr(its, name))
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        if mine.shape != its.shape:
            mine.data = with_rows(mine, its.shape[0], 0.0)
