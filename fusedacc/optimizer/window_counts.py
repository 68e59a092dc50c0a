"""The counting of a window: micro-batches and updates, and what keeps the window from being used."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from ..accumulators.engine import WindowState
from ..accumulators.reduction import reduction_of
from .micro_batch import MicroBatch


def _has_run(window: weakref.ref[WindowCounts]) -> bool:
    counts = window()
    return counts is not None and counts.ran


Schedule = int | Callable[[int], int] | None


def check_schedule(schedule: Any) -> Schedule:
    """Return the schedule if it is an int >= 1, a callable or None; else raise TypeError or ValueError."""
    if schedule is None or (callable(schedule) and not isinstance(schedule, type)):
        return schedule
    if isinstance(schedule, bool) or not isinstance(schedule, int):
        raise TypeError(
            "gradient_accumulation_steps must be an int, a callable of the number of updates, or None, got "
            f"{schedule!r}"
        )
    if schedule < 1:
        raise ValueError(f"gradient_accumulation_steps must be at least 1, got {schedule}")
    return schedule


class WindowCounts(WindowState):
    """Counts the micro-batches of a window, and updates.

    The engine's class has the fields that decide how a backward pass is handled:

    - micro_step: the micro-batches that have ended.
    - usual_backwards: the `num_backwards` of the last one; 0 before the first.
    - has_updated: whether the last `step()` or `flush()` has updated.
    - ignoring: whether backward passes do not count (`ignore()`).
    - in_context: whether `accumulate()` is entered.
    - unsynchronised: whether p.grad holds gradients that are not synchronised over the ranks yet.
    - withheld: whether FSDP2 holds such gradients.
    - tainted: why the accumulators are only partly updated; None if they are whole.
    - sum_scale: see Note [The window's scales] in window.py.

    And of the current micro-batch:

    - ran: whether a backward pass has ended.
    - num_backwards: how many Python has ended, without those nested in others. With ranks it ends all.
    - deferred: whether its gradients stay unsynchronised in p.grad, to be collected in a later micro-batch.
    - in_schedule: whether a pipeline schedule's `step()` is running, which counts as one backward pass.

    Args:
        schedule: the wrapper's argument `gradient_accumulation_steps`.
        reduction: the wrapper's argument; None for "mean" when counted and "sum" when manual.
    """

    #: See `Window`.
    adds_unscaled = False
    tainted: str | None
    sum_scale: float | Tensor
    in_context: bool
    deferred: bool
    in_schedule: bool

    def __init__(self, schedule: Schedule, reduction: str | None) -> None:
        super().__init__()
        self.schedule = check_schedule(schedule)
        self.counted = schedule is not None
        if reduction is None:
            reduction = "sum" if schedule is None else "mean"
        self.reduction = reduction_of(reduction)
        self.num_updates = 0
        self.num_skipped = 0
        self.reset()

    def reset(self) -> None:
        """Open an empty window."""
        self.begin_window()
        self.micro = self._new_micro_batch()
        #: Whether gradients of `backward(create_graph=True)` were added without their graph.
        self.dropped_graph = False
        #: What the schedule has returned for this window; None before it was called.
        self._steps: int | None = None

    def restart(self) -> None:
        """Replace this window by an empty one, and stay inside `accumulate()` if entered."""
        in_context = self.in_context
        micro = self.micro
        has_run = self.ran
        deferred = self.deferred
        in_schedule = self.in_schedule
        self.reset()
        self.in_context = in_context
        if in_context and not has_run:
            self.micro = micro
            self.deferred = deferred
            self.in_schedule = in_schedule

    def clear(self) -> None:
        """Discard the window's micro-batches, if any, and its taint."""
        if not self.empty:
            self.restart()
        self.tainted = None

    # Micro-batches

    @property
    def steps(self) -> int:
        """The micro-batches per update, 1 in a manual loop. A schedule is called once a window."""
        if self._steps is None:
            if callable(self.schedule):
                self._steps = self._call_schedule(self.schedule)
            else:
                self._steps = 1 if self.schedule is None else self.schedule
        return self._steps

    def _call_schedule(self, schedule: Callable[[int], int]) -> int:
        steps = schedule(self.num_updates)
        if steps is None or callable(steps):
            raise TypeError(
                f"gradient_accumulation_steps({self.num_updates}) must return an int, got {steps!r}"
            )
        check_schedule(steps)
        return int(steps)

    def _new_micro_batch(self, weight: float | Tensor | None = None) -> MicroBatch:
        has_run = partial(_has_run, weakref.ref(self))
        return MicroBatch(self.reduction, has_run, weight, allows_zero=not self.adds_unscaled)

    @property
    def empty(self) -> bool:
        return self.micro_step == 0 and not self.ran

    @property
    def full(self) -> bool:
        """Whether all micro-batches have ended but the update has not succeeded yet."""
        if self.schedule is None or self.micro_step == 0:
            return False
        return self.micro_step >= (self._steps or self.steps)  # the property costs a call

    @property
    def will_update(self) -> bool:
        return self.schedule is None or self.micro_step + 1 >= (self._steps or self.steps)

    def open(self, weight: float | Tensor | None) -> MicroBatch:
        """Enter `accumulate()`, and return its micro-batch. Raises RuntimeError if contexts are nested."""
        if self.in_context:
            raise RuntimeError("accumulate() is already entered; contexts do not nest: one per micro-batch")
        if not self.ran:  # forget a weight whose micro-batch had no backward pass
            self.begin_micro_batch()
            self.micro = self._new_micro_batch(weight)
        elif weight is not None:
            self.micro.weight = weight
        self.in_context = True
        return self.micro

    def end_micro_batch(self) -> None:
        """Count the current micro-batch and begin the next."""
        self.micro.has_ended = True
        self.count_micro_batch()
        self.micro = self._new_micro_batch()

    def close_micro_batch(self) -> bool:
        """End the current micro-batch if a backward pass has run, and return whether the window is full."""
        if self.ran:
            self.unsynchronised = self.deferred
            self.end_micro_batch()
        return self.full

    def count_update(self, skipped: bool = False) -> None:
        """Count an attempted update and begin the next window."""
        self.num_updates += 1
        self.num_skipped += skipped
        if self.in_context:
            self.restart()
        else:
            self.reset()
        self.has_updated = True

    # Failures

    @contextlib.contextmanager
    def tainted_by(self, reason: str) -> Iterator[None]:
        """Context in which an exception taints the window, with this reason."""
        try:
            yield
        except BaseException:
            self.tainted = reason
            raise

    def check_untainted(self) -> None:
        """Raise RuntimeError if an exception has left partly updated accumulators."""
        if self.tainted is not None:
            raise RuntimeError(
                f"{self.tainted}: the accumulators are only partly updated and cannot be repaired; call "
                "discard() to drop the window"
            )

    def check_synchronised(self, consequence: str) -> None:
        """Raise if gradients of this window are not synchronised yet; `consequence` ends the message."""
        if self.withheld:
            raise RuntimeError(
                "FSDP2 keeps unsynchronised gradients of this window. It reduces them in the next backward "
                f"after set_requires_gradient_sync(True) was called on the model: {consequence}"
            )
        if self.unsynchronised or self.deferred:
            raise RuntimeError(
                "gradients of this window wait in p.grad for the synchronisation of its last micro-batch "
                f"(accumulate(model=...)): {consequence}"
            )
