"""A list of sums bound to its backend for as long as the sums stay what and where they are."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence

from torch import Tensor

from .backends import SELF_CHECKING, Backend, Run
from .slot import Slot


class Binding:
    """What a backend has prepared for a list of sums, without keeping the sums alive.

    A sum is known by its identity and its address: the memory of a tensor can be swapped under it
    (`Module.to` does so with p.grad). Prepared on the second use, since adopted gradients may last for one.

    Args:
        backend: who adds.
        slots: whose sums they are.
        sums: tensors without overlap, of one device and dtype.
        generation: of the arena, when `sums` were its private sums.
    """

    def __init__(
        self, backend: Backend, slots: Sequence[Slot], sums: Sequence[Tensor], generation: int
    ) -> None:
        self.slots = slots
        self.generation = generation
        self.run: Run | None = None
        self._backend = backend
        self._references = [weakref.ref(total) for total in sums]
        self._addresses = [total.data_ptr() for total in sums]

    def holds(self, sums: Sequence[Tensor | None]) -> bool:
        """Whether these are the same sums, still at the same addresses; None is none of them."""
        known = [reference() for reference in self._references]
        if not all(map(operator.is_, sums, known)):
            return False
        return self._addresses == [-1 if total is None else total.data_ptr() for total in sums]

    def add(
        self,
        sums: Sequence[Tensor] | None,
        gradients: Sequence[Tensor],
        scale: float | Tensor,
        norm_type: float | None = None,
        keep: float | Tensor = 1.0,
    ) -> Tensor | None:
        """sum = keep * sum + scale * gradient, for sums that it holds (None once `run` is there); with
        `norm_type`, the partial norms of the new sums.

        Only the native backends prepare without keeping the sums alive.
        """
        if self.run is None:
            assert sums is not None
            if self._backend.name not in SELF_CHECKING:
                if norm_type is not None:
                    return self._backend.accumulate_with_norm_(sums, gradients, scale, False, norm_type, keep)
                self._backend.accumulate_(sums, gradients, scale, False, keep)
                return None
            self.run = self._backend.prepare(sums)
        if norm_type is not None:
            return self.run.with_norm(gradients, scale, False, norm_type, keep)
        self.run(gradients, scale, False, keep)
        return None
