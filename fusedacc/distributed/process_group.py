"""A process group without DistributedDataParallel: every rank has to have the same parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..accumulators import Slot


def agree(slots: Sequence[Slot], group: dist.ProcessGroup) -> None:
    """See that every rank has the same parameters.

    Raises:
        ValueError: another rank has other parameters; it names them and the rank, on every rank.
    """
    mine = [(slot.name, tuple(slot.param.shape), str(slot.param.dtype)) for slot in slots]
    lists: list[list[tuple]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(lists, mine, group=group)
    for rank, other in enumerate(lists):
        if other == lists[0]:
            continue
        differing = next(
            (pair for pair in zip(lists[0], other, strict=False) if pair[0] != pair[1]),
            (f"{len(lists[0])} parameters", f"{len(other)}"),
        )
        raise ValueError(
            f"data_parallel: rank {rank} has other parameters than rank 0: {_spelt(differing[1])} in place "
            f"of {_spelt(differing[0])}; allowed: the same names, shapes and dtypes, in the same order, on "
            "all ranks"
        )


def share(slots: Sequence[Slot], group: dist.ProcessGroup) -> None:
    """Give every rank the parameters of the group's first."""
    source = dist.get_global_rank(group, 0)
    with torch.no_grad():
        for slot in slots:
            dist.broadcast(slot.param.detach(), source, group=group)


def _spelt(parameter: tuple | str) -> str:
    if isinstance(parameter, str):
        return parameter
    name, shape, dtype = parameter
    return f"{name!r} of shape {shape}, {dtype}"
