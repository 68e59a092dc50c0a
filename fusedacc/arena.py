"""Where sums live: gradients adopted as they are, buffers of their own, or views of the arena's segments.

In a manual loop p.grad is the sum and the truth. In a counted loop sums are private until the window's last
backward ends; then they are delivered: p.grad is the sum, and again the truth, until the next window begins.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from . import backends, checks
from .binding import Binding
from .left_norms import LeftNorms
from .memory import Segment, cut, is_sole, like, owns_memory, tensor_references
from .slot import Lane, Slot

#: Lists that are kept bound; models that use other parameters every time would bind ever new ones.
MAX_BINDINGS = 64


class Arena:
    """Adds gradients to sums, rescales sums, and moves them in and out of p.grad.

    Args:
        slots: the parameters; a list shared with its owner, who may append.
        visible: p.grad is the accumulator (manual loop); else sums are private (counted loop).
        backend: as in `AccumulatingOptimizer`.
    """

    def __init__(self, slots: list[Slot], visible: bool, backend: str) -> None:
        self.slots = slots
        self.visible = visible
        self.backend = backend
        self.any_delivered = False
        self._lock = threading.RLock()
        #: By the first of the parameters that were added together; the same come in every micro-batch.
        self._bindings: dict[Slot, Binding] = {}
        #: What a window's last additions leave for the update.
        self.norms = LeftNorms()
        #: Counts the changes of which tensors are private sums.
        self._generation = 0

    def select(self, lane: Lane) -> backends.Selection:
        """Which backend adds gradients of this lane, and why."""
        device, gradient, accumulator = lane
        return backends.select(device, accumulator, gradient, self.backend)

    def current(self, slot: Slot) -> Tensor | None:
        """The sum that the next gradient is added to, or None before the first."""
        if not (self.visible or slot.delivered):
            return slot.sum
        gradient = slot.param.grad
        return slot.sum if slot.cast is not None and gradient is slot.cast else gradient

    def add(self, slots: Sequence[Slot], gradients: list[Tensor], scale: float | Tensor) -> None:
        """sum += scale * gradient for each slot, in one pass.

        A first gradient of the sum's dtype that nobody else refers to becomes the sum.

        Args:
            slots: none twice, all of one lane.
            gradients: one per slot, strided and of its lane; the list is emptied.
            scale: what each gradient is multiplied by.
        """
        if not slots:
            return
        with self._lock:
            try:
                self._add(slots, gradients, scale)
            except RuntimeError:
                # A native operator refuses before it writes; it is asked first because looking is dearer.
                kept = self._set_odd_apart(slots, gradients, scale)
                if len(kept) == len(slots):
                    raise
                self._add(kept, gradients, scale)
            gradients.clear()

    def _add(self, slots: Sequence[Slot], gradients: list[Tensor], scale: float | Tensor) -> None:
        binding = self._bindings.get(slots[0]) if slots else None
        if binding is not None and binding.slots != slots:
            binding = None
        private = not (self.visible or self.any_delivered)
        if binding is not None and private and binding.generation == self._generation and binding.run:
            self._run_bound(binding, slots, None, gradients, scale)
            return
        sums: list[Any] = [slot.sum for slot in slots] if private else [self.current(slot) for slot in slots]
        if binding is not None and binding.holds(sums):
            self._run_bound(binding, slots, sums, gradients, scale)
            if private:
                binding.generation = self._generation
            else:
                increment_version(sums)
            return
        slots = self._set_odd_apart(slots, gradients, scale)
        sums = [self.current(slot) for slot in slots]
        if all(map(self._fits, slots, sums)):
            self._run(sums, gradients, scale, False, slots)
            if slots:
                backend = self.select(slots[0].lane).backend
                generation = self._generation if private else -1
                if len(self._bindings) >= MAX_BINDINGS:
                    self._bindings.clear()
                self._bindings[slots[0]] = Binding(backend, slots, sums, generation)
        else:
            self._add_some_first(slots, gradients, scale)

    def _set_odd_apart(
        self, slots: Sequence[Slot], gradients: list[Tensor], scale: float | Tensor
    ) -> Sequence[Slot]:
        """Add gradients that are not of their lane singly, and take them out; the slots that are left."""
        wanted, strided = slots[0].lane[1] if slots else None, torch.strided
        if all(gradient.dtype is wanted and gradient.layout is strided for gradient in gradients):
            return slots
        ordinary = []
        for index, slot in enumerate(slots):
            gradient = gradients[index]
            slot.odd = slot.odd or gradient.layout is not strided
            if slot.odd or gradient.dtype is not wanted:
                self.add_odd(slot, gradient, scale)
            else:
                ordinary.append(index)
        del gradient
        gradients[:] = [gradients[index] for index in ordinary]
        return [slots[index] for index in ordinary]

    def _add_some_first(self, slots: Sequence[Slot], gradients: list[Tensor], scale: float | Tensor) -> None:
        """`add` where some slot has no sum yet, or the user has put one into p.grad."""
        sums: list[Any] = []
        terms: list[Tensor] = []
        first: list[bool] = []
        fresh: list[Slot] = []
        added: list[Slot] = []
        same_dtype = slots[0].lane[1] == slots[0].lane[2]
        buffers = None if same_dtype else self._buffers(slots)
        private = not (self.visible or self.any_delivered)
        if buffers is not None and private and all(slot.sum is None for slot in slots):
            self._run(buffers, gradients, scale, True, slots)
            self._generation += 1
            for slot, total in zip(slots, buffers, strict=True):
                slot.sum = total
            return
        for index, slot in enumerate(slots):
            total = self.current(slot)
            if total is None:
                if same_dtype and slot.obeys_layout(gradients[index]) and is_sole(gradients, index):
                    total = gradients[index]
                    if _is_one(scale):
                        self._put(slot, total)
                        continue
                elif buffers is None:
                    shape, (device, _, dtype) = slot.param.shape, slot.lane
                    total = torch.empty_strided(shape, slot.strides, dtype=dtype, device=device)
                else:
                    total = buffers[index]
                fresh.append(slot)
                first.append(True)
            elif not self._fits(slot, total):
                self.add_odd(slot, gradients[index], scale)
                continue
            else:
                first.append(False)
            sums.append(total)
            added.append(slot)
            terms.append(gradients[index])
        flags = first if len(fresh) < len(sums) and fresh else bool(fresh)
        self._run(sums, terms, scale, flags, added)
        written = (total for total, new in zip(sums, first, strict=True) if new)
        for slot, total in zip(fresh, written, strict=True):
            self._put(slot, total)

    def add_mixed(self, slots: Iterable[Slot], gradients: Iterable[Tensor], scale: float | Tensor) -> None:
        """As `add`, for gradients of any kind and lane."""
        lanes: dict[Lane, tuple[list[Slot], list[Tensor]]] = {}
        for slot, gradient in zip(slots, gradients, strict=True):
            if type(gradient) is Tensor and not slot.odd and gradient.dtype == slot.lane[1]:
                chosen = lanes.setdefault(slot.lane, ([], []))
                chosen[0].append(slot)
                chosen[1].append(gradient)
            else:
                self.add_odd(slot, gradient, scale)
        for chosen_slots, chosen_gradients in lanes.values():
            self.add(chosen_slots, chosen_gradients, scale)

    def add_odd(self, slot: Slot, gradient: Tensor, scale: float | Tensor) -> None:
        """As `add`, by plain torch: sparse and complex gradients, subclasses, dtypes that no kernel pairs."""
        with self._lock:
            self.norms.forget([slot])
            total = self.current(slot)
            dtype = slot.accumulate_dtype if total is None else total.dtype
            if total is None or (total.is_sparse and not gradient.is_sparse):
                term = _scaled(gradient.to(dtype), scale)
                if total is not None:
                    term = term + total
                elif term is gradient:
                    term = gradient.clone()
                self._put(slot, term)
            elif total.is_sparse:
                self._put(slot, total + _scaled(gradient.to(dtype), scale))
            elif isinstance(scale, Tensor):
                total.add_(_scaled(gradient.to(dtype), scale))
            else:
                total.add_(gradient, alpha=scale)

    def finals(self) -> list[tuple[Slot, Tensor]]:
        """Every sum there is, with its slot."""
        pairs = ((slot, self.current(slot)) for slot in self.slots)
        return [(slot, total) for slot, total in pairs if total is not None]

    def rescale(self, ratio: float | Tensor) -> None:
        """sum *= ratio for every sum; a 0-dim tensor is read on the device."""
        self._rescale(self.finals(), ratio)

    def _rescale(self, finals: Iterable[tuple[Slot, Tensor]], ratio: float | Tensor) -> None:
        if _is_one(ratio):
            return
        self.norms.clear()
        groups: dict[tuple, list[Tensor]] = {}
        for _, total in finals:
            if checks.is_plain(total) and (total.dtype, total.dtype) in checks.PAIRS:
                groups.setdefault((total.device, total.dtype), []).append(total)
            elif total.is_sparse:
                total._values().mul_(_near(ratio, total))  # a product would sum repeated indices
            else:
                total.mul_(_near(ratio, total))
        for sums in groups.values():
            self._run(sums, sums, ratio, True)

    def deliver(self) -> None:
        """Put every sum into p.grad, and the truth with it, where it may stand there."""
        for slot in self.slots:
            if slot.sum is None or not slot.shows_sum():
                continue
            present = slot.param.grad
            if present is None or not slot.is_foreign(present):
                self._show(slot, slot.sum)
        self.any_delivered = True

    def _show(self, slot: Slot, total: Tensor) -> None:
        self._generation += 1
        slot.param.grad = total
        slot.shown, slot.shown_version = weakref.ref(total), total._version
        slot.sum = slot.cast = slot.ignored = None
        slot.delivered = True

    def retract(self) -> None:
        """Begin a window: sums that nobody has cleared go on, but in private."""
        if self.any_delivered:
            self.disown()
            for slot in self.slots:
                self.hide(slot)
            self.any_delivered = False

    def hide(self, slot: Slot) -> None:
        """Take our own gradient out of p.grad, so that autograd can put a fresh one there."""
        self._generation += 1
        gradient = slot.param.grad
        if slot.delivered:
            if gradient is not None and not slot.odd and gradient.dtype != slot.accumulate_dtype:
                gradient = gradient.to(slot.accumulate_dtype)
            slot.sum = gradient
        elif slot.cast is not None and gradient is None:
            slot.sum = None
        if gradient is not None and not slot.is_foreign(gradient):
            slot.param.grad = None
        slot.delivered = False
        slot.cast = slot.ignored = None

    def unhide(self, slot: Slot) -> None:
        """After `hide`: the sum stands in p.grad again, and what was put there meanwhile is dropped."""
        if slot.sum is not None:
            self._show(slot, slot.sum)
            self.any_delivered = True

    def disown(self) -> None:
        """Between windows: what the user has put into p.grad in place of our sum is a gradient of theirs."""
        self._generation += 1
        if self.any_delivered:
            for slot in self.slots:
                if slot.delivered and slot.param.grad is not slot.shown():
                    slot.delivered = False

    def disown_added(self, slot: Slot) -> None:
        """Between windows, after a move: what autograd has added to our zeros is a gradient."""
        total = slot.param.grad
        if slot.delivered and total is slot.shown() and total is not None:
            slot.delivered = total._version == slot.shown_version

    def may_adopt(self, slot: Slot, gradient: Tensor) -> bool:
        """Whether a gradient is likely to become the sum once nobody but us refers to it."""
        first = gradient.dtype is slot.lane[2] and self.current(slot) is None
        return first and slot.obeys_layout(gradient) and owns_memory(gradient)

    def set_aside(self, slot: Slot) -> None:
        """Ready p.grad for a gradient that autograd will store, and that is to be scaled or counted after."""
        self._generation += 1
        if not self.visible:
            self.hide(slot)
        elif not slot.aside:
            slot.sum, slot.param.grad, slot.cast = self.current(slot), None, None
            slot.aside = True

    def reclaim(self, scale: float | Tensor | None) -> None:
        """Manual loop: add what autograd has stored since `set_aside` to the sums, which return to p.grad.

        A scale of None drops it: a micro-batch of weight 0 adds nothing.
        """
        self._generation += 1
        for slot in self.slots:
            if slot.aside:
                gradient, slot.param.grad, slot.sum = slot.param.grad, slot.sum, None
                slot.aside = False
                if gradient is not None and scale is not None:
                    self.add_mixed([slot], [gradient.detach()], scale)

    def present(self, scale: float | Tensor = 1.0) -> None:
        """Ready p.grad for the inner optimizer: the sum times `scale`, cast where the parameter has another
        dtype. Where a kernel casts, the same pass scales; then the sum is given up for the cast.
        """
        self._generation += 1
        scaled = not _is_one(scale)
        if scaled:
            self._rescale([pair for pair in self.finals() if not self._casts_by_kernel(*pair)], scale)
        lanes: dict[Lane, tuple[list[Slot], list[Tensor]]] = {}
        for slot in self.slots:
            total = self.current(slot)
            if total is None:
                if not self.visible and slot.param.grad is not None:
                    slot.param.grad = None
            elif self._casts_by_kernel(slot, total):
                chosen = lanes.setdefault((total.device, total.dtype, slot.param.dtype), ([], []))
                chosen[0].append(slot)
                chosen[1].append(total)
            elif total.dtype != slot.param.dtype:
                self._present_cast(slot, total, total.to(slot.param.dtype))
            elif not self.visible and not (slot.delivered and total is slot.shown()):
                self._show(slot, total)
        self.any_delivered = True
        for (device, source, wanted), (slots, totals) in lanes.items():
            casts = like(totals, wanted)
            backend = backends.select(device, wanted, source, self.backend).backend
            backend.accumulate_(casts, totals, _near(scale, totals[0]), True)
            for slot, total, cast in zip(slots, totals, casts, strict=True):
                self._present_cast(slot, None if scaled else total, cast)

    @staticmethod
    def _casts_by_kernel(slot: Slot, total: Tensor) -> bool:
        dtype = slot.param.dtype
        return total.dtype != dtype and (total.dtype, dtype) in checks.PAIRS and checks.is_plain(total)

    @staticmethod
    def _present_cast(slot: Slot, total: Tensor | None, cast: Tensor) -> None:
        slot.sum, slot.cast, slot.param.grad = total, cast, cast
        slot.delivered = False

    def withdraw(self) -> None:
        """After an update: the sum stands in p.grad again where it may, and its copy goes."""
        self._generation += 1
        self.norms.clear()
        for slot in self.slots:
            if slot.cast is not None and slot.shows_sum():
                if slot.param.grad is slot.cast and slot.sum is not None:
                    self._show(slot, slot.sum)
                else:
                    cast, slot.cast, slot.sum = slot.cast, None, None
                    if slot.param.grad is cast and cast.dtype != slot.param.dtype:  # it was a master's
                        slot.param.grad = cast.to(slot.accumulate_dtype)

    def clear(self) -> None:
        """Forget every sum and clear every p.grad."""
        self._generation += 1
        self.norms.clear()
        for slot in self.slots:
            slot.forget()
            if slot.param.grad is not None:
                slot.param.grad = None
        self.any_delivered = False

    def zero(self) -> None:
        """As `clear`, but where there is a gradient, zeros stay visible in p.grad."""
        self._generation += 1
        for slot in self.slots:
            gradient = slot.param.grad
            if slot.cast is not None and gradient is slot.cast and slot.shows_sum():
                gradient = slot.sum
            slot.forget()
            if gradient is None:
                continue
            if gradient.grad_fn is not None:
                gradient.detach_()
            else:
                gradient.requires_grad_(False)
            gradient.zero_()
            if self.visible:
                slot.param.grad = gradient
                continue
            slot.sum = gradient.to(slot.accumulate_dtype)
            if slot.shows_sum():
                self._show(slot, slot.sum)
            else:
                slot.cast = gradient
        self.any_delivered = True

    def ignore_present(self) -> None:
        """What stands in p.grad now is no gradient of the window; `clear_ignored` takes it away."""
        for slot in self.slots:
            if not slot.delivered:
                slot.ignored = slot.param.grad

    def clear_ignored(self) -> None:
        """Clear from p.grad what does not count: left by backwards inside `ignore()`, or zeros put there."""
        for slot in self.slots:
            if slot.ignored is not None:
                if slot.param.grad is slot.ignored:
                    slot.param.grad = None
                slot.ignored = None

    def restore(self, slot: Slot, total: Tensor, delivered: bool) -> None:
        """Make a copy of a saved sum the slot's, in its layout, dtype and device."""
        self._generation += 1
        device, _, dtype = slot.lane
        if total.layout is torch.strided:
            kept = torch.empty_strided(slot.param.shape, slot.strides, dtype=dtype, device=device)
            slot.sum = kept.copy_(total)
        else:
            slot.sum = total.to(device=device, dtype=dtype).clone()
            slot.odd = True
        if self.visible or delivered:
            self._show(slot, slot.sum)
            self.any_delivered = True

    def convert(self, slot: Slot) -> None:
        """Move a private sum to where its parameter has gone."""
        self._generation += 1
        self._bindings.clear()
        device, _, dtype = slot.lane
        buffer = slot.buffer
        if buffer is not None and (buffer.device, buffer.dtype, buffer.stride()) != (
            device,
            dtype,
            slot.strides,
        ):
            slot.drop_buffer()
        total = slot.sum
        if total is not None and (total.device != device or total.dtype != dtype):
            slot.sum = total.to(device=device, dtype=dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all sums, and of buffers that wait for the next window."""
        held: dict[int, int] = {}
        for slot in self.slots:
            for tensor in (self.current(slot), slot.buffer):
                if tensor is not None and tensor.is_sparse:
                    held[id(tensor)] = tensor._values().nbytes + tensor._indices().nbytes
                elif tensor is not None:
                    held[tensor.data_ptr() or id(tensor)] = tensor.nbytes
        return sum(held.values())

    def _put(self, slot: Slot, total: Tensor) -> None:
        self._generation += 1
        if self.visible or slot.delivered:
            self._show(slot, total)
        else:
            slot.sum = total

    def _fits(self, slot: Slot, total: Tensor | None) -> bool:
        """Whether there is a sum that the slot's kernel takes; the user may have put another into p.grad."""
        device, _, dtype = slot.lane
        return (
            total is not None and total.dtype == dtype and total.device == device and checks.is_plain(total)
        )

    def _run(
        self,
        sums: list[Tensor],
        terms: list[Tensor],
        scale: float | Tensor,
        overwrite: bool | list[bool],
        slots: Sequence[Slot] = (),
    ) -> None:
        """One pass. It leaves the norms of what are the sums of `slots`, if they are wanted."""
        if not sums:
            return
        chosen = self.select((sums[0].device, terms[0].dtype, sums[0].dtype)).backend
        scale, norm_type = _near(scale, sums[0]), self.norms.norm_type if slots else None
        partials = None
        if norm_type is None:
            self.norms.forget(slots)
            chosen.accumulate_(sums, terms, scale, overwrite)
        else:
            partials = chosen.accumulate_with_norm_(sums, terms, scale, overwrite, norm_type)
        if self.visible or self.any_delivered:
            increment_version(sums)
        if partials is not None:
            self.norms.leave(slots, sums, partials)

    def _run_bound(
        self,
        binding: Binding,
        slots: Sequence[Slot],
        sums: list[Tensor] | None,
        gradients: list[Tensor],
        scale: float | Tensor,
    ) -> None:
        """As `_run`, for sums that are bound; None for those that are private and have not changed."""
        partials = binding.add(sums, gradients, _near(scale, gradients[0]), self.norms.norm_type)
        if partials is None:
            self.norms.forget(slots)
        else:
            self.norms.leave(slots, sums or [slot.sum for slot in slots], partials)  # type: ignore[misc]

    def _buffers(self, slots: Sequence[Slot]) -> list[Any]:
        """Memory kept from window to window for first gradients whose sums have another dtype.

        Slots that have none, or whose buffer a user still sees as an old p.grad, get a new segment together.
        """
        segments = {slot.segment for slot in slots if slot.segment is not None}
        free = {segment for segment in segments if not segment.is_shared()}
        lacking = []
        for slot in slots:
            # Two references to a buffer that only the slot knows: the slot's and the argument's.
            held = slot.segment not in free or sys.getrefcount(slot.buffer) > 2
            if self.current(slot) is None and (held or tensor_references(slot.buffer) > 1):  # type: ignore[arg-type]
                lacking.append(slot)
        if lacking:
            device, _, dtype = slots[0].lane
            memory, views = cut([(slot.param.shape, slot.strides) for slot in lacking], dtype, device)
            segment = Segment(memory, len(views))
            for slot, view in zip(lacking, views, strict=True):
                slot.drop_buffer()
                slot.buffer, slot.segment = view, segment
        return [slot.buffer for slot in slots]


def _is_one(scale: float | Tensor) -> bool:
    """Whether there is nothing to multiply; what is on a device is not asked."""
    return not isinstance(scale, Tensor) and scale == 1.0


def _scaled(tensor: Tensor, scale: float | Tensor) -> Tensor:
    if _is_one(scale):
        return tensor
    scale = _near(scale, tensor)
    if not tensor.is_sparse or not isinstance(scale, Tensor):
        return tensor * scale
    # A product with a tensor would sum repeated indices, and so round elsewhere than stock.
    indices, values = tensor._indices(), tensor._values() * scale
    return torch.sparse_coo_tensor(indices, values, tensor.shape, is_coalesced=tensor.is_coalesced())


def _near(scale: float | Tensor, tensor: Tensor) -> float | Tensor:
    """The scale where the tensor is."""
    return scale.to(tensor.device, non_blocking=True) if isinstance(scale, Tensor) else scale
