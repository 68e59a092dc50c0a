"""Every parameter's accumulator: what the parts of this package are together.

Note [Casts over accumulators]
An update gives up the accumulators that it casts. All accumulators and their casts side by side would be the
peak of training in low precision. A cast is at most half as long as its accumulator. So once the largest is
cast, each accumulator that is done makes room for two more. The first casts take memory that the backward
before had for gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import checks, loop_settings, registry, torch_state
from ..kernels.dtypes import PAIRS
from ..kernels.local_parts import distributed_as, is_distributed, local, placed_as
from ..kernels.registry import Backend
from .add import Adder
from .in_place import InPlaceWriter
from .memory import ALIGNMENT, SHOWN, Segment, like, tensor_references
from .noise import NoiseSource
from .p_grad import ParamGrads, SumsForUpdate
from .param import Lane, Slot
from .passes import Passes, Rescaler
from .record import DeferredScales, PartialNorms, Record, is_one, to_device_of


class Accumulators:
    """The accumulator of each parameter.

    `slots` is shared with its owner, who may append. `visible`: p.grad is the accumulator (manual loop).
    `seed`: of sums of bfloat16 that are rounded stochastically; None: to nearest.
    """

    def __init__(self, slots: list[Slot], visible: bool, backend: str, seed: int | None = None) -> None:
        self.slots = slots
        self.backend = backend
        if any(slot.lane[0].type == "cpu" for slot in slots):
            loop_settings.tune_grain_size()
        #: What was found out by trial and changes bits, by question (see `tuning`): it stays as it is.
        self.choices: dict[str, str] = {}
        self.grads, self.deferred = ParamGrads(slots, visible), DeferredScales()
        self.norms, self.noise = PartialNorms(), NoiseSource(seed)
        record = Record(self.grads, self.deferred, self.norms, self.noise)
        self._lock = record.lock
        self.passes = Passes(record, backend)
        self.rescaler = Rescaler(record, self.passes)
        self.in_place = InPlaceWriter(record, self.rescaler)
        self.partial = self.in_place.partial
        self.adder = Adder(record, self.passes, self.rescaler, self.partial)

    def sums_for_update(self) -> SumsForUpdate:
        """Every accumulator there is, no scale deferred."""
        if self.deferred.scales:
            self.rescaler.apply()
        return self.grads.sums_for_update()

    def publish(self) -> None:
        """Put every accumulator into p.grad, where it may stand there. No scale is deferred any more."""
        with self._lock:  # another thread's backward may be adding
            if self.deferred.scales:
                with torch.no_grad():
                    self.rescaler.apply()
            self.grads.publish_all()

    def scale_of(self, slot: Slot) -> float:
        """The deferred scale of the slot's accumulator, for a checkpoint; waits for a device."""
        factor = self.deferred[slot]
        return factor.item() if isinstance(factor, Tensor) else factor

    # An update

    def begin_update(self, sums: SumsForUpdate, scale: float | Tensor = 1.0) -> None:
        """Ready p.grad for the inner optimizer: the accumulator times `scale`, in the parameter's dtype.

        Where a kernel casts, the same pass scales; then the accumulator is given up for the cast, which may
        take its memory. `sums`: what `sums_for_update()` has returned; it is emptied before casts.
        """
        grads = self.grads
        grads.generation += 1
        if not grads.visible and len(sums.slots) < len(self.slots):
            grads.clear_others(sums.slots)
        grads.exposed = True
        is_scaled = isinstance(scale, Tensor) or scale != 1.0
        if sums.all_published and not (sums.need_casts or is_scaled):
            return
        pairs = list(zip(sums.slots, sums.tensors, strict=True))
        sums.slots.clear()
        sums.tensors.clear()
        if is_scaled:
            self.rescaler.rescale([pair for pair in pairs if not _casts_by_kernel(*pair)], scale)
        lanes: dict[Lane, list[Slot]] = {}
        for slot, accumulator in pairs:
            if _casts_by_kernel(slot, accumulator):
                lane = accumulator.device, accumulator.dtype, slot.param.dtype
                lanes.setdefault(lane, []).append(slot)
            elif accumulator.dtype != slot.param.dtype:
                grads.place_cast(slot, accumulator, accumulator.to(slot.param.dtype))
            elif not (grads.visible or grads.is_published(slot, accumulator)):
                grads.publish(slot, accumulator)
        pairs.clear()
        accumulator = None  # type: ignore[assignment]
        for (device, source, wanted), slots in lanes.items():
            self._cast(slots, registry.select(device, wanted, source, self.backend).backend, wanted, scale)

    def _cast(self, slots: list[Slot], backend: Backend, wanted: torch.dtype, scale: float | Tensor) -> None:
        """Place casts of the accumulators of these slots, of one lane."""

        def cast(casts: list[Tensor], of: list[Tensor]) -> None:
            backend.accumulate_(casts, of, to_device_of(scale, of[0]), True)

        grads, is_scaled = self.grads, not is_one(scale)
        given_up = reusable(slots, wanted) if is_scaled else []
        if given_up:
            for slot, made in zip(given_up, cast_over(given_up, wanted, cast), strict=True):
                grads.place_cast(slot, None, made)
            done = set(given_up)
            slots = [slot for slot in slots if slot not in done]
        accumulators: list[Any] = [grads.current(slot) for slot in slots]
        if accumulators:
            parts = [local(accumulator) for accumulator in accumulators]
            casts = like(parts, wanted)
            cast(casts, parts)
            for slot, accumulator, made in zip(slots, accumulators, casts, strict=True):
                whole = placed_as(accumulator, made) if is_distributed(accumulator) else made
                grads.place_cast(slot, None if is_scaled else accumulator, whole)

    def end_update(self) -> None:
        """After an update: as `ParamGrads.end_update`, and no norm holds any more."""
        self.norms.clear()
        if self.noise.seed is not None:
            self.noise.end_window()
        self.grads.end_update()

    def clear(self) -> None:
        """Forget every accumulator and clear every p.grad."""
        self.noise.drop_window(self.slots)
        self.norms.clear()
        self.deferred.clear()
        self.partial.forget()
        self.grads.clear()

    def zero(self) -> None:
        """As `clear`, but where there is a gradient, zeros stay visible in p.grad."""
        self.noise.drop_window(self.slots)
        self.deferred.clear()
        self.partial.forget()
        self.grads.zero()

    # Parameters that move, come and go

    def restore(self, slot: Slot, saved: Tensor, published: bool, scale: float = 1.0) -> None:
        """Make a copy of a saved accumulator the slot's, in its layout, dtype and device.

        `published`: whether it stood in p.grad. `scale`: its deferred scale.
        """
        grads, (device, _, dtype) = self.grads, slot.lane
        if is_distributed(slot.param):
            kept = torch.empty_like(slot.param, dtype=dtype, requires_grad=False)
            kept.copy_(distributed_as(saved, slot.param))
        elif saved.layout is torch.strided:
            kept = torch.empty_strided(slot.param.shape, slot.strides, dtype=dtype, device=device)
            kept.copy_(saved)
        else:
            kept = saved.to(device=device, dtype=dtype).clone()
            slot.set_needs_eager(True)
        if scale != 1.0:
            self.deferred.defer([slot], scale)
        if not (slot.reduced_outside or slot.sharded):
            slot.widen()  # which the hooks' registration has not done where the parameter is frozen
        grads.restore(slot, kept, published)

    def convert(self, slot: Slot) -> None:
        """Move a private accumulator to where its parameter has gone."""
        self.rescaler.apply([slot])
        self.grads.generation += 1
        self.passes.clear()
        device, _, dtype = slot.lane
        buffer, wanted = slot.buffer, (device, dtype, slot.shape, slot.strides)
        if buffer is not None and (buffer.device, buffer.dtype, buffer.shape, buffer.stride()) != wanted:
            slot.drop_buffer()
        accumulator = slot.accumulator
        if accumulator is not None and (accumulator.device != device or accumulator.dtype != dtype):
            slot.accumulator = accumulator.to(device=device, dtype=dtype)

    def drop(self, slots: Sequence[Slot]) -> None:
        """These slots are accumulated no more: forget their accumulators; what is in p.grad stays."""
        self.grads.generation += 1
        self.passes.clear()
        self._forget(slots)
        for slot in slots:
            slot.drop_buffer()

    def drop_wrong_shape(self, slot: Slot) -> None:
        """Counted loop, between windows: clear what an update has left, if it has another shape than now."""
        if self.grads.drop_wrong_shape(slot):
            self._forget([slot])

    def _forget(self, slots: Sequence[Slot]) -> None:
        self.deferred.discharge(slots)
        self.norms.forget(slots)
        self.partial.forget(slots)
        for slot in slots:
            self.grads.forget(slot)

    @property
    def nbytes(self) -> int:
        """Bytes of all accumulators, and of buffers that wait for the next window."""
        held: dict[int, int] = {}
        segments = {slot.segment.memory.data_ptr() for slot in self.slots if slot.segment is not None}
        for slot in self.slots:
            for tensor in (self.grads.current(slot), slot.buffer):
                if tensor is None:
                    continue
                tensor = local(tensor)
                if tensor.is_sparse:
                    held[id(tensor)] = tensor._values().nbytes + tensor._indices().nbytes
                elif (
                    tensor is slot.buffer
                    or not segments
                    or tensor.untyped_storage().data_ptr() not in segments
                ):
                    held[tensor.data_ptr() or id(tensor)] = tensor.nbytes
        return sum(held.values())


