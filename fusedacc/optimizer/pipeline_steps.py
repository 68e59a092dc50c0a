"""Counts each `schedule.step()` of a pipeline as one backward pass."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from ..autograd.capture import Capture
from ..distributed import pipelines
from .accumulation import Accumulation


class PipelineSteps:
    """Tells `Accumulation` when a pipeline schedule's `step()` begins and ends.

    Args:
        accumulation: the window and its accumulators.
        capture: the parameters' hooks.
    """

    def __init__(self, accumulation: Accumulation, capture: Capture) -> None:
        self._accumulation, self._capture = accumulation, capture
        #: Whether a schedule trains the parameters, and gradients stay in p.grad until its `step()` ends.
        self.hold_back = False
        pipelines.listen(self)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()

    def close(self) -> None:
        """Follow schedules no more."""
        pipelines.leave(self)

    @contextlib.contextmanager
    def around_step(self, parameters: set[int]) -> Iterator[None]:
        """Context around one `schedule.step()` that trains the parameters of these ids.

        A manual loop that reduces over no ranks needs nothing: `p.grad` is its accumulator all the time.

        Raises:
            RuntimeError: as `Accumulation.begin_backward`, on entering; nothing is changed then.
        """
        accumulation, registry = self._accumulation, self._capture.registry
        concerned = accumulation.window.counted or accumulation.ranks.parallel is not None
        if not concerned or parameters.isdisjoint(id(slot.param) for slot in registry.slots):
            yield
            return
        self.hold_back = accumulation.window.counted
        self._capture.drop_failed_backwards()
        task, failed = accumulation.begin_schedule(registry.refresh), True
        try:
            yield
            accumulation.end_schedule(task, registry.refresh)
            failed = False
        finally:
            accumulation.forget_schedule(task, failed)
