"""Where sums live: gradients adopted as they are, buffers of their own, or views of the arena's segments.

In a manual loop p.grad is the sum and the truth. In a counted loop sums are private until the window's last
backward ends; then they are delivered: p.grad is the sum, and again the truth, until the next window begins.
"""

from __future__ import annotations

import itertools
import operator
import sys
import threading
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from . import backends, checks
from .slot import Lane, Slot, is_sole, tensor_references

#: Views in a segment start at multiples of this many bytes: a cache line, and the widest vector load.
ALIGNMENT = 128


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

    def select(self, lane: Lane) -> backends.Selection:
        """Which backend adds gradients of this lane, and why."""
        device, gradient, accumulator = lane
        return backends.select(device, accumulator, gradient, self.backend)

    def current(self, slot: Slot) -> Tensor | None:
        """The sum that the next gradient is added to, or None before the first."""
        if self.visible:
            gradient = slot.param.grad
            if gradient is None or gradient is not slot.cast:
                slot.sum = gradient
        return slot.sum

    def is_first(self, slot: Slot) -> bool:
        """Whether the slot has no sum yet."""
        return (slot.param.grad if self.visible else slot.sum) is None

    def add(self, slots: Sequence[Slot], gradients: list[Tensor], scale: float) -> None:
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
            sums = [slot.sum for slot in slots]
            if self.visible:
                known, sums = sums, [slot.param.grad for slot in slots]
                settled = all(map(operator.is_, sums, known))
            else:
                settled = True
            if settled and all(map(operator.is_not, sums, itertools.repeat(None))):
                self._run(sums, gradients, scale, False)  # type: ignore[arg-type]
                gradients.clear()
            else:
                self._add_some_first(slots, gradients, scale)

    def _add_some_first(self, slots: Sequence[Slot], gradients: list[Tensor], scale: float) -> None:
        """`add` where some slot has no sum yet, or the user has put one into p.grad."""
        sums: list[Tensor] = []
        terms: list[Tensor] = []
        first: list[bool] = []
        fresh: list[Slot] = []
        same_dtype = slots[0].lane[1] == slots[0].lane[2]
        for index, slot in enumerate(slots):
            total = self.current(slot)
            if total is None:
                if same_dtype and slot.obeys_layout(gradients[index]) and is_sole(gradients, index):
                    total = gradients[index]
                    if scale == 1.0:
                        self._put(slot, total)
                        continue
                else:
                    total = self._buffer(slot, slots)
                fresh.append(slot)
                first.append(True)
            elif self.visible and not self._fits(slot, total):
                self.add_odd(slot, gradients[index], scale)
                continue
            else:
                first.append(False)
            sums.append(total)
            terms.append(gradients[index])
        gradients.clear()
        if sums:
            self._run(sums, terms, scale, first if len(fresh) < len(sums) and fresh else bool(fresh))
        written = (total for total, new in zip(sums, first, strict=True) if new)
        for slot, total in zip(fresh, written, strict=True):
            self._put(slot, total)

    def add_mixed(self, slots: Iterable[Slot], gradients: Iterable[Tensor], scale: float) -> None:
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

    def add_odd(self, slot: Slot, gradient: Tensor, scale: float) -> None:
        """As `add`, by plain torch: sparse and complex gradients, subclasses, dtypes that no kernel pairs."""
        with self._lock:
            total = self.current(slot)
            dtype = slot.accumulate_dtype if total is None else total.dtype
            if total is None or (total.is_sparse and not gradient.is_sparse):
                term = gradient.to(dtype) if scale == 1.0 else gradient.to(dtype) * scale
                if total is not None:
                    term = term + total
                elif term is gradient:
                    term = gradient.clone()
                self._put(slot, term)
            elif total.is_sparse:
                self._put(slot, total + (gradient.to(dtype) if scale == 1.0 else gradient.to(dtype) * scale))
            else:
                total.add_(gradient, alpha=scale)

    def rescale(self, ratio: float) -> None:
        """sum *= ratio for every sum."""
        if ratio == 1.0:
            return
        groups: dict[tuple, list[Tensor]] = {}
        for slot in self.slots:
            total = self.current(slot)
            if total is None:
                continue
            if checks.is_plain(total) and (total.dtype, total.dtype) in checks.PAIRS:
                groups.setdefault((total.device, total.dtype), []).append(total)
            elif total.is_sparse:
                self._put(slot, total * ratio)
            else:
                total.mul_(ratio)
        for sums in groups.values():
            self._run(sums, sums, ratio, True)

    def deliver(self) -> None:
        """Put every sum into p.grad where it stands as it is (see `Slot.shows_sum`)."""
        for slot in self.slots:
            if slot.sum is None or slot.delivered or not slot.shows_sum():
                continue
            present = slot.param.grad
            if present is None or not slot.is_foreign(present):
                slot.param.grad = slot.sum
                slot.delivered = True
                slot.ignored = None
        self.any_delivered = True

    def acknowledge(self) -> None:
        """Take what the user made of delivered gradients: changed in place, replaced or removed."""
        if not self.any_delivered:
            return
        for slot in self.slots:
            if slot.delivered and slot.param.grad is not slot.cast:
                slot.sum = slot.param.grad
                slot.delivered = slot.sum is not None

    def retract(self) -> None:
        """Begin a window: sums that nobody has cleared go on, but in private."""
        if not self.any_delivered:
            return
        self.acknowledge()
        for slot in self.slots:
            if slot.delivered or (slot.cast is not None and slot.param.grad is slot.cast):
                self.hide(slot)
            if slot.sum is not None and not slot.odd and slot.sum.dtype != slot.accumulate_dtype:
                slot.sum = slot.sum.to(slot.accumulate_dtype)
        self.any_delivered = False

    def make_way(self, slot: Slot) -> None:
        """Ready p.grad for a gradient that autograd is going to store there itself."""
        if not self.visible:
            self.hide(slot)
        elif slot.cast is not None and slot.param.grad is slot.cast:
            slot.param.grad, slot.cast = slot.sum, None

    def hide(self, slot: Slot) -> None:
        """Take our own gradient out of p.grad, so that autograd puts a fresh one there."""
        if slot.param.grad is slot.cast or slot.param.grad is slot.ignored or slot.delivered:
            slot.param.grad = None
        slot.delivered = False
        slot.cast = slot.ignored = None

    def present(self) -> None:
        """Ready p.grad for the inner optimizer: the sum, cast where the parameter has another dtype."""
        lanes: dict[Lane, list[Slot]] = {}
        for slot in self.slots:
            total = self.current(slot)
            if total is None:
                if not self.visible and slot.param.grad is not None:
                    slot.param.grad = None
                continue
            if total.dtype != slot.param.dtype:
                lanes.setdefault((total.device, total.dtype, slot.param.dtype), []).append(slot)
            elif slot.param.grad is not total:
                slot.param.grad = total
                slot.delivered = True
        for (device, source, wanted), slots in lanes.items():
            totals = [slot.sum for slot in slots]
            if (source, wanted) in checks.PAIRS and all(checks.is_plain(t) for t in totals):  # type: ignore[arg-type]
                casts = [torch.empty_like(total, dtype=wanted) for total in totals]  # type: ignore[arg-type]
                chosen = backends.select(device, wanted, source, self.backend).backend
                chosen.accumulate_(casts, totals, 1.0, True)  # type: ignore[arg-type]
            else:
                casts = [total.to(wanted) for total in totals]  # type: ignore[union-attr]
            for slot, cast in zip(slots, casts, strict=True):
                slot.cast = slot.param.grad = cast
        self.any_delivered = True

    def withdraw(self) -> None:
        """After an update: the sum stands in p.grad again where it may, and its copy goes."""
        for slot in self.slots:
            if slot.cast is not None and slot.shows_sum():
                if slot.param.grad is slot.cast:
                    slot.param.grad = slot.sum
                    slot.delivered = True
                slot.cast = None

    def clear(self) -> None:
        """Forget every sum and clear every p.grad."""
        for slot in self.slots:
            slot.sum = slot.cast = slot.ignored = None
            slot.delivered = False
            if slot.param.grad is not None:
                slot.param.grad = None
        self.any_delivered = False

    def zero(self) -> None:
        """As `clear`, but where there is a gradient, zeros stay visible in p.grad."""
        for slot in self.slots:
            gradient = slot.param.grad
            if slot.cast is not None and gradient is slot.cast and slot.shows_sum():
                slot.param.grad = gradient = slot.sum
            slot.cast = slot.ignored = None
            if gradient is None:
                slot.sum = None
            else:
                if gradient.grad_fn is not None:
                    gradient.detach_()
                else:
                    gradient.requires_grad_(False)
                gradient.zero_()
                self._keep(slot, gradient)
            slot.delivered = slot.sum is not None and slot.param.grad is slot.sum
        self.any_delivered = True

    def clear_ignored(self) -> None:
        """Clear from p.grad what backwards inside `ignore()` have left."""
        for slot in self.slots:
            if slot.ignored is not None:
                if slot.param.grad is slot.ignored:
                    slot.param.grad = None
                slot.ignored = None

    def restore(self, slot: Slot, total: Tensor, delivered: bool) -> None:
        """Make a copy of a saved sum the slot's, in its layout, dtype and device."""
        device, _, dtype = slot.lane
        if total.layout is torch.strided:
            kept = torch.empty_strided(slot.param.shape, slot.strides, dtype=dtype, device=device)
            slot.sum = kept.copy_(total)
        else:
            slot.sum = total.to(device=device, dtype=dtype).clone()
            slot.odd = True
        if self.visible or delivered:
            slot.param.grad = slot.sum
            slot.delivered = delivered
            self.any_delivered = True

    def convert(self, slot: Slot) -> None:
        """Move a sum to where its parameter has gone."""
        slot.buffer = None
        device, _, dtype = slot.lane
        total = slot.sum
        if self.visible or total is None or slot.delivered:
            return
        if total.device != device or total.dtype != dtype:
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
        slot.sum = total
        if self.visible or slot.delivered:
            slot.param.grad = total

    def _keep(self, slot: Slot, zeros: Tensor) -> None:
        """Let visible zeros be the sum that the next window starts from."""
        slot.sum = zeros if self.visible else zeros.to(slot.accumulate_dtype)
        if slot.sum is not zeros:
            if slot.shows_sum():
                slot.param.grad = slot.sum
            else:
                slot.cast = zeros

    def _fits(self, slot: Slot, total: Tensor) -> bool:
        """Whether the slot's kernel takes this sum; always so for those made here."""
        return (
            total.dtype == slot.accumulate_dtype and total.device == slot.lane[0] and checks.is_plain(total)
        )

    def _run(
        self, sums: list[Tensor], terms: list[Tensor], scale: float, overwrite: bool | list[bool]
    ) -> None:
        chosen = self.select((sums[0].device, terms[0].dtype, sums[0].dtype)).backend
        chosen.accumulate_(sums, terms, scale, overwrite)
        if self.visible or self.any_delivered:
            increment_version(sums)

    def _buffer(self, slot: Slot, together: Sequence[Slot]) -> Tensor:
        """Memory for a first gradient that is not adopted, in the parameter's layout.

        Where the sum has another dtype it comes from a segment shared with the others of `together` that have
        none yet, and is kept for later windows; else it is as short-lived as a gradient.
        """
        device, gradient, dtype = slot.lane
        if gradient == dtype:
            return torch.empty_strided(slot.param.shape, slot.strides, dtype=dtype, device=device)
        if not self._is_free(slot):
            self._extend(slot.lane, [s for s in together if self.current(s) is None and not self._is_free(s)])
        assert slot.buffer is not None
        return slot.buffer

    def _is_free(self, slot: Slot) -> bool:
        """Whether the slot's buffer may be written: a user may still hold the p.grad that it was."""
        return (
            slot.buffer is not None
            and sys.getrefcount(slot.buffer) == 2
            and tensor_references(slot.buffer) == 1
        )

    def _extend(self, lane: Lane, slots: Sequence[Slot]) -> None:
        """One more segment, cut into buffers for these slots."""
        device, _, dtype = lane
        unit = ALIGNMENT // dtype.itemsize
        sizes = [-(-slot.param.numel() // unit) * unit for slot in slots]
        segment = torch.empty(sum(sizes), dtype=dtype, device=device)
        offset = 0
        for slot, size in zip(slots, sizes, strict=True):
            slot.buffer = segment.as_strided(slot.param.shape, slot.strides, offset)
            offset += size
