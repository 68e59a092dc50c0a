"""An optimizer in front of another: groups, state, defaults and whatever else it lacks are the other's."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from torch.optim import Optimizer

#: Modules that must not find the inner optimizer: Lightning has two names.
_UNWRAPS = frozenset(
    f"{package}.callbacks.lr_monitor" for package in ("lightning.pytorch", "pytorch_lightning")
)


class Delegate(Optimizer):
    """Subclasses set `optimizer`, the inner one, and do not call `Optimizer.__init__`.

    That would wrap step() so that hooks fire on every call.
    """

    @property
    def optimizer(self) -> Optimizer:
        """The inner optimizer.

        Lightning's LearningRateMonitor takes whatever has this attribute for a pair of DeepSpeed's and looks
        the inner one up among the schedulers' optimizers, where only the outer one is: it would log each rate
        twice. It does not see the attribute.
        """
        if sys._getframe(1).f_globals.get("__name__") in _UNWRAPS or "optimizer" not in self.__dict__:
            raise AttributeError("optimizer")
        return self.__dict__["optimizer"]

    @optimizer.setter
    def optimizer(self, optimizer: Optimizer) -> None:
        self.__dict__["optimizer"] = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's, live."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's, live."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's, live."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def _check_arguments(self, arguments: dict[str, Any]) -> None:
        """Raise TypeError for what the inner optimizer's `step` does not take."""
        if not arguments:
            return
        try:
            signature = inspect.signature(self.optimizer.step)
        except ValueError:  # compiled, without one
            return
        try:
            signature.bind_partial(**arguments)
        except TypeError as error:
            raise TypeError(f"step() of the inner {type(self.optimizer).__name__}: {error}") from None

    def __getattr__(self, name: str) -> Any:
        # Hooks registered here, train() and eval() of schedule-free optimizers, and the like.
        if name == "optimizer" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self.optimizer, name)