def _casts_by_kernel(slot: Slot, accumulator: Tensor) -> bool:
    """Whether a kernel makes the copy in the parameter's dtype."""
    dtypes = accumulator.dtype, slot.param.dtype
    return dtypes[0] != dtypes[1] and dtypes in PAIRS and checks.is_plain(local(accumulator))


#: Bytes of new memory for the first casts (Note [Casts over accumulators]); more where the largest needs it.
FRESH = 1 << 20
#: `(casts, accumulators)`: writes the casts, which share no memory with the accumulators.
Cast = Callable[[list[Tensor], list[Tensor]], None]


def reusable(slots: Sequence[Slot], dtype: torch.dtype) -> list[Slot]:
    """Select the slots, of one accumulate dtype, whose accumulators' memory casts may take.

    The memory has room for two casts, and only the slot refers to it; the caller must not either. There are
    none while a CUDA graph is captured: its replays could not check again.
    """
    if slots[0].accumulate_dtype.itemsize < 2 * dtype.itemsize or torch_state.capturing():
        return []
    segments = {slot.segment for slot in slots if slot.segment is not None}
    free = {segment for segment in segments if not segment.is_shared()}
    return [slot for slot in slots if slot.segment in free and _is_sole_sum(slot)]


def _is_sole_sum(slot: Slot) -> bool:
    """Whether the slot's buffer is its sum, and only the slot and p.grad refer to it."""
    private, shown = slot.accumulator is slot.buffer, slot.param.grad is slot.buffer
    if not (private or shown):
        return False
    # Python's references: one or two of the slot's, p.grad's, and the argument's.
    held = sys.getrefcount(slot.buffer) > 2 + private + SHOWN * shown
    # A sum or a gradient is the buffer, so there is one.
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
            # `reusable` has chosen slots with a segment.
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
