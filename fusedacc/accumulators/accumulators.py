"""The accumulators of all parameters, and the update that consumes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import checks, registry
from ..kernels.dtypes import PAIRS
from ..kernels.local_parts import distributed_as, is_distributed, local, placed_as
from ..kernels.registry import Backend
from .add import Adder
from .deferred_scale import DeferredScales, is_one, to_device_of
from .in_place import InPlaceWriter
from .main_grad import MainGrads
from .memory import bytes_of, like
from .noise import NoiseSource
from .p_grad import ParamGrads, SumsForUpdate
from .param import Lane, Slot
from .passes import Passes


class Accumulators:
    """The accumulator of each parameter; the wrapper may append to `slots`.

    always_exposed: whether p.grad is the accumulator at any time (manual loop). backend: as in the wrapper.
    seed: of stochastic rounding; None rounds to nearest. main_grad: whether modules may add to the sums by
    themselves.
    """

    def __init__(
        self,
        slots: list[Slot],
        always_exposed: bool,
        backend: str,
        seed: int | None = None,
        main_grad: bool = False,
    ) -> None:
        self.slots = slots
        self.backend = backend
        self.grads = ParamGrads(slots, always_exposed)
        self.grads.has_main_grads = main_grad
        self.main_grads = MainGrads(slots) if main_grad else None
        self.deferred = DeferredScales(slots)
        #: Whether the next update will compute the norm of the accumulators.
        self.update_needs_norm = False
        self.noise = NoiseSource(seed)
        self.passes = Passes(self.grads, self.deferred, self.noise, backend)
        #: The wrapper's engine, which `Capture` makes.
        self.engine: Any = None
        self.in_place = InPlaceWriter(self.passes)
        self.adder = Adder(self.passes, self.in_place)

    def sums_for_update(self) -> SumsForUpdate:
        """Return all accumulators, after applying the deferred scales that no addition has applied."""
        self.passes.apply_scales()
        return self.grads.sums_for_update()

    def publish(self) -> None:
        """Put every accumulator that autograd accepts into p.grad. First apply the deferred scales of
        gradients that were added since the caller has applied them.
        """
        with self.passes.lock:  # another thread's backward pass may be adding
            with torch.no_grad():
                self.passes.apply_scales()
            self.grads.publish_all()

    # An update

    def fill_p_grad(self, sums: SumsForUpdate, scale: float | Tensor = 1.0) -> None:
        """Set p.grad for the inner optimizer: the accumulator times `scale`, in the slot's `update_dtype`. A
        kernel that casts also scales.
        """
        grads = self.grads
        if not grads.always_exposed and len(sums.slots) < len(self.slots):
            for slot in set(self.slots).difference(sums.slots):
                slot.param.grad = None
        grads.exposed = True
        is_scaled = not is_one(scale)
        if sums.all_published and not (sums.need_casts or is_scaled):
            return
        slots_with_sums = list(zip(sums.slots, sums.tensors, strict=True))
        if is_scaled:
            by_pass = [
                (slot, accumulator)
                for slot, accumulator in slots_with_sums
                if not _casts_by_kernel(slot, accumulator)
            ]
            self.passes.rescale(by_pass, scale)
        lanes: dict[Lane, list[Slot]] = {}
        for slot, accumulator in slots_with_sums:
            if _casts_by_kernel(slot, accumulator):
                lane = accumulator.device, accumulator.dtype, slot.update_dtype
                lanes.setdefault(lane, []).append(slot)
            elif accumulator.dtype != slot.update_dtype:
                grads.place_cast(slot, accumulator, accumulator.to(slot.update_dtype))
            elif not (grads.always_exposed or grads.is_published(slot, accumulator)):
                grads.publish(slot, accumulator)
        for (device, source_dtype, dtype), slots in lanes.items():
            backend = registry.select(device, dtype, source_dtype, self.backend).backend
            self._cast(slots, backend, dtype, scale)

    def _cast(self, slots: list[Slot], backend: Backend, dtype: torch.dtype, scale: float | Tensor) -> None:
        """Cast the accumulators of these slots of one lane into p.grad."""
        grads = self.grads
        accumulators: list[Any] = [grads.current(slot) for slot in slots]
        parts = [local(accumulator) for accumulator in accumulators]
        casts = like(parts, dtype)
        # Overwriting with `scale` times another tensor is a scaled cast.
        backend.accumulate_(casts, parts, to_device_of(scale, parts[0]), overwrite=True)
        for slot, accumulator, cast in zip(slots, accumulators, casts, strict=True):
            whole = placed_as(accumulator, cast) if is_distributed(accumulator) else cast
            grads.place_cast(slot, accumulator if is_one(scale) else None, whole)

    def end_update(self) -> None:
        """End the numbering of random bits after an update, and call `ParamGrads.restore_p_grad`."""
        if self.noise.seed is not None:
            self.noise.begin_own()
            self.noise.finish_numbering()
        self.grads.restore_p_grad()

    def clear(self, set_to_none: bool = True) -> None:
        """Forget every accumulator and clear every p.grad. Without `set_to_none` zeros replace gradients."""
        self.noise.drop_window(self.slots)
        self.deferred.discharge()
        self.in_place.forget()
        if set_to_none:
            self.grads.clear()
        else:
            self.grads.zero()

    # Parameters that move, come and go

    def restore(self, slot: Slot, saved: Tensor, published: bool, scale: float = 1.0) -> None:
        """Give the slot a copy of a saved accumulator, which was in p.grad if `published`, and its scale."""
        device, _, dtype = slot.lane
        if slot.main_grad is not None:
            accumulator = slot.main_grad.copy_(saved.to_dense())
            if scale != 1.0:
                accumulator.mul_(scale)
                scale = 1.0
        elif is_distributed(slot.param):
            accumulator = torch.empty_like(slot.param, dtype=dtype, requires_grad=False)
            accumulator.copy_(distributed_as(saved, slot.param))
        elif saved.layout is torch.strided:
            accumulator = torch.empty_strided(slot.param.shape, slot.strides, dtype=dtype, device=device)
            accumulator.copy_(saved)
        else:
            accumulator = saved.to(device=device, dtype=dtype).clone()
            slot.needs_eager = True
        if scale != 1.0:
            self.deferred.defer([slot], scale)
        if not (slot.sharded or slot.is_reduced_outside()):
            slot.widen()  # hook registration skips frozen parameters
        self.grads.restore(slot, accumulator, published)

    def convert(self, slot: Slot) -> None:
        """Move and cast a private accumulator after its parameter was moved or cast."""
        self.passes.apply_scales([slot])
        device, _, dtype = slot.lane
        buffer = slot.buffer
        if buffer is not None:
            described = device, dtype, slot.shape, slot.strides
            if (buffer.device, buffer.dtype, buffer.shape, buffer.stride()) != described:
                slot.drop_buffer()
        accumulator = slot.accumulator
        if accumulator is not None and (accumulator.device != device or accumulator.dtype != dtype):
            slot.accumulator = accumulator.to(device=device, dtype=dtype)

    def drop(self, slots: Sequence[Slot]) -> None:
        """Stop accumulating these slots. Their p.grad is left as it is."""
        self._forget(slots)
        for slot in slots:
            slot.drop_buffer()

    def drop_wrong_shape(self, slot: Slot) -> None:
        """Drop a consumed gradient if its parameter has changed its shape, see `ParamGrads`."""
        if self.grads.drop_wrong_shape(slot):
            self._forget([slot])

    def _forget(self, slots: Sequence[Slot]) -> None:
        self.deferred.discharge(slots)
        self.in_place.forget(slots)
        for slot in slots:
            self.grads.forget(slot)

    @property
    def nbytes(self) -> int:
        """The bytes of all accumulators, and of the buckets that are all-reduced.

        Any thread may read this, so p.grad is not read: torch replaces it without a lock that we know. An
        accumulator in p.grad counts until fusedacc removes it. Gradients that only autograd has added up in
        p.grad do not count.
        """
        with self.passes.lock:  # a backward pass replaces accumulators without Python's global lock
            return self._count_bytes()

    def _count_bytes(self) -> int:
        total = 0
        buckets = {_memory_of(slot.segment.memory) for slot in self.slots if slot.segment is not None}
        for slot in list(self.slots):
            accumulator = slot.accumulator
            buffer = slot.buffer
            if slot.main_grad is not None:
                total += slot.main_grad.nbytes
                continue
            if buffer is not None:
                total += buffer.nbytes
            if accumulator is None:
                if buffer is None:
                    total += slot.published_bytes
            elif accumulator.is_sparse or not buckets or _memory_of(local(accumulator)) not in buckets:
                total += bytes_of(accumulator)
        return total


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _casts_by_kernel(slot: Slot, accumulator: Tensor) -> bool:
    """Whether a kernel can cast this accumulator to the dtype of p.grad at an update."""
    source = accumulator.dtype
    target = slot.update_dtype
    return source != target and (source, target) in PAIRS and checks.is_plain(local(accumulator))
