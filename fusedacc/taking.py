"""Who takes gradients in a backward: the hooks in Python, and in front of them the native ones."""

from __future__ import annotations

import threading
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import hooks, native_hooks, observers
from .accumulators import Accumulators, Slot
from .hooks import Bucket, Task

#: Stands where a slot was: it has no sum.
_NOBODY = Slot(torch.empty(0, device="cpu"), -1, "", None)


class Taking:
    """The buckets of every lane, and what the native hooks may do; without those, hooks in Python do all.

    On a CPU a gradient is best added to its sum the moment it comes, while it is in the cache: native hooks
    do so (`Direct` in csrc/autograd/immediate_add.h) where nothing more is to be done than sum = keep * sum +
    scale * gradient. All others wait in buckets.

    Args:
        accumulators: where the sums are.
    """

    def __init__(self, accumulators: Accumulators) -> None:
        self._accumulators = accumulators
        self._native = native_hooks.module()
        self._lanes: dict[int, Any] = {}
        self._at_once: dict[int, bool] = {}
        #: The numbers of slots whose gradients may be added at once, and the slots by their numbers.
        self._order: dict[Slot, int] = {}
        self._numbered: list[Slot] = []
        self._vacant: list[int] = []
        self._parameters: list[Tensor] = []
        #: Held while that task changes: closing `Direct` lets other threads run.
        self._lock = threading.RLock()
        #: The task whose gradients are added at once, and the accumulators' generation when they were loaded.
        self._task: Task | None = None
        self._known: tuple | None = None
        self._loaded = -1
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
        limit = hooks.bucket_bytes(slot)
        bucket = Bucket(stream) if self._native is None else self._native.Bucket(stream, limit)
        self.lane(slot)[identity] = bucket
        return bucket

    def attach(self, slot: Slot, node: Any) -> None:
        """Put a native hook before the Python hook of the slot's node, which has no other."""
        if self._native is None:
            return
        at_once = self._at_once.get(slot.lane_key)
        if at_once is None:
            at_once = self._accumulators.plans.select(slot.lane).backend.name == "cpu"
            self._at_once[slot.lane_key] = at_once
        index = self._number(slot) if at_once else -1
        large = hooks.is_large(slot)
        shared = slot.accumulate_dtype, self._direct, self.lane(slot), self._tasks
        slot.native = self._native.attach(node, slot, index, slot.nbytes, large, *shared)
        slot.set_odd(slot.odd)
        self._known = None

    def _number(self, slot: Slot) -> int:
        number = self._order.get(slot)
        if number is None:
            number = self._vacant.pop() if self._vacant else len(self._numbered)
            self._numbered[number : number + 1] = [slot]
            self._order[slot] = number
        return number

    def forget(self, slots: Sequence[Slot]) -> None:
        """These slots have no hooks any more, and no others will have."""
        self._parameters = []
        self._known = None
        for slot in slots:
            number = self._order.pop(slot, None)
            if number is not None:
                self._numbered[number] = _NOBODY
                self._vacant.append(number)

    def detach(self, slot: Slot) -> None:
        """The hook in Python alone, from now on."""
        if slot.native is not None:
            slot.native.active = False
            slot.native = None

    def any_gradient(self, slots: list[Slot]) -> bool:
        """Whether anything stands in the p.grad of any slot; `slots` are always the same list."""
        if self._native is None:
            return any(slot.param.grad is not None for slot in slots)
        if len(self._parameters) != len(slots):
            self._parameters = [slot.param for slot in slots]
        return self._native.any_gradient(self._parameters)

    def begin(self, identity: int, task: Task, alone: bool, scale: float | Tensor) -> None:
        """A graph task's first gradient is at hand; none is added at once yet. `alone`: no other runs."""
        if self._native is None:
            return
        self._tasks.add(identity)
        accumulators, grads = self._accumulators, self._accumulators.grads
        if (
            alone
            and self._order
            and not task.drops
            and not observers.watching
            and not accumulators.norms
            and not isinstance(scale, Tensor)
        ):
            with self._lock:
                known = None if accumulators.deferred or grads.exposed else (grads.generation,)
                if known is None or known != self._known:
                    ends = accumulators.slots[:1] + accumulators.slots[-1:]
                    written = grads.exposed or accumulators.in_place.any_written
                    if not written and all(slot.sum is None for slot in ends):
                        return  # the window's first: there is nothing to add to
                    addable, betas = accumulators.in_place.addable(self._numbered)
                    self._direct.load(addable, betas, grads.exposed)
                    self._loaded, self._known = grads.generation, known
                self._task = task
                self._direct.open(identity, scale)

    def adds(self, slot: Slot, identity: int, gradient: Tensor) -> bool:
        """Add a gradient at once, if that is all that is to be done with it."""
        if self._task is None or slot.native is None:
            return False
        return self._direct.take(identity, self._order.get(slot, -1), gradient, slot.param)

    def add_later(self) -> None:
        """No gradient is added at once any more; what has been added has paid what it owed."""
        if self._native is None:
            return
        with self._lock:  # and wait until another thread, that is doing so, has paid
            if self._task is None:
                return
            task, self._task = self._task, None
            self._note(task, self._direct.close())
            accumulators = self._accumulators
            grads = accumulators.grads
            if grads.generation == self._loaded and not (accumulators.deferred or grads.exposed):
                self._known = (grads.generation,)

    def hand_over(self, slot: Slot) -> None:
        """Python is about to deal with the slot's sum: note what has been added to it, and add no more."""
        if self._native is None:
            return
        with self._lock:
            if self._task is not None:
                self._note(self._task, self._direct.added())
                self._direct.skip(self._order.get(slot, -1))
                self._loaded, self._known = -1, None

    def _note(self, task: Task, added: list[int]) -> None:
        """What sums owed is paid, and memory that was written first is a sum."""
        if not added:
            return
        task.added = True
        accumulators = self._accumulators
        if accumulators.deferred or accumulators.in_place.any_written:
            accumulators.in_place.added_to([self._numbered[index] for index in added])

    def end(self, identity: int, task: Task) -> None:
        """A graph task is over."""
        if self._native is not None:
            if self._task is task:
                self.add_later()
            self._tasks.drop(identity)
        for lane_key in task.buckets:
            self._lanes[lane_key].pop(identity, None)
