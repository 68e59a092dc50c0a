"""What p.grad held before a backward inside `ignore()`, which comes back after it."""

from __future__ import annotations

from torch import Tensor

from ..kernels import torch_state
from .buffers import owns_memory
from .param import GradState, Slot

#: States in which p.grad holds what counts, or nothing because the user has removed it.
_HOLDS = (GradState.PUBLISHED, GradState.CAST, GradState.STOCK)


class Former:
    """What a slot's p.grad held before a backward that does not count."""

    __slots__ = ("_copy", "_placed", "_version", "counts", "gradient", "state", "total")

    def __init__(self, slot: Slot, total: Tensor | None) -> None:
        self.gradient, self.state, self.total = slot.param.grad, slot.grad_state, total
        self._placed, self._version = slot.placed, slot.placed_version
        is_stored = self.gradient is not None and slot.is_foreign(self.gradient)
        #: Whether it is a gradient, or what has become of one; else it is nothing, or ignored itself.
        self.counts = is_stored or self.state in _HOLDS
        # p.grad may be a view of a DistributedDataParallel's bucket, which it writes in every backward.
        in_bucket = is_stored and torch_state.process_group_up() and not owns_memory(self.gradient)  # type: ignore[arg-type]
        self._copy = self.gradient.clone() if in_bucket else None  # type: ignore[union-attr]

    @property
    def shown(self) -> bool:
        """Whether it was the accumulator."""
        return self.gradient is not None and self.gradient is self.total

    def restore(self, slot: Slot) -> None:
        """Put it into p.grad again."""
        if self._copy is not None:
            self.gradient.copy_(self._copy)  # type: ignore[union-attr]
        slot.param.grad = self.gradient
        slot.placed, slot.placed_version = self._placed, self._version
