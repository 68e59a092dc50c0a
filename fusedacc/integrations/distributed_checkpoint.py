"""A part-filled window through torch.distributed.checkpoint, which loads only what it is given room for."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, StorageReader, TensorStorageMetadata

from ..optimizer.checkpoint import COUNTERS, MASTER, SUM

__all__ = ["make_room"]

_OURS = (SUM, COUNTERS, MASTER)


def make_room(state_dict: dict[str, Any], checkpoint: str | os.PathLike[str] | StorageReader) -> None:
    """Give `state_dict` the sums and masters that a checkpoint holds, and take out what it lacks of ours.

    To be called between `get_optimizer_state_dict` and `torch.distributed.checkpoint.load`. Without it the
    sums of a window in the checkpoint are not read, and `set_optimizer_state_dict` raises ValueError; and
    `load` itself refuses a checkpoint of a bare optimizer, which lacks the counters.

    Args:
        state_dict: what `load` is going to fill, changed in place; the optimizers' state dicts stand in it
            where they stood in what was saved.
        checkpoint: the folder, or the reader that `load` will have.
    """
    reader = checkpoint if isinstance(checkpoint, StorageReader) else FileSystemReader(checkpoint)
    metadata = reader.read_metadata()
    saved = {
        path: metadata.state_dict_metadata[key]
        for key, path in (metadata.planner_data or {}).items()
        if path[-1] in _OURS
    }
    _take_out(state_dict, (), saved)
    for path, stored in saved.items():
        entry = _entry(state_dict, path[:-1])
        if entry is not None and isinstance(stored, TensorStorageMetadata):  # not a group's counters
            entry[path[-1]] = torch.empty(stored.size, dtype=stored.properties.dtype)


def _entry(state_dict: Any, path: tuple[Any, ...]) -> dict[Any, Any] | None:
    """The dict of one parameter, made if only that is missing; None where there is no such optimizer."""
    for key in path[:-1]:
        if not isinstance(state_dict, dict) or key not in state_dict:
            return None
        state_dict = state_dict[key]
    return state_dict.setdefault(path[-1], {}) if isinstance(state_dict, dict) else None


def _take_out(tree: Any, path: tuple[Any, ...], saved: dict[tuple[Any, ...], Any]) -> None:
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        if key in _OURS and (*path, key) not in saved:
            del tree[key]
        elif isinstance(value, dict | list):
            _take_out(value, (*path, key), saved)
