"""`zero_grad()`: which gradients it clears."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from .call_sites import call_site
from .guard import guarded
from .watch_state import WatchState


class Clearing:
    """Notes calls of `zero_grad()`.

    Args:
        watch: the state of the watch.
    """

    def __init__(self, watch: WatchState) -> None:
        self.watch = watch

    def start(self) -> None:
        """Wrap `zero_grad()` of optimizers and modules."""
        for owner in (Optimizer, nn.Module):
            self.watch.wrap(owner, "zero_grad", self._zero_grad)

    def _zero_grad(self, call: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> None:
        are_written = self._are_written()
        call(owner, *args, **kwargs)
        self._note_cleared(owner, bool(are_written))

    @guarded
    def _are_written(self) -> bool:
        """Return whether parameters were written since the last backward pass."""
        return self.watch.optimizers.versions() != self.watch.versions

    @guarded
    def _note_cleared(self, owner: Any, are_written: bool) -> None:
        site = call_site()
        self.watch.optimizers.note_cleared(owner)
        history = self.watch.history
        passes = history.passes_since(max(history.window_starts.values(), default=0))
        new = [each for each in passes if not each.cleared]
        is_dropped = not all(each.is_finite for each in new)
        for each in new:
            each.cleared, each.excused = site, "nonfinite" if is_dropped else each.excused
        for each in passes:
            if are_written:  # code that is no optimizer has changed the parameters, as SAM does
                each.excused = "used"
