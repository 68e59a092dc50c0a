"""Optimizers that exist when the audit begins, that are created later, or that are loaded or copied."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import Optimizer

from .call_sites import call_site
from .guard import guarded
from .optimizers import parameters_of
from .watch_state import WatchState


class NewOptimizers:
    """Notes the parameters of optimizers.

    Args:
        watch: the state of the watch.
    """

    def __init__(self, watch: WatchState) -> None:
        self.watch = watch

    def start(self) -> None:
        """Wrap what makes or loads an optimizer, and look for those that exist."""
        self.watch.wrap(Optimizer, "__init__", self._init_optimizer)
        self.watch.wrap(Optimizer, "__setstate__", self._restore_optimizer)
        self._note_existing_optimizers()

    def _init_optimizer(self, call: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> None:
        call(optimizer, *args, **kwargs)
        self._note_made(optimizer)

    def _restore_optimizer(self, call: Callable[..., Any], optimizer: Any, state: Any) -> None:
        call(optimizer, state)
        self._note_restored(optimizer)

    @guarded
    def _note_made(self, optimizer: Any) -> None:
        self._note_parameters(optimizer)
        self.watch.optimizers.record_of(optimizer).made = call_site(optimizer).describe("made")

    @guarded
    def _note_restored(self, optimizer: Any) -> None:
        """Note that an optimizer was loaded, copied or unpickled.

        Its sums may come from elsewhere, as when a wrapper resumes in the middle of a window. The passes of
        its open window need not count then.
        """
        self._note_parameters(optimizer)
        record = self.watch.optimizers.record_of(optimizer)
        record.is_restored = True
        for each in self.watch.history.window(record.number):
            if each.leaves & record.owned_mask:
                each.excused = each.excused or "used"

    @guarded
    def _note_existing_optimizers(self) -> None:
        """Note the parameters of the optimizers that exist when the audit begins."""
        for each in [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]:
            if hasattr(each, "param_groups"):
                self._note_parameters(each)

    @guarded
    def _note_parameters(self, optimizer: Any) -> None:
        record = self.watch.optimizers.record_of(optimizer)
        for param in parameters_of(optimizer):
            self.watch.own(record, param)
