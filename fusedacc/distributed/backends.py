"""Ranks that take the same backends: what has failed its self-test on one rank, no rank uses."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from ..accumulators import Slot
from ..accumulators.param import check_backend
from ..kernels import selftest


def own_failures(slots: Sequence[Slot]) -> dict[str, str]:
    """Return who has failed a self-test on this rank's devices, and why."""
    found: dict[str, str] = {}
    for device in _devices(slots):
        found |= selftest.failures(device)
    return found


def agree_on_backends(slots: Sequence[Slot], group: dist.ProcessGroup, backend: str) -> None:
    """Exclude on every rank what has failed on any. Every rank calls it; waits for the device.

    The backends that come next are tested, and may fail on some ranks too. So it repeats until nothing new
    fails.

    Raises:
        RuntimeError: the backend that was asked for has failed on a rank; on every rank.
    """
    known: set[str] = set()
    while True:
        of_ranks: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(of_ranks, own_failures(slots), group=group)
        found: dict[str, str] = {}
        for rank, own in enumerate(of_ranks):
            for who, why in own.items():
                found.setdefault(who, why if why.startswith("on rank ") else f"on rank {rank}: {why}")
        if found.keys() == known:
            return
        known = set(found)
        for device in _devices(slots):
            for who, why in found.items():
                selftest.exclude(who, device, why)
        for lane in {slot.lane for slot in slots}:
            check_backend(lane, backend)


def _devices(slots: Sequence[Slot]) -> list:
    return [device for device in {slot.lane[0] for slot in slots} if device.type in selftest.DEVICE_TYPES]
