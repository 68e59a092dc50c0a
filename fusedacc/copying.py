"""What a pickle or a deep copy of the wrapper carries of its window, and back.

Hooks, slots and the arena are made anew around the copied inner optimizer; sums, counters and masters go
along.
"""

from __future__ import annotations

from typing import Any

from .arena import Arena
from .masters import Masters
from .window import Window, fresh_window

#: What stands beside the wrapper's own attributes.
NAMES = ("schedule", "reduction", "private", "window", "backend", "masters", "sums", "spent", "choices")


def carried(window: Window, arena: Arena, masters: Masters | None) -> dict[str, Any]:
    """The window, sums and masters, by `NAMES`."""
    # A manual loop's sums are its parameters' p.grad, which torch does not copy either.
    private = not (arena.visible or window.empty)
    return {
        "schedule": window.schedule,
        "reduction": window.reduction,
        "private": window.private,
        "window": window.state(),
        "backend": arena.backend,
        "masters": None if masters is None else [masters.of(slot) for slot in arena.slots],
        "sums": [
            (arena.current(slot), slot.delivered, arena.owed(slot)) if private else None
            for slot in arena.slots
        ],
        "spent": arena.spent,
        "choices": dict(arena.choices),
    }


def restore(kept: dict[str, Any], window: Window, arena: Arena, masters: Masters | None) -> None:
    """Put what `carried` has returned into new parts."""
    window.restore(kept["window"] if window.counted else fresh_window(kept["window"]))
    for slot, held in zip(arena.slots, kept["sums"], strict=True):
        if held is not None and held[0] is not None:
            arena.restore(slot, *held)
    arena.choices.update(kept["choices"] or {})
    if kept["spent"]:
        arena.note_spent()
    for slot, master in zip(arena.slots, kept["masters"] or (), strict=False):
        if master is not None and masters is not None:
            masters.put(slot, master)
