"""Stacks of matrices that a backward writes one by one, before they are sums.

Note [Parts that are written]
A window's first gradient of one matrix of a stack is written over whatever its part of the buffer holds; more
of them are added to that. Parts that got none are filled with zeros once, when the stack becomes the
accumulator. Until then it is none: whoever asks finds no accumulator, as stock has no p.grad before the
parameter's node has run. It becomes one at the end of a backward, or as soon as anything else is about to be
added, stored or read. What a failed backward has written is forgotten.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection

import torch
from torch import Tensor

from ..kernels.rounding import round_into_
from .noise import NoiseSource
from .p_grad import ParamGrads
from .param import Slot
from .rescaler import Rescaler


class PartialSums:
    """The stacks of which only some parts are written yet; arguments as `Adder`."""

    def __init__(
        self, grads: ParamGrads, rescaler: Rescaler, noise: NoiseSource, lock: threading.RLock
    ) -> None:
        self._grads, self._rescaler, self._noise, self._lock = grads, rescaler, noise, lock
        #: By slot, the stack and the indices of what is written; empty but while a backward runs.
        self.begun: dict[Slot, tuple[Tensor, set[int]]] = {}

    def memory(self, slot: Slot) -> Tensor | None:
        """The slot's stack, where one has been begun."""
        found = self.begun.get(slot)
        return None if found is None else found[0]

    def has(self, slot: Slot, part: int) -> bool:
        """Whether this part of the slot's stack is written."""
        found = self.begun.get(slot)
        return found is not None and part in found[1]

    def note(self, slot: Slot, stack: Tensor, part: int) -> None:
        """A part of the slot's stack has been written."""
        self.begun.setdefault(slot, (stack, set()))[1].add(part)

    def complete(self, slots: Collection[Slot] | None = None) -> None:
        """Fill what is not written with zeros, and let the stacks of these slots (None: all) be sums."""
        if not self.begun:
            return
        with self._lock:
            for slot in list(self.begun if slots is None else slots):
                if slot in self.begun:
                    self._complete(slot, *self.begun.pop(slot))

    def _complete(self, slot: Slot, stack: Tensor, written: Collection[int]) -> None:
        bounds = [-1, *sorted(written), len(stack)]
        gaps = [stack[before + 1 : after] for before, after in itertools.pairwise(bounds)]
        gaps = [gap for gap in gaps if len(gap)]
        if gaps:
            torch._foreach_zero_(gaps)
        present = self._grads.current(slot)
        if present is None:
            self._grads.put(slot, stack)
        else:  # somebody has put a gradient into p.grad meanwhile
            self._rescaler.apply([slot])
            noise = self._noise.of([slot], present.dtype)
            if noise is None:
                present.add_(stack)
            else:
                round_into_(present, present.float().add_(stack), noise.seed, noise.streams[0])

    def forget(self, slots: Collection[Slot] | None = None) -> None:
        """Drop what is written for these slots (None: all)."""
        for slot in list(self.begun if slots is None else slots):
            self.begun.pop(slot, None)
