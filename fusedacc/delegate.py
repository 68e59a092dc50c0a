"""An optimizer in front of another: groups, state, defaults and whatever else it lacks are the other's."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


class Delegate(Optimizer):
    """Subclasses set `optimizer`, the inner one, and do not call `Optimizer.__init__`.

    That would wrap step() so that hooks fire on every call.
    """

    optimizer: Optimizer

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

    def __getattr__(self, name: str) -> Any:
        # Hooks registered here, train() and eval() of schedule-free optimizers, and the like.
        if name == "optimizer" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self.optimizer, name)
