"""Pickles and deep copies of the wrapper.

The copied inner optimizer gets new hooks, slots and accumulators, which then take over the counters, the sums
and the masters of the snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...accumulators import Accumulators, GradState, Slot
from ..master_weights import MasterWeights
from ..window import Window
from ..window_counts import Schedule
from .format import SavedSum
from .window_fields import emptied, read_window, restore_window


@dataclass
class Snapshot:
    """A window with its sums and masters, as plain values.

    Attributes:
        schedule: the argument `gradient_accumulation_steps`.
        reduction: the name of the reduction.
        backend: the argument `backend`.
        window: the counters.
        sums: each slot's sum; None if it has none, and in a manual loop, where the sums are p.grad, which
            torch does not copy either.
        consumed: whether an update has consumed the gradients.
        masters: each slot's master; None without `master_weights`.
        noise: the state of stochastic rounding, if any.
    """

    schedule: Schedule
    reduction: str
    backend: str
    window: dict[str, Any]
    sums: list[SavedSum | None]
    consumed: bool
    masters: list[Tensor | None] | None
    noise: dict[str, int] | None

    @classmethod
    def take(cls, window: Window, accumulators: Accumulators, masters: MasterWeights | None) -> Snapshot:
        """Return a snapshot of these components."""
        slots = accumulators.slots
        grads = accumulators.grads
        has_sums = not (grads.always_exposed or window.empty)
        return cls(
            schedule=window.schedule,
            reduction=window.reduction.name,
            backend=accumulators.backend,
            window=read_window(window),
            sums=[_sum_of(slot, accumulators) if has_sums else None for slot in slots],
            consumed=grads.consumed,
            masters=None if masters is None else [masters.of(slot) for slot in slots],
            noise=accumulators.noise.state(),
        )

    def restore(self, window: Window, accumulators: Accumulators, masters: MasterWeights | None) -> None:
        """Restore the snapshot into new components."""
        restore_window(window, self.window if window.counted else emptied(self.window))
        for slot, saved in zip(accumulators.slots, self.sums, strict=True):
            if saved is not None:
                accumulators.restore(slot, saved.total, saved.published, saved.deferred_scale)
        accumulators.noise.restore(self.noise, accumulators.slots)
        if self.consumed:
            accumulators.grads.mark_consumed()
        for slot, master in zip(accumulators.slots, self.masters or (), strict=False):
            if master is not None and masters is not None:
                masters.put(slot, master)


def _sum_of(slot: Slot, accumulators: Accumulators) -> SavedSum | None:
    total = accumulators.grads.current(slot)
    if total is None:
        return None
    return SavedSum(total, slot.grad_state == GradState.PUBLISHED, float(slot.beta))
