"""Casts of sums that an update gives up: they take the memory of sums that have been cast before them.

All sums and all their casts side by side would be the peak of training in low precision. A cast is at most
half as long as its sum. So where the largest sum is cast in place, the next one's cast fits behind it; those
that follow are no larger, and each sum that is done makes room for two.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .hooks import capturing
from .memory import ALIGNMENT, SHOWN, Segment, tensor_references
from .slot import Slot

#: Bytes of new memory for the first casts, if the largest fits there: then none has to be made in place.
FRESH = 1 << 19
#: Elements of a sum cast in place that go by new memory. As many can then be written over them, and from
#: there on twice as many each time.
HEAD = 1 << 14
#: `(casts, sums)`: writes the casts, which share no memory with the sums.
Cast = Callable[[list[Tensor], list[Tensor]], None]


def reusable(slots: Sequence[Slot], dtype: torch.dtype) -> list[Slot]:
    """Those of the slots, of one accumulate dtype, in whose sums' memory casts may be.

    It has room for two casts, and nobody else refers to it; the caller must not either. None while a CUDA
    graph is captured: its replays could not ask again.
    """
    if slots[0].accumulate_dtype.itemsize < 2 * dtype.itemsize or capturing():
        return []
    segments = {slot.segment for slot in slots if slot.segment is not None}
    free = {segment for segment in segments if not segment.is_shared()}
    return [slot for slot in slots if slot.segment in free and _is_sole_sum(slot)]


def _is_sole_sum(slot: Slot) -> bool:
    """Whether the slot's buffer is its sum, and nobody but the slot and p.grad refers to it."""
    private, shown = slot.sum is slot.buffer, slot.param.grad is slot.buffer
    if not (private or shown):
        return False
    # Python's references: one or two of the slot's, p.grad's, and the argument's.
    held = sys.getrefcount(slot.buffer) > 2 + private + SHOWN * shown
    return not held and tensor_references(slot.buffer) == 1 + shown  # type: ignore[arg-type]


@dataclasses.dataclass(slots=True)
class _Room:
    """Free memory: the elements from `at` to `end` of a vector of the casts' dtype."""

    vector: Tensor
    at: int
    end: int

    def take(self, total: Tensor, size: int) -> Tensor:
        """The next `size` elements, for a cast of this sum."""
        self.at += size
        return self.vector.as_strided(total.shape, total.stride(), self.at - size)


def cast_over(slots: Sequence[Slot], dtype: torch.dtype, cast: Cast) -> list[Tensor]:
    """The casts of sums of slots that are `reusable`, as many in the same order. The sums are written over.

    Beside the sums it takes at most FRESH bytes; `cast` is called about as often as the number of sums and
    the length of the largest have binary digits.
    """
    segments: list[Segment] = [slot.segment for slot in slots]  # type: ignore[misc]  # `reusable` have one
    sums: list[Tensor] = [slot.buffer for slot in slots]  # type: ignore[misc]
    ratio = sums[0].itemsize // dtype.itemsize
    unit = ALIGNMENT // sums[0].itemsize
    sizes = [-(-total.numel() // unit) * unit for total in sums]  # as they lie in their segments
    vectors = {segment: segment.memory.view(dtype) for segment in segments}

    def freed(index: int) -> _Room:
        start = ratio * int(sums[index].storage_offset())
        return _Room(vectors[segments[index]], start, start + ratio * sizes[index])

    def run(ready: list[int]) -> None:
        cast([casts[index] for index in ready], [sums[index] for index in ready])

    casts = list(sums)
    order = sorted(range(len(sums)), key=sizes.__getitem__, reverse=True)
    most = FRESH // dtype.itemsize
    if sizes[order[0]] > most:
        largest = order.pop(0)
        room = freed(largest)
        start, length = sums[largest].storage_offset(), sums[largest].numel()
        total = segments[largest].memory[start : start + length]
        _cast_in_place(room.vector[room.at : room.at + length], total, cast)
        casts[largest] = room.take(sums[largest], sizes[largest])
    else:
        length = min(most, sum(sizes))
        room = _Room(torch.empty(length, dtype=dtype, device=sums[0].device), 0, length)
    rooms = [room]
    ready: list[int] = []
    for index in order:
        while rooms and rooms[-1].end - rooms[-1].at < sizes[index]:
            rooms.pop()
        if not rooms:
            run(ready)
            rooms, ready = [freed(done) for done in ready], []
        casts[index] = rooms[-1].take(sums[index], sizes[index])
        ready.append(index)
    if ready:
        run(ready)
    return casts


def _cast_in_place(vector: Tensor, total: Tensor, cast: Cast) -> None:
    """Cast a sum, 1-d, into a vector that begins where it does: each piece over what has been cast before."""
    head, done = torch.empty_like(vector[:HEAD]), HEAD
    cast([head], [total[:HEAD]])
    vector[:HEAD].copy_(head)
    while done < len(total):
        cast([vector[done : 2 * done]], [total[done : 2 * done]])
        done *= 2
