"""What a pickle or a deep copy of the wrapper carries of its window, and back.

Hooks, slots and accumulators are made anew around the copied inner optimizer; values, counters and masters go
along.
"""

from __future__ import annotations

from typing import Any

from ..accumulators import Accumulators, GradState
from .master_weights import MasterWeights
from .window import Window

#: What stands beside the wrapper's own attributes.
NAMES = (
    "schedule",
    "reduction",
    "private",
    "window",
    "backend",
    "masters",
    "sums",
    "spent",
    "choices",
    "noise",
)


def carried(window: Window, accumulators: Accumulators, masters: MasterWeights | None) -> dict[str, Any]:
    """The window, sums and masters, by `NAMES`."""
    # A manual loop's sums are its parameters' p.grad, which torch does not copy either.
    grads = accumulators.grads
    private = not (grads.visible or window.empty)
    return {
        "schedule": window.schedule,
        "reduction": window.reduction,
        "private": window.private,
        "window": window.state(),
        "backend": accumulators.backend,
        "masters": None if masters is None else [masters.of(slot) for slot in accumulators.slots],
        "sums": [
            (grads.current(slot), slot.grad_state is GradState.PUBLISHED, accumulators.scale_of(slot))
            if private
            else None
            for slot in accumulators.slots
        ],
        "spent": grads.spent,
        "choices": dict(accumulators.choices),
        "noise": accumulators.noise.state(),
    }


def restore(
    kept: dict[str, Any], window: Window, accumulators: Accumulators, masters: MasterWeights | None
) -> None:
    """Put what `carried` has returned into new parts."""
    window.restore(kept["window"] if window.counted else fresh_window(kept["window"]))
    for slot, held in zip(accumulators.slots, kept["sums"], strict=True):
        if held is not None and held[0] is not None:
            accumulators.restore(slot, *held)
    accumulators.choices.update(kept["choices"] or {})
    accumulators.noise.restore(kept["noise"], accumulators.slots)
    if kept["spent"]:
        accumulators.grads.note_spent()
    for slot, master in zip(accumulators.slots, kept["masters"] or (), strict=False):
        if master is not None and masters is not None:
            masters.put(slot, master)


def fresh_window(state: dict[str, Any]) -> dict[str, Any]:
    """A window's state as it would be had the window just begun: only the updates counted."""
    fresh = Window(None, None).state()
    return fresh | {name: state[name] for name in ("num_updates", "num_skipped", "has_updated")}
