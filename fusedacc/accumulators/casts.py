"""Casts of accumulators that an update gives up: they take the memory of those that were cast before them.

All accumulators and their casts side by side would be the peak of training in low precision. A cast is at
most half as long as its accumulator. So once the largest is cast, each accumulator that is done makes room
for two more. What the first take beside the accumulators, the backward before had for gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..kernels import torch_state
from .buffers import ALIGNMENT, SHOWN, Segment, tensor_references
from .param import Slot

#: Bytes of new memory for the first casts; more where the largest needs it.
FRESH = 1 << 20
#: `(casts, accumulators)`: writes the casts, which share no memory with the accumulators.
Cast = Callable[[list[Tensor], list[Tensor]], None]


def reusable(slots: Sequence[Slot], dtype: torch.dtype) -> list[Slot]:
    """Those of the slots, of one accumulate dtype, in whose accumulators' memory casts may be.

    It has room for two casts, and nobody else refers to it; the caller must not either. None while a CUDA
    graph is captured: its replays could not ask again.
    """
    if slots[0].accumulate_dtype.itemsize < 2 * dtype.itemsize or torch_state.capturing():
        return []
    segments = {slot.segment for slot in slots if slot.segment is not None}
    free = {segment for segment in segments if not segment.is_shared()}
    return [slot for slot in slots if slot.segment in free and _is_sole_sum(slot)]


def _is_sole_sum(slot: Slot) -> bool:
    """Whether the slot's buffer is its sum, and nobody but the slot and p.grad refers to it."""
    private, shown = slot.accumulator is slot.buffer, slot.param.grad is slot.buffer
    if not (private or shown):
        return False
    # Python's references: one or two of the slot's, p.grad's, and the argument's.
    held = sys.getrefcount(slot.buffer) > 2 + private + SHOWN * shown
    return not held and tensor_references(slot.buffer) == 1 + shown  # type: ignore[arg-type]


def cast_over(slots: Sequence[Slot], dtype: torch.dtype, cast: Cast) -> list[Tensor]:
    """The casts of `reusable` slots' accumulators, as many in the same order. These are written over.

    Beside these it takes as much as the largest cast, or FRESH; `cast` is called about as often as the number
    of accumulators has binary digits.
    """
    accumulators: list[Tensor] = [slot.buffer for slot in slots]  # type: ignore[misc]  # `reusable` have one
    ratio = accumulators[0].itemsize // dtype.itemsize
    unit = ALIGNMENT // accumulators[0].itemsize
    sizes = [
        -(-accumulator.numel() // unit) * unit for accumulator in accumulators
    ]  # as they lie in their segments
    order = sorted(range(len(accumulators)), key=sizes.__getitem__, reverse=True)
    end = min(max(FRESH // dtype.itemsize, sizes[order[0]]), sum(sizes))
    # Casts are put into a vector from `at` up to `end`, then into the memory of accumulators that are done.
    vector, at = torch.empty(end, dtype=dtype, device=accumulators[0].device), 0
    vectors: dict[Segment, Tensor] = {}
    done: list[int] = []
    ready: list[int] = []
    casts = list(accumulators)
    for index in order:
        accumulator, size = accumulators[index], sizes[index]
        if end - at < size:
            if not done:
                cast([casts[each] for each in ready], [accumulators[each] for each in ready])
                done, ready = ready, []
            freed = done.pop()
            segment: Segment = slots[freed].segment  # type: ignore[assignment]
            if segment not in vectors:
                vectors[segment] = segment.memory.view(dtype)
            vector, at = vectors[segment], ratio * int(accumulators[freed].storage_offset())
            end = at + ratio * sizes[freed]
        casts[index] = vector.as_strided(accumulator.shape, accumulator.stride(), at)
        at += size
        ready.append(index)
    cast([casts[each] for each in ready], [accumulators[each] for each in ready])
    return casts
