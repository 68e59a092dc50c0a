"""Watches a script: wraps functions of torch and registers hooks, and records passes and updates.

Each part has a file: `backward_passes.py`, `new_optimizers.py`, `clearing.py`, `clipping.py`,
`loss_scaling.py`, `optimizer_steps.py` and `frameworks.py` see what the script does; `updates.py` records
what an optimizer uses.

Nothing is changed but attributes of torch's modules and classes, which `stop` puts back.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from .backward_passes import BackwardPasses
from .clearing import Clearing
from .clipping import Clipping
from .frameworks import FrameworkOptimizers
from .loss_scaling import LossScaling
from .new_optimizers import NewOptimizers
from .optimizer_steps import OptimizerSteps
from .records import BackwardPass, History, Update
from .updates import Updates
from .watch_state import WatchState


class Watcher:
    """Records the passes and updates of a script.

    Args:
        history: where they are recorded.
        on_update: called with each update, the optimizer's last update, and passes with inf or nan.
        on_end_of_step: called after each update, outside of the audit's guard, with the optimizer's number.
        model: names the parameters. None: look for the modules that have them.

    Attributes:
        watch: what its parts share.
        updates: records the updates.
    """

    def __init__(
        self,
        history: History,
        on_update: Callable[[Update, Update | None, list[BackwardPass]], None],
        on_end_of_step: Callable[[int], None],
        model: nn.Module | None = None,
    ) -> None:
        self.watch = WatchState(history, model)
        self.updates = Updates(self.watch, on_update, on_end_of_step)
        frameworks = FrameworkOptimizers(self.watch.wrap, self.updates.record, self.updates.finish)
        self._steps = OptimizerSteps(self.watch, self.updates)
        self._parts = (
            self._steps,
            BackwardPasses(self.watch, frameworks.wrap_imported),
            Clearing(self.watch),
            LossScaling(self.watch, self.updates),
            Clipping(self.watch),
            NewOptimizers(self.watch),
        )

    def start(self) -> None:
        """Wrap torch's functions, and register the hooks of all optimizers."""
        for part in self._parts:
            part.start()

    def stop(self) -> None:
        """Put everything back, and remove all hooks but those of `step()`, which may be running."""
        self.watch.close()

    def remove_step_hooks(self) -> None:
        """Remove the hooks of `step()`. Not from inside of them: torch iterates over all such hooks."""
        self._steps.remove_hooks()
