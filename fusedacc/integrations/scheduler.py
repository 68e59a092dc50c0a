"""A learning-rate scheduler that is stepped once per micro-batch and counts updates."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from ..optimizer import AccumulatingOptimizer

__all__ = ["UpdateScheduler"]

#: Key of the number of updates that the wrapped scheduler has been stepped for.
COUNTED = "fusedacc_counted_updates"


class UpdateScheduler(LRScheduler):
    """Any scheduler, stepped once for every update of an `AccumulatingOptimizer`.

    Call `step()` where the loop calls the optimizer's, once per micro-batch. It compares the optimizer's
    `num_updates` with the updates that it has stepped for: between updates it does nothing, and the next call
    counts an update by `flush()`. Dropped updates (`skip_nonfinite`, a GradScaler) count too, as in
    `num_updates`.

    It is an `LRScheduler`, because frameworks require one. All other attributes are the wrapped scheduler's.
    Chain schedulers first, then wrap the result.

    Args:
        scheduler: created on `optimizer` or on its inner optimizer.
        optimizer: the wrapper whose updates count; None: the one that `scheduler` was created on.

    Raises:
        TypeError: `scheduler` is no LRScheduler, or `optimizer` no AccumulatingOptimizer.
        ValueError: `scheduler` changes another optimizer's groups.
    """

    scheduler: LRScheduler
    optimizer: AccumulatingOptimizer
    _counted: int | None

    def __init__(self, scheduler: LRScheduler, optimizer: AccumulatingOptimizer | None = None) -> None:
        if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, UpdateScheduler):
            raise TypeError(
                "scheduler must be a torch.optim.lr_scheduler.LRScheduler, and no UpdateScheduler; got "
                f"{type(scheduler).__name__}"
            )
        if optimizer is None:
            optimizer = scheduler.optimizer  # type: ignore[assignment]
        if not isinstance(optimizer, AccumulatingOptimizer):
            raise TypeError(
                f"optimizer must be a fusedacc.AccumulatingOptimizer, got {type(optimizer).__name__}; where "
                "the scheduler was made on another object, pass optimizer="
            )
        if scheduler.optimizer.param_groups is not optimizer.param_groups:
            raise ValueError(
                "scheduler was made on another optimizer; make it on this one or on its inner one"
            )
        # Not LRScheduler.__init__, which would set every lr to its initial value.
        self.__dict__.update(scheduler=scheduler, optimizer=optimizer, _counted=None)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the wrapped scheduler for the updates since the last call, usually one or none.

        Args:
            *args: arguments of the wrapped scheduler, such as `metrics` of ReduceLROnPlateau. With any
                argument it is stepped at most once, because one measurement is one step.
            **kwargs: keyword arguments of the wrapped scheduler.
        """
        updates = self.optimizer.num_updates
        if self._counted is None or self._counted > updates:  # new, or the optimizer has been set back
            self.__dict__["_counted"] = updates - self.optimizer.has_updated
        missed = updates - self.__dict__["_counted"]
        for _ in range(min(missed, 1) if args or kwargs else missed):
            self.scheduler.step(*args, **kwargs)
        self.__dict__["_counted"] = updates

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped scheduler's state and the count of updates. A bare scheduler can load it too."""
        counted = {} if self._counted is None else {COUNTED: self._counted}
        return self.scheduler.state_dict() | counted

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, here or of a bare scheduler, before or after the optimizer.

        A bare scheduler's state is assumed to include every update so far.

        Raises:
            ValueError: the count of updates is damaged; nothing has changed.
        """
        state = dict(state_dict)
        counted = state.pop(COUNTED, None)
        if counted is not None and (type(counted) is not int or counted < 0):
            raise ValueError(f"state_dict[{COUNTED!r}] must be an int of at least 0, got {counted!r}")
        self.scheduler.load_state_dict(state)
        self.__dict__["_counted"] = counted

    def get_last_lr(self) -> list[Any]:
        return self.scheduler.get_last_lr()

    def get_lr(self) -> list[Any]:
        return self.scheduler.get_lr()

    def _initial_step(self) -> None:
        raise TypeError(
            f"{type(self).__name__} cannot be a part of SequentialLR, which counts its own steps: wrap the "
            "SequentialLR"
        )

    def _update_lr(self, epoch: int | None = None) -> None:
        self._initial_step()

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("scheduler", "optimizer", "_counted"):
            self.__dict__[name] = value
        else:
            setattr(self.scheduler, name, value)
