"""How gradients come into sums: the first becomes the sum or is written over a buffer, others are added."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from . import checks
from .buffers import buffers
from .factors import is_deferrable, is_one, scaled
from .memory import is_sole, owns_memory
from .slot import Lane, Slot
from .sums import Sums


class Additions(Sums):
    """Sums that gradients are added to; arguments as `Sums`."""

    def may_adopt(self, slot: Slot, gradient: Tensor) -> bool:
        """Whether a gradient is likely to become the sum once nobody but us refers to it."""
        first = gradient.dtype is slot.lane[2] and self.current(slot) is None
        return first and slot.obeys_layout(gradient) and owns_memory(gradient)

    def add(
        self, slots: Sequence[Slot], gradients: list[Tensor], scale: float | Tensor, adoptable: bool = False
    ) -> None:
        """sum += scale * gradient for each slot, in one pass.

        A first gradient of the sum's dtype that nobody else refers to becomes the sum, and owes its scale.

        Args:
            slots: none twice, all of one lane.
            gradients: one per slot, strided and of its lane; the list is emptied.
            scale: what each gradient is multiplied by; a tensor must not change any more.
            adoptable: each gradient is known to have memory of its own and its parameter's layout, and the
                list alone refers to it.
        """
        if not slots:
            return
        with self._lock:
            if adoptable and self._adopt(slots, gradients, scale):
                gradients.clear()
                return
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
        binding = self.launches.bindings.get(slots[0]) if slots else None
        keep = self.debts.common(slots) if self.debts else 1.0
        if keep is None:
            binding, keep = None, 1.0  # `Launches.add` takes those apart that owe differently
        elif binding is not None and binding.slots != slots:
            binding = None
        private = not self.shown
        if binding is not None and private and binding.generation == self.generation and binding.run:
            self.launches.run_bound(binding, slots, None, gradients, scale, keep)
            return
        sums: list[Any] = [slot.sum for slot in slots] if private else [self.current(slot) for slot in slots]
        if binding is not None and binding.holds(sums):
            self.launches.run_bound(binding, slots, sums, gradients, scale, keep)
            if private:
                binding.generation = self.generation
            else:
                increment_version(sums)
            return
        slots = self._set_odd_apart(slots, gradients, scale)
        sums = [self.current(slot) for slot in slots]
        if all(map(self._fits, slots, sums)):
            self.launches.add(sums, gradients, scale, False, slots, not private)
            if slots:
                self.launches.bind(slots, sums, self.generation if private else -1)
        else:
            self._add_some_first(slots, gradients, scale)

    def _adopt(self, slots: Sequence[Slot], gradients: list[Tensor], scale: float | Tensor) -> bool:
        """Let each gradient become its slot's sum, if none has one yet; False with nothing done."""
        _, given, dtype = slots[0].lane
        if given != dtype or not is_deferrable(scale, dtype) or self.shown or self.norms:
            return False
        if any(slot.sum is not None or slot.odd or slot.delivered for slot in slots):
            return False
        self.generation += 1
        for slot, gradient in zip(slots, gradients, strict=True):
            slot.sum = gradient
        if not is_one(scale):
            self.debts.owe(slots, scale)
        return True

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
            if gradient.layout is not strided:
                slot.set_odd(True)
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
        owing: list[Slot] = []
        same_dtype = slots[0].lane[1] == slots[0].lane[2]
        kept = None if same_dtype else buffers(slots, [self.current(slot) is None for slot in slots])
        private = not self.shown
        if kept is not None and private and all(slot.sum is None for slot in slots):
            self.launches.add(kept, gradients, scale, True, slots, False)
            self.generation += 1
            for slot, total in zip(slots, kept, strict=True):
                slot.sum = total
            return
        for index, slot in enumerate(slots):
            total = self.current(slot)
            if total is None:
                if same_dtype and slot.obeys_layout(gradients[index]) and is_sole(gradients, index):
                    total = gradients[index]
                    if is_one(scale) or self._may_owe(slot, scale):
                        self.put(slot, total)
                        owing.append(slot)
                        continue
                elif kept is None:
                    shape, (device, _, dtype) = slot.param.shape, slot.lane
                    total = torch.empty_strided(shape, slot.strides, dtype=dtype, device=device)
                else:
                    total = kept[index]
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
        if not is_one(scale):
            self.debts.owe(owing, scale)
        flags = first if len(fresh) < len(sums) and fresh else bool(fresh)
        self.launches.add(sums, terms, scale, flags, added, self.shown)
        written = (total for total, new in zip(sums, first, strict=True) if new)
        for slot, total in zip(fresh, written, strict=True):
            self.put(slot, total)

    def _may_owe(self, slot: Slot, scale: float | Tensor) -> bool:
        """Whether a later multiplication of the slot's sum gives the bits of one now, and nobody sees it."""
        return not (self.visible or slot.delivered) and is_deferrable(scale, slot.accumulate_dtype)

    def _fits(self, slot: Slot, total: Tensor | None) -> bool:
        """Whether there is a sum that the slot's kernel takes; the user may have put another into p.grad."""
        device, _, dtype = slot.lane
        return (
            total is not None and total.dtype == dtype and total.device == device and checks.is_plain(total)
        )

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
            self.settle([slot])
            self.norms.forget([slot])
            total = self.current(slot)
            dtype = slot.accumulate_dtype if total is None else total.dtype
            if total is None or (total.is_sparse and not gradient.is_sparse):
                term = scaled(gradient.to(dtype), scale)
                if total is not None:
                    term = term + total
                elif term is gradient:
                    term = gradient.clone()
                self.put(slot, term)
            elif total.is_sparse:
                self.put(slot, total + scaled(gradient.to(dtype), scale))
            elif isinstance(scale, Tensor):
                total.add_(scaled(gradient.to(dtype), scale))
            else:
                total.add_(gradient, alpha=scale)
