"""Casts of sums that an update gives up: they take the memory of sums that have been cast before them.

All sums and all their casts side by side would be the peak of training in low precision. A cast is at most
half as long as its sum. So once the largest is cast, each sum that is done makes room for two more. What the
first take beside the sums, the backward before had for gradients.
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
#: `(casts, sums)`: writes the casts, which share no memory with the sums.
Cast = Callable[[list[Tensor], list[Tensor]], None]


def reusable(slots: Sequence[Slot], dtype: torch.dtype) -> list[Slot]:
    """Those of the slots, of one accumulate dtype, in whose sums' memory casts may be.

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
    private, shown = slot.sum is slot.buffer, slot.param.grad is slot.buffer
    if not (private or shown):
        return False
    # Python's references: one or two of the slot's, p.grad's, and the argument's.
    held = sys.getrefcount(slot.buffer) > 2 + private + SHOWN * shown
    return not held and tensor_references(slot.buffer) == 1 + shown  # type: ignore[arg-type]


def cast_over(slots: Sequence[Slot], dtype: torch.dtype, cast: Cast) -> list[Tensor]:
    """The casts of sums of slots that are `reusable`, as many in the same order. The sums are written over.

    Beside the sums it takes as much as the largest cast, or FRESH; `cast` is called about as often as the
    number of sums has binary digits.
    """
    sums: list[Tensor] = [slot.buffer for slot in slots]  # type: ignore[misc]  # `reusable` have one
    ratio = sums[0].itemsize // dtype.itemsize
    unit = ALIGNMENT // sums[0].itemsize
    sizes = [-(-total.numel() // unit) * unit for total in sums]  # as they lie in their segments
    order = sorted(range(len(sums)), key=sizes.__getitem__, reverse=True)
    end = min(max(FRESH // dtype.itemsize, sizes[order[0]]), sum(sizes))
    # Casts are put into a vector from `at` up to `end`, then into the memory of the sums that are done.
    vector, at = torch.empty(end, dtype=dtype, device=sums[0].device), 0
    vectors: dict[Segment, Tensor] = {}
    done: list[int] = []
    ready: list[int] = []
    casts = list(sums)
    for index in order:
        total, size = sums[index], sizes[index]
        if end - at < size:
            if not done:
                cast([casts[each] for each in ready], [sums[each] for each in ready])
                done, ready = ready, []
            freed = done.pop()
            segment: Segment = slots[freed].segment  # type: ignore[assignment]
            if segment not in vectors:
                vectors[segment] = segment.memory.view(dtype)
            vector, at = vectors[segment], ratio * int(sums[freed].storage_offset())
            end = at + ratio * sizes[freed]
        casts[index] = vector.as_strided(total.shape, total.stride(), at)
        at += size
        ready.append(index)
    cast([casts[each] for each in ready], [sums[each] for each in ready])
    return casts
