"""How far the wrapper is, and what has become of its updates: readable at any time, without waiting."""

from __future__ import annotations

from torch import Tensor

from ..accumulators import Accumulators
from .update import Update
from .window import Schedule, Window


class Progress:
    """What users may read of the window, the accumulators and the last update."""

    _window: Window
    _accumulators: Accumulators
    _inner_update: Update

    @property
    def gradient_accumulation_steps(self) -> Schedule:
        """As it was given: an int, a callable of the number of updates, or None for the manual loop."""
        return self._window.schedule

    @property
    def reduction(self) -> str:
        """How a window's gradients become one: "mean", "sum", "weighted" or "normalized"."""
        return self._window.reduction

    @property
    def has_partial_window(self) -> bool:
        """Whether a backward has come since the window began: `flush()` would update."""
        return not self._window.empty

    @property
    def micro_step(self) -> int:
        """Micro-batches that have ended in this window (manual loop: those inside `accumulate()`)."""
        return self._window.micro_step

    @property
    def num_updates(self) -> int:
        """Updates attempted so far."""
        return self._window.num_updates

    @property
    def num_skipped(self) -> int | Tensor:
        """Updates among `num_updates` that were dropped: all weights were 0, or the gradient was not finite.

        A 0-dim int64 tensor on the device, once updates may have been dropped there.
        """
        dropped = self._inner_update.skipped
        return self._window.num_skipped if dropped is None else dropped + self._window.num_skipped

    def _count_skipped(self) -> None:
        """Bring the count of updates that the device has dropped to the host; waits for the device."""
        dropped, self._inner_update.skipped = self._inner_update.skipped, None
        if dropped is not None:
            self._window.count_skipped(int(dropped.item()))

    @property
    def grad_norm(self) -> Tensor | None:
        """Norm of the last update's gradient before it was clipped: 0-dim, on the device.

        None before the first update, and where nothing (`max_grad_norm`, `skip_nonfinite`, a
        `fusedacc.amp.GradScaler` without `unscale_`) needed it.
        """
        return self._inner_update.grad_norm

    @property
    def has_updated(self) -> bool:
        """Whether the last `step()` or `flush()` attempted an update: when to step a scheduler."""
        return self._window.has_updated

    @property
    def will_update(self) -> bool:
        """Whether the next `step()` after a backward updates."""
        return self._window.will_update

    @property
    def accumulator_bytes(self) -> int:
        """Bytes of memory that the sums take now, buffers kept for the next window included."""
        return self._accumulators.nbytes
