"""Calls of `step()`: when the gradients are those that the optimizer uses, and when it has used them."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from .guard import guarded
from .updates import OpenStep, Updates
from .watch_state import WatchState


class OptimizerSteps:
    """Watches `step()` of all optimizers of torch.

    Args:
        watch: the state of the watch.
        updates: records the updates.
    """

    def __init__(self, watch: WatchState, updates: Updates) -> None:
        self.watch, self._updates = watch, updates
        self._step_hooks: list[RemovableHandle] = []

    def start(self) -> None:
        """Register the hooks."""
        self._step_hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def remove_hooks(self) -> None:
        """Remove the hooks of `step()`. Not from inside of them: torch iterates over all such hooks."""
        for step in self._updates.open_steps:  # an exception has ended them
            step.remove_hook()
        for handle in self._step_hooks:
            handle.remove()

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.watch.is_closed:
            return None
        step, open_steps = OpenStep(optimizer), self._updates.open_steps
        for each in open_steps:
            if each.optimizer is optimizer:  # an exception has ended it
                each.remove_hook()
        self._updates.open_steps = [each for each in open_steps if each.optimizer is not optimizer] + [step]
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)

        def record(*_: Any) -> None:
            step.update = self._updates.record_step(optimizer)

        if not callable(closure):
            if optimizer._optimizer_step_pre_hooks:  # they may change gradients, so look after them
                step.handle = optimizer.register_step_pre_hook(record)
            else:
                record()
            return None

        def watched_closure(*closure_args: Any, **closure_kwargs: Any) -> Any:
            if step.update is not None:  # an earlier evaluation of this step, as LBFGS makes
                self._updates.finish(optimizer, step.update)
                step.update = None
            self._excuse_earlier(optimizer)
            result = closure(*closure_args, **closure_kwargs)
            record()
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": watched_closure}
        return (args[0], watched_closure, *args[2:]), kwargs

    @guarded
    def _excuse_earlier(self, optimizer: Any) -> None:
        """Excuse passes before an evaluation for which the optimizer has moved parameters, as SAM does."""
        optimizers, history = self.watch.optimizers, self.watch.history
        if optimizers.versions() != self.watch.versions:
            for each in history.window(optimizers.record_of(optimizer).number):
                each.excused = each.excused or "used"

    def _after_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._updates.open_steps and self._updates.open_steps[-1].optimizer is optimizer:
            step = self._updates.open_steps.pop()
            step.remove_hook()
            self._updates.finish(optimizer, step.update)
