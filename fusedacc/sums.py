"""Where sums are, what they owe, and what becomes of them when a parameter moves or a checkpoint is loaded.

In a manual loop p.grad is the sum and the truth. In a counted loop sums are private until the window's last
backward ends; then they are delivered: p.grad is the sum, and again the truth, until an update has consumed
it. What is spent so stays visible until the next backward, and is never counted again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from . import checks, shares
from .factors import is_one, near
from .hooks import process_group_up
from .launches import Launches
from .slot import Slot


class Sums:
    """The sum of each parameter.

    Args:
        slots: the parameters; a list shared with its owner, who may append.
        visible: p.grad is the accumulator (manual loop); else sums are private (counted loop).
        backend: as in `AccumulatingOptimizer`.
    """

    def __init__(self, slots: list[Slot], visible: bool, backend: str) -> None:
        self.slots = slots
        self.visible = visible
        self.backend = backend
        if any(slot.lane[0].type == "cpu" for slot in slots):
            shares.settle()
        #: What was found out by trial and changes bits, by question (see `tuning`): it stays as it is.
        self.choices: dict[str, str] = {}
        self.any_delivered = False
        #: Counted loop: whether an update has consumed the sums that stand in p.grad.
        self.spent = False
        self.launches = Launches(slots, backend)
        self.norms, self.debts = self.launches.norms, self.launches.debts
        #: Counts the changes of which tensors are private sums.
        self.generation = 0
        self._lock = threading.RLock()

    @property
    def shown(self) -> bool:
        """Whether users may see sums."""
        return self.visible or self.any_delivered

    def current(self, slot: Slot) -> Tensor | None:
        """The sum that the next gradient is added to, or None before the first. It may owe (see `debts`)."""
        if not (self.visible or slot.delivered):
            return slot.sum
        gradient = slot.param.grad
        return slot.sum if slot.cast is not None and gradient is slot.cast else gradient

    def finals(self) -> list[tuple[Slot, Tensor]]:
        """Every sum there is, owing nothing, with its slot."""
        self.settle()
        return self.held(self.slots)

    def held(self, slots: Iterable[Slot]) -> list[tuple[Slot, Tensor]]:
        """The sums that these slots have, whatever they owe, each with its slot."""
        pairs = ((slot, self.current(slot)) for slot in slots)
        return [(slot, total) for slot, total in pairs if total is not None]

    def put(self, slot: Slot, total: Tensor) -> None:
        """Make a tensor the slot's sum, where sums are now."""
        self.generation += 1
        if self.visible or slot.delivered:
            self.show(slot, total)
        else:
            slot.sum = total

    def show(self, slot: Slot, total: Tensor) -> None:
        """Make a tensor the slot's sum, and p.grad."""
        self.generation += 1
        slot.param.grad = total
        slot.shown, slot.shown_version = weakref.ref(total), total._version
        slot.sum = slot.cast = slot.ignored = None
        slot.delivered = True

    def owed(self, slot: Slot) -> float:
        """By what the slot's sum is still to be multiplied, for a checkpoint; waits for a device."""
        factor = self.debts[slot]
        return factor.item() if isinstance(factor, Tensor) else factor

    def owe(self, ratio: float | Tensor) -> None:
        """sum *= ratio for every sum: by the next addition to it, or by `settle`."""
        if not is_one(ratio):
            with self._lock:
                self.debts.owe([slot for slot in self.slots if self.current(slot) is not None], ratio)

    def settle(self, slots: Iterable[Slot] | None = None) -> None:
        """Multiply the sums of these slots (None: all) by what they owe, in one pass over those that do."""
        if not self.debts:
            return
        with self._lock:
            owing = self.debts.among(slots)
            for factor, chosen in self.debts.groups(owing):
                payers = [owing[index] for index in chosen]
                self.rescale(self.held(payers), factor, leaves_norms=True)
                self.debts.pay(payers)

    def rescale(
        self, sums: Iterable[tuple[Slot, Tensor]], ratio: float | Tensor, leaves_norms: bool = False
    ) -> None:
        """sum *= ratio, in a pass for each dtype; with `leaves_norms` it leaves the norms that are wanted."""
        groups: dict[tuple, tuple[list[Slot], list[Tensor]]] = {}
        for slot, total in sums:
            self.norms.forget([slot])
            if checks.is_plain(total) and (total.dtype, total.dtype) in checks.PAIRS:
                chosen = groups.setdefault((total.device, total.dtype), ([], []))
                chosen[0].append(slot)
                chosen[1].append(total)
            elif total.is_sparse:
                total._values().mul_(near(ratio, total))  # a product would sum repeated indices
            else:
                total.mul_(near(ratio, total))
        for slots, totals in groups.values():
            self.launches.run(totals, totals, ratio, True, slots if leaves_norms else (), self.shown)

    def restore(self, slot: Slot, total: Tensor, delivered: bool, owed: float = 1.0) -> None:
        """Make a copy of a saved sum the slot's, in its layout, dtype and device; it owes what it `owed`."""
        self.generation += 1
        device, _, dtype = slot.lane
        if total.layout is torch.strided:
            kept = torch.empty_strided(slot.param.shape, slot.strides, dtype=dtype, device=device)
            slot.sum = kept.copy_(total)
        else:
            slot.sum = total.to(device=device, dtype=dtype).clone()
            slot.set_odd(True)
        if owed != 1.0:
            self.debts.owe([slot], owed)
        if not process_group_up():
            slot.widen()  # which arming has not done where the parameter is frozen
        if self.visible and not slot.shows_sum():
            slot.param.grad, slot.sum = slot.sum.to(slot.param.dtype), None
        elif (self.visible or delivered) and slot.shows_sum():
            self.show(slot, slot.sum)
            self.any_delivered = True

    def convert(self, slot: Slot) -> None:
        """Move a private sum to where its parameter has gone."""
        self.settle([slot])
        self.generation += 1
        self.launches.unbind()
        device, _, dtype = slot.lane
        buffer, wanted = slot.buffer, (device, dtype, slot.shape, slot.strides)
        if buffer is not None and (buffer.device, buffer.dtype, buffer.shape, buffer.stride()) != wanted:
            slot.drop_buffer()
        total = slot.sum
        if total is not None and (total.device != device or total.dtype != dtype):
            slot.sum = total.to(device=device, dtype=dtype)

    def drop(self, slots: Sequence[Slot]) -> None:
        """These slots are accumulated no more: forget their sums; what is in p.grad stays."""
        self.generation += 1
        self.launches.bindings.clear()
        self.debts.pay(slots)
        self.norms.forget(slots)
        for slot in slots:
            slot.forget()
            slot.drop_buffer()

    def drop_outgrown(self, slot: Slot) -> None:
        """Counted loop, between windows: clear what an update has left, if it has another shape than now."""
        total, gradient = self.current(slot), slot.param.grad
        if self.visible or total is None or total.shape == slot.param.shape:
            return
        if slot.delivered and gradient is not slot.shown():
            return  # the user's
        if gradient is not None and not slot.is_foreign(gradient):
            slot.param.grad = None
        self.generation += 1
        self.debts.pay([slot])
        self.norms.forget([slot])
        slot.forget()

    @property
    def nbytes(self) -> int:
        """Bytes of all sums, and of buffers that wait for the next window."""
        held: dict[int, int] = {}
        segments = {slot.segment.memory.data_ptr() for slot in self.slots if slot.segment is not None}
        for slot in self.slots:
            for tensor in (self.current(slot), slot.buffer):
                if tensor is None:
                    continue
                if tensor.is_sparse:
                    held[id(tensor)] = tensor._values().nbytes + tensor._indices().nbytes
                elif (
                    tensor is slot.buffer
                    or not segments
                    or tensor.untyped_storage().data_ptr() not in segments
                ):
                    held[tensor.data_ptr() or id(tensor)] = tensor.nbytes
        return sum(held.values())
