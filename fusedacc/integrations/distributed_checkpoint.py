"""A partly filled window in torch.distributed.checkpoint.

torch.distributed.checkpoint loads only what the state dict has room for.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, StorageReader, TensorStorageMetadata

from ..distributed.rows import RankPlace, with_rows_of_ranks
from ..optimizer.checkpoint.format import OUR_KEYS, RANK_COUNTERS, RANK_SUM
from ..optimizer.checkpoint.ranks import ALLOWED_RANKS

__all__ = ["make_room"]


def make_room(
    state_dict: dict[str, Any],
    checkpoint: str | os.PathLike[str] | StorageReader,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Add room to `state_dict` for the sums and masters of a checkpoint, and remove our entries that it
    lacks.

    Call it between `get_optimizer_state_dict` and `torch.distributed.checkpoint.load`. Without it, the sums
    of a window are not read and `set_optimizer_state_dict` raises ValueError; `load` refuses a checkpoint of
    a bare optimizer, which lacks the counters.

    Args:
        state_dict: what `load` will fill, changed in place. The optimizers' state dicts have the same paths
            as in what was saved.
        checkpoint: the folder, or the reader that `load` will use.
        group: the ranks that share a partly filled window, as the optimizer's `data_parallel`; None: all
            ranks.

    Raises:
        ValueError: the checkpoint holds a partly filled window of another number of ranks. Nothing is
            changed.
    """
    reader = checkpoint if isinstance(checkpoint, StorageReader) else FileSystemReader(checkpoint)
    metadata = reader.read_metadata()
    saved = {
        path: metadata.state_dict_metadata[key]
        for key, path in (metadata.planner_data or {}).items()
        if path[-1] in OUR_KEYS
    }
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    place = RankPlace() if group is None else RankPlace.within(group)
    tensors = {path: stored for path, stored in saved.items() if isinstance(stored, TensorStorageMetadata)}
    for path, stored in tensors.items():
        if path[-1] == RANK_SUM and stored.size[0] != place.count:
            raise ValueError(
                f"{checkpoint} holds a partly filled window of {stored.size[0]} ranks, and the group has "
                f"{place.count}. {ALLOWED_RANKS}"
            )
    _take_out(state_dict, (), saved)
    for path, stored in tensors.items():
        entry = _entry(state_dict, path[:-1])
        if entry is None:
            continue
        size = stored.size
        dtype = stored.properties.dtype
        if path[-1] in (RANK_SUM, RANK_COUNTERS):
            entry[path[-1]] = with_rows_of_ranks(torch.empty(size[1:], dtype=dtype), place)
        else:
            entry[path[-1]] = torch.empty(size, dtype=dtype)


def _entry(state_dict: Any, path: tuple[Any, ...]) -> dict[Any, Any] | None:
    """The dict of one parameter, made if only that is missing; None where there is no such optimizer."""
    for key in path[:-1]:
        if not isinstance(state_dict, dict) or key not in state_dict:
            return None
        state_dict = state_dict[key]
    return state_dict.setdefault(path[-1], {}) if isinstance(state_dict, dict) else None


def _take_out(tree: Any, path: tuple[Any, ...], saved: dict[tuple[Any, ...], Any]) -> None:
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        if key in OUR_KEYS and (*path, key) not in saved:
            del tree[key]
        elif isinstance(value, dict | list):
            _take_out(value, (*path, key), saved)
