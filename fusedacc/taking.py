"""Who takes gradients in a backward: the hooks in Python, and in front of them the native ones."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

from . import hooks, native_hooks, observers
from .arena import Arena
from .hooks import Bucket, Task
from .slot import Slot


class Taking:
    """The buckets of every lane, and what the native hooks may do; without those, hooks in Python do all.

    On a CPU a gradient is best added to its sum the moment it comes, while it is in the cache: native hooks
    do so (`Direct` in csrc/autograd/direct.h) where nothing more is to be done than sum = keep * sum +
    scale * gradient. All others wait in buckets.

    Args:
        arena: where the sums are.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._native = native_hooks.module()
        self._lanes: dict[int, Any] = {}
        self._order: dict[Slot, int] = {}
        #: The task whose gradients are added at once, and the state of the arena when the sums were loaded.
        self._task: Task | None = None
        self._known: tuple | None = None
        if self._native is not None:
            self._tasks = self._native.Tasks()
            self._direct = self._native.Direct(native_hooks.add_flat())

    def lane(self, slot: Slot) -> MutableMapping[int, Bucket]:
        """The buckets of the slot's lane, by graph task: one mapping that all hooks of the lane look at."""
        found = self._lanes.get(slot.lane_key)
        if found is None:
            found = self._lanes[slot.lane_key] = {} if self._native is None else self._native.Lane()
        return found

    def open_bucket(self, slot: Slot, identity: int, stream: int) -> Bucket:
        """A new bucket for the slot's lane and a graph task."""
        bucket = Bucket(stream) if self._native is None else self._native.Bucket(stream, hooks.BUCKET_BYTES)
        self.lane(slot)[identity] = bucket
        return bucket

    def attach(self, slot: Slot, node: Any) -> None:
        """Put a native hook before the Python hook of the slot's node, which has no other."""
        if self._native is None:
            return
        index = self._order.setdefault(slot, len(self._order))
        large = slot.nbytes >= hooks.LARGE_BYTES
        shared = self._direct, self.lane(slot), self._tasks
        slot.native = self._native.attach(node, slot, index, slot.nbytes, large, *shared)
        slot.set_odd(slot.odd)
        self._known = None

    def detach(self, slot: Slot) -> None:
        """The hook in Python alone, from now on."""
        if slot.native is not None:
            slot.native.active = False
            slot.native = None

    def begin(self, identity: int, task: Task, alone: bool, scale: float | Tensor) -> None:
        """A graph task's first gradient is at hand. `alone`: no other graph task runs."""
        if self._native is None:
            return
        self._tasks.add(identity)
        self.add_later()
        arena = self._arena
        if (
            alone
            and not task.drops
            and not observers.watching
            and not arena.norms
            and not isinstance(scale, Tensor)
        ):
            known = None if arena.debts or arena.shown else (arena.generation,)
            if known is None or known != self._known:
                offered = [arena.addable(slot) for slot in self._order]
                self._direct.load([total for total, _ in offered], [keep for _, keep in offered], arena.shown)
                self._known = known
            self._task = task
            self._direct.open(identity, scale)

    def add_later(self) -> None:
        """No gradient is added at once any more; what has been added has paid what it owed."""
        if self._task is None:
            return
        added, task, self._task = self._direct.close(), self._task, None
        if added:
            task.added = True
            if self._arena.debts:
                self._known = None
                slots = list(self._order)
                self._arena.debts.pay([slots[index] for index in added])

    def end(self, identity: int, task: Task) -> None:
        """A graph task is over."""
        if self._native is not None:
            if self._task is task:
                self.add_later()
            self._tasks.drop(identity)
        for lane_key in task.buckets:
            self._lanes[lane_key].pop(identity, None)


def takes_natively() -> tuple[bool, str]:
    """Whether native hooks are used, and the reason, for `info`."""
    problem = native_hooks.why_not()
    return problem is None, problem or f"built for torch {torch.__version__}"
