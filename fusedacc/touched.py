"""Which rows of a sum may differ from zero, so that a lookup's window costs what its rows cost."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from .rows import restore_zeros_, scale_rows_


class TouchedRows:
    """The rows of one tensor that were added to since it was all zeros.

    It counts only as long as nobody else has written to the tensor, which shows in its version, in a call of
    `forget` by those who know that they bump none, or in what `clean` finds.
    """

    def __init__(self) -> None:
        self._of: Callable[[], Tensor | None] = _nothing
        self._version = 0
        self._indices: list[Tensor] = []

    @property
    def tracks(self) -> bool:
        """Whether it knows the rows of any tensor."""
        return self._of() is not None

    def known(self, total: Tensor) -> Tensor | None:
        """The rows of `total` that may differ from zero, 1-d, some of them more than once; None: any."""
        if self._of() is not total or total._version != self._version:
            return None
        if len(self._indices) > 1:
            self._indices = [torch.cat(self._indices)]
        return self._indices[0] if self._indices else torch.empty(0, dtype=torch.int64, device=total.device)

    def clean(self, memory: Tensor, backend: str = "auto") -> None:
        """Make `memory` all zeros, by writing the rows that are not, as far as they are known.

        A sample of the others is looked at: users may write to a gradient's `.data`, and torch's fused
        optimizers to gradients themselves, without a trace in the version.
        """
        rows = self.known(memory)
        if rows is None:
            memory.zero_()
        else:
            restore_zeros_(memory, rows, backend=backend)
        self._of = weakref.ref(memory)
        self._indices = []
        self._version = memory._version

    def scale(self, total: Tensor, ratio: float | Tensor) -> bool:
        """Multiply the rows of `total` that may differ from zero; False where that may be most of them."""
        rows = self.known(total)
        if rows is None or 2 * rows.numel() > total.shape[0]:
            return False
        if rows.numel():
            scale_rows_(total, rows, ratio)
            self._version = total._version
        return True

    def add(self, total: Tensor, indices: Tensor) -> None:
        """These rows are being added to."""
        if self._of() is total:
            # A copy: the caller may fill the same memory with the next micro-batch's.
            self._indices.append(indices.detach().reshape(-1).to(torch.int64, copy=True))
            if sum(known.numel() for known in self._indices) > total.shape[0]:
                self.forget()  # more work than all rows, and a window may have no end

    def written(self, total: Tensor) -> None:
        """The rows of the last `add` have been added to."""
        if self._of() is total:
            self._version = total._version

    def forget(self) -> None:
        """Any element may be other than zero from now on."""
        self._of = _nothing
        self._indices = []


def _nothing() -> None:
    """A weak reference to nothing."""
