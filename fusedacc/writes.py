"""How others add to sums by themselves: a module of the model to all of a sum or some rows, native hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from .additions import Additions
from .buffers import buffers
from .factors import near
from .slot import Slot

#: Adds one gradient to the sum that it is given: `(sum, scale, keep)`, sum = keep * sum + scale * gradient.
Write = Callable[[Tensor, float | Tensor, float | Tensor], None]


#: The paths of a parameter whose modules write all of its sum.
PRODUCTS = ("gemm",)


class Writes(Additions):
    """Sums that modules and native hooks add to by themselves; arguments as `Sums`."""

    #: Whether any module has ever added to a sum by itself.
    any_written = False

    def addable(self, slots: Sequence[Slot]) -> tuple[list[Tensor | None], list[float]]:
        """The sums to which native code may add, and by what to multiply each first (empty: by 1).

        None: not to this one. Memory that waits for a module's first product is there too, with a factor of
        0. What stands in p.grad may be of any kind.
        """
        sums = [None if slot.odd else self.current(slot) for slot in slots]
        fresh: list[int] = []
        if self.any_written:
            fresh = [
                index
                for index, slot in enumerate(slots)
                if sums[index] is None and not slot.odd and slot.paths == PRODUCTS and slot.buffer is not None
            ]
        if not (self.debts or fresh):
            return sums, []
        owed = [self.debts[slot] for slot in slots]
        keeps = [1.0 if isinstance(factor, Tensor) else factor for factor in owed]
        for index, factor in enumerate(owed):
            if isinstance(factor, Tensor):
                sums[index] = None
        for index in fresh:
            (sums[index],), keeps[index] = buffers([slots[index]], [True]), 0.0
        return sums, keeps

    def added_to(self, slots: Sequence[Slot]) -> None:
        """Native code has added to what `addable` has returned for these slots."""
        if self.debts:
            self.debts.pay(slots)
        if self.any_written:
            for slot in slots:
                if slot.paths and slot.buffer is not None and self.current(slot) is None:
                    self.put(slot, slot.buffer)

    def write_in_place(self, slot: Slot, write: Write, scale: float | Tensor, by_rows: bool = False) -> bool:
        """Have `write` add to the slot's sum; False, with nothing done, where it cannot.

        Args:
            slot: whose sum it is: a matrix.
            write: called with memory that holds nothing yet and a `keep` of 0, or with the sum and what it
                owes.
            scale: handed on to `write`.
            by_rows: `write` adds to some rows only: memory that held nothing is all zeros then, and `keep`
                is 1.
        """
        total, self.any_written = slot.sum, True
        if (
            total is not None
            and total is slot.buffer  # it has been here before, and has not moved
            and not (self.shown or self.debts or isinstance(scale, Tensor))
        ):
            with self._lock:
                write(total, scale, 1.0)
                self.norms.forget([slot])
            return True
        with self._lock:
            total = self.current(slot)
            fresh = total is None
            if total is None:
                (total,) = buffers([slot], [True])
            if not self._fits(slot, total) or not _is_matrix(total, by_rows):
                return False
            if by_rows:
                self.settle([slot])
                if fresh:
                    total.zero_()
                write(total, near(scale, total), 1.0)
            else:
                keep = 0.0 if fresh else near(self.debts[slot], total)
                write(total, near(scale, total), keep)
                self.debts.pay([slot])
            self.norms.forget([slot])
            if fresh:
                self.put(slot, total)
            return True


def _is_matrix(total: Tensor, by_rows: bool) -> bool:
    """Whether it is 2-d and dense, row after row if `by_rows`."""
    return total.dim() == 2 and (total.is_contiguous() or (not by_rows and total.t().is_contiguous()))
