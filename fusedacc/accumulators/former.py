"""What p.grad held before a backward inside `ignore()`, which comes back after it."""

from __future__ import annotations

from torch import Tensor

from ..kernels import torch_state
from .buffers import owns_memory
from .param import GradState, Slot

#: States in which there is an accumulator beside p.grad, whatever stands there.
_BESIDE = (GradState.CAST, GradState.STOCK)


class Former:
    """What a slot's p.grad held before a backward that does not count."""

    __slots__ = ("_copy", "_placed", "_version", "counts", "gradient", "state", "total")

    def __init__(self, slot: Slot, total: Tensor | None) -> None:
        self.gradient, self.state, self.total = slot.param.grad, slot.grad_state, total
        self._placed, self._version = slot.placed, slot.placed_version
        gradient = self.gradient
        is_stored = gradient is not None and slot.is_foreign(gradient)
        is_published = gradient is not None and self.state is GradState.PUBLISHED
        #: Whether p.grad holds a gradient that counts, or a copy of such gradients.
        self.counts = is_stored or is_published or self.state in _BESIDE
        # p.grad may be a view of a DistributedDataParallel's bucket, which it writes in every backward.
        self._copy: Tensor | None = None
        if gradient is not None and is_stored and torch_state.process_group_up():
            self._copy = None if owns_memory(gradient) else gradient.clone()

    @property
    def shown(self) -> bool:
        """Whether it was the accumulator."""
        return self.gradient is not None and self.gradient is self.total

    def restore(self, slot: Slot) -> None:
        """Put it into p.grad again."""
        if self.gradient is not None and self._copy is not None:
            self.gradient.copy_(self._copy)
        slot.param.grad = self.gradient
        slot.placed, slot.placed_version = self._placed, self._version
