"""Memory kept from window to window, for first gradients whose sums have another dtype."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from .memory import Segment, cut, tensor_references
from .slot import Slot


def buffers(slots: Sequence[Slot], lacks_sum: Sequence[bool]) -> list[Any]:
    """The slots' buffers; where a slot has no sum, one that nobody else refers to.

    Slots that have none, or whose buffer a user still sees as an old p.grad, get a new segment together.

    Args:
        slots: of one lane.
        lacks_sum: which of them have no sum yet.
    """
    segments = {slot.segment for slot in slots if slot.segment is not None}
    free = {segment for segment in segments if not segment.is_shared()}
    lacking = []
    for slot, lacks in zip(slots, lacks_sum, strict=True):
        # Two references to a buffer that only the slot knows: the slot's and the argument's.
        held = slot.segment not in free or sys.getrefcount(slot.buffer) > 2
        if lacks and (held or tensor_references(slot.buffer) > 1):  # type: ignore[arg-type]
            lacking.append(slot)
    if lacking:
        device, _, dtype = slots[0].lane
        memory, views = cut([(slot.param.shape, slot.strides) for slot in lacking], dtype, device)
        segment = Segment(memory, len(views))
        for slot, view in zip(lacking, views, strict=True):
            slot.drop_buffer()
            slot.buffer, slot.segment = view, segment
    return [slot.buffer for slot in slots]
