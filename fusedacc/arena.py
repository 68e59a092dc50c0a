"""How sums and p.grad change places: between micro-batches, at a window's end, for an update and after it."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from . import backends, checks
from .backends import Backend
from .casting import cast_over, reusable
from .factors import is_one, near
from .memory import like
from .slot import Lane, Slot
from .writes import Writes


class Arena(Writes):
    """Adds gradients to sums, multiplies sums, and moves them in and out of p.grad; arguments as `Sums`."""

    def deliver(self) -> None:
        """Put every sum into p.grad, and the truth with it, where it may stand there. None owes any more."""
        with self._lock:  # another thread's backward may be adding
            self.settle()
            for slot in self.slots:
                if slot.sum is None or not slot.shows_sum():
                    continue
                present = slot.param.grad
                if present is None or not slot.is_foreign(present):
                    self.show(slot, slot.sum)
            self.any_delivered = True

    def drop_spent(self) -> None:
        """Let go of what an update has consumed; what the user has put into p.grad in its place stays."""
        if not self.spent:
            return
        self.disown()
        for slot in self.slots:
            gradient = slot.param.grad
            if gradient is not None and not slot.is_foreign(gradient):
                slot.param.grad = None
            slot.forget()
        self.spent = self.any_delivered = False

    def note_spent(self) -> None:
        """What stands in p.grad, of whatever origin, has been consumed by an update."""
        for slot in self.slots:
            if slot.param.grad is not None:
                self.show(slot, slot.param.grad)
        self.spent = self.any_delivered = True

    def retract(self) -> None:
        """Begin a window: sums that no update has consumed and nobody has cleared go on, but in private."""
        self.drop_spent()
        if self.any_delivered:
            self.disown()
            for slot in self.slots:
                self.hide(slot)
            self.any_delivered = False

    def hide(self, slot: Slot) -> None:
        """Take our own gradient out of p.grad, so that autograd can put a fresh one there."""
        self.generation += 1
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
            self.show(slot, slot.sum)
            self.any_delivered = True

    def disown(self) -> None:
        """Between windows: what the user has put into p.grad in place of our sum is a gradient of theirs."""
        self.generation += 1
        if self.any_delivered:
            for slot in self.slots:
                if slot.delivered and slot.param.grad is not slot.shown():
                    slot.delivered = False

    def disown_added(self, slot: Slot) -> None:
        """Between windows, after a move: what autograd has added to our zeros is a gradient."""
        total = slot.param.grad
        if slot.delivered and total is slot.shown() and total is not None:
            slot.delivered = total._version == slot.shown_version

    def keep_spent(self, slot: Slot, moved: bool, hooked: bool) -> None:
        """Between windows, after a parameter has changed: what was spent stays so, in p.grad's new place too.

        Args:
            slot: the parameter's.
            moved: to another dtype or device, and p.grad with it.
            hooked: autograd cannot have stored a gradient meanwhile.

        Raises:
            RuntimeError: something was added to what is spent; both can no longer be told apart.
        """
        gradient, shown = slot.param.grad, slot.shown()
        if gradient is None or shown is None or (gradient is not shown and not moved):
            return
        same = gradient._version == slot.shown_version if gradient is shown else gradient._version == 0
        if not hooked and not (same and not (moved and gradient.is_sparse)):
            raise RuntimeError(
                f"parameter {slot.name!r} was cast, moved or unfrozen while p.grad still held what "
                "an update had consumed, and a backward may have added to it since: call "
                "optimizer.zero_grad() between an update and such a change"
            )
        if gradient is not shown:
            self.show(slot, gradient)

    def set_aside(self, slot: Slot) -> None:
        """Ready p.grad for a gradient that autograd will store, and that is to be scaled or counted after."""
        self.generation += 1
        self.drop_spent()
        if not self.visible:
            self.hide(slot)
        elif not slot.aside:
            slot.sum, slot.param.grad, slot.cast = self.current(slot), None, None
            slot.aside = True

    def reclaim(self, scale: float | Tensor | None) -> None:
        """Manual loop: add what autograd has stored since `set_aside` to the sums, which return to p.grad.

        A scale of None drops it: a micro-batch of weight 0 adds nothing.
        """
        self.generation += 1
        for slot in self.slots:
            if slot.aside:
                gradient, slot.param.grad, slot.sum = slot.param.grad, slot.sum, None
                slot.aside = False
                if gradient is not None and scale is not None:
                    self.add_mixed([slot], [gradient.detach()], scale)

    def present(self, scale: float | Tensor = 1.0) -> None:
        """Ready p.grad for the inner optimizer: the sum times `scale`, cast where the parameter has another
        dtype. Where a kernel casts, the same pass scales; then the sum is given up for the cast, which may
        take its memory.
        """
        self.settle()
        self.generation += 1
        scaled = not is_one(scale)
        if scaled:
            self.rescale([pair for pair in self.finals() if not self._casts_by_kernel(*pair)], scale)
        for (device, source, wanted), slots in self._present_others().items():
            backend = backends.select(device, wanted, source, self.backend).backend

            def cast(casts: list[Tensor], totals: list[Tensor], backend: Backend = backend) -> None:
                backend.accumulate_(casts, totals, near(scale, totals[0]), True)

            given_up = reusable(slots, wanted) if scaled else []
            if given_up:
                casts = cast_over(given_up, wanted, cast)
                for slot, made in zip(given_up, casts, strict=True):
                    self._present_cast(slot, None, made)
                slots = [slot for slot in slots if slot.cast is None]
            totals: list[Any] = [self.current(slot) for slot in slots]
            if totals:
                casts = like(totals, wanted)
                cast(casts, totals)
                for slot, total, made in zip(slots, totals, casts, strict=True):
                    self._present_cast(slot, None if scaled else total, made)

    def _present_others(self) -> dict[Lane, list[Slot]]:
        """`present` where no kernel casts; the slots where one does, by device and dtypes."""
        lanes: dict[Lane, list[Slot]] = {}
        for slot in self.slots:
            total = self.current(slot)
            if total is None:
                if not self.visible and slot.param.grad is not None:
                    slot.param.grad = None
            elif self._casts_by_kernel(slot, total):
                lanes.setdefault((total.device, total.dtype, slot.param.dtype), []).append(slot)
            elif total.dtype != slot.param.dtype:
                self._present_cast(slot, total, total.to(slot.param.dtype))
            elif not self.visible and not (slot.delivered and total is slot.shown()):
                self.show(slot, total)
        self.any_delivered = True
        return lanes

    @staticmethod
    def _casts_by_kernel(slot: Slot, total: Tensor) -> bool:
        dtype = slot.param.dtype
        return total.dtype != dtype and (total.dtype, dtype) in checks.PAIRS and checks.is_plain(total)

    @staticmethod
    def _present_cast(slot: Slot, total: Tensor | None, cast: Tensor) -> None:
        slot.sum, slot.cast, slot.param.grad = total, cast, cast
        slot.delivered = False

    def withdraw(self) -> None:
        """After an update: the sum stands in p.grad again where it may, and its copy goes.

        In a counted loop it is spent then.
        """
        self.generation += 1
        self.norms.clear()
        self.spent = not self.visible
        for slot in self.slots:
            if slot.cast is not None and slot.shows_sum():
                if slot.param.grad is slot.cast and slot.sum is not None:
                    self.show(slot, slot.sum)
                else:
                    cast, slot.cast, slot.sum = slot.cast, None, None
                    if slot.param.grad is cast:
                        masters = cast.dtype != slot.param.dtype
                        gradient = cast.to(slot.accumulate_dtype) if masters else cast
                        if self.visible:
                            slot.param.grad = gradient
                        else:
                            self.show(slot, gradient)  # it has been counted, and is no gradient of the user's
            left = slot.param.grad
            if self.spent and left is not None:
                if left is slot.cast:
                    slot.shown = weakref.ref(left)
                slot.shown_version = left._version  # the update has scaled it, perhaps

    def clear(self) -> None:
        """Forget every sum and clear every p.grad."""
        self.generation += 1
        self.spent = False
        self.norms.clear()
        self.debts.clear()
        for slot in self.slots:
            slot.forget()
            if slot.param.grad is not None:
                slot.param.grad = None
        self.any_delivered = False

    def zero(self) -> None:
        """As `clear`, but where there is a gradient, zeros stay visible in p.grad."""
        self.generation += 1
        self.spent = False
        self.debts.clear()
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
                self.show(slot, slot.sum)
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
