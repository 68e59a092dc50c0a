"""Runs a backend over lists of accumulators.

A pass also applies the deferred scales of the accumulators (see `deferred_scale`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..kernels import checks, registry
from ..kernels.dtypes import PAIRS, Flags, Number
from ..kernels.local_parts import is_distributed, local
from .deferred_scale import DeferredScales, is_one, to_device_of
from .noise import NoiseSource
from .p_grad import ParamGrads
from .param import Lane, Slot


class Passes:
    """Chooses backends and runs them, and multiplies accumulators."""

    def __init__(self, grads: ParamGrads, deferred: DeferredScales, noise: NoiseSource, backend: str) -> None:
        self.grads = grads
        self.deferred = deferred
        self.noise = noise
        self._backend = backend
        #: Held while accumulators are written. The engine's, once there is one.
        self.lock: Any = threading.RLock()

    def select(self, lane: Lane) -> registry.Selection:
        """Return the backend that adds gradients of this lane, and the reason."""
        device, gradient, accumulator = lane
        return registry.select(device, accumulator, gradient, self._backend)

    def add(
        self,
        accumulators: list[Tensor],
        terms: list[Tensor],
        scale: Number,
        slots: Sequence[Slot],
        *,
        overwrite: Flags,
        exposed: bool,
    ) -> None:
        """Add to the accumulators of `slots` in one pass, or one for each distinct deferred scale."""
        if overwrite is True or not self.deferred.select_deferred(slots):
            self.run(accumulators, terms, scale, slots, overwrite=overwrite, exposed=exposed)
            return
        for beta, indices in self.deferred.group(slots):
            group = [slots[index] for index in indices]
            self.run(
                [accumulators[index] for index in indices],
                [terms[index] for index in indices],
                scale,
                group,
                overwrite=overwrite if isinstance(overwrite, bool) else [overwrite[i] for i in indices],
                exposed=exposed,
                beta=beta,
            )
            self.deferred.discharge(group)

    def run(
        self,
        accumulators: list[Tensor],
        terms: list[Tensor],
        scale: Number,
        slots: Sequence[Slot],
        *,
        overwrite: Flags,
        exposed: bool,
        beta: Number = 1.0,
    ) -> None:
        """Run one pass over the accumulators of `slots`. If the user can see the accumulators (`exposed`),
        their version counters are incremented.
        """
        if not accumulators:
            return
        first = accumulators[0]
        backend = self.select((first.device, terms[0].dtype, first.dtype)).backend
        noise = self.noise.of(slots, first.dtype)
        backend.accumulate_(
            accumulators, terms, to_device_of(scale, first), overwrite, to_device_of(beta, first), noise
        )
        if exposed:
            increment_version(accumulators)

    # Multiplying accumulators, now or with their next addition

    def defer_scale(self, ratio: Number) -> None:
        """Multiply every accumulator by `ratio`, with its next addition or in `apply_scales`."""
        if not is_one(ratio):
            with self.lock:
                present = self.grads.with_accumulator(self.grads.slots)
                self.deferred.defer([slot for slot, _ in present], ratio)

    def apply_scales(self, slots: Iterable[Slot] | None = None) -> None:
        """Multiply the accumulators of these slots (None: all) by their deferred scales, in one pass."""
        with self.lock:
            pending = self.deferred.select_deferred(slots)
            for scale, indices in self.deferred.group(pending):
                group = [pending[index] for index in indices]
                self.rescale(self.grads.with_accumulator(group), scale)
                self.deferred.discharge(group)

    def rescale(self, slots_with_sums: Iterable[tuple[Slot, Tensor]], ratio: Number) -> None:
        """Multiply accumulators by `ratio`, in one pass per dtype."""
        groups: dict[tuple[torch.device, torch.dtype], tuple[list[Slot], list[Tensor]]] = {}
        for slot, accumulator in slots_with_sums:
            part = local(accumulator)
            if checks.is_plain(part) and (part.dtype, part.dtype) in PAIRS:
                slots, parts = groups.setdefault((part.device, part.dtype), ([], []))
                slots.append(slot)
                parts.append(part)
                if is_distributed(accumulator) and self.grads.exposed:
                    increment_version([accumulator])
            elif accumulator.is_sparse:
                # torch's product would add up rows with the same index.
                accumulator._values().mul_(to_device_of(ratio, accumulator))
            else:
                accumulator.mul_(to_device_of(ratio, accumulator))
        for slots, parts in groups.values():
            # Overwriting a tensor with `ratio` times itself rescales it.
            self.run(parts, parts, ratio, slots, overwrite=True, exposed=self.grads.exposed)
