"""The manual loop: every `step()` updates, and p.grad is the accumulator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..kernels import launch_events
from .loop import Loop
from .loss_scale import Scaling
from .micro_batch import MicroBatch


class ManualLoop(Loop):
    """Counts nothing outside `accumulate()`; arguments as `Loop`."""

    def step(self, closure: Callable[[], Any] | None, scaling: Scaling, arguments: Mapping[str, Any]) -> Any:
        """Update; returns what the inner optimizer's step returned."""
        self._capture.settle()
        window = self._window
        self._follow()
        window.begin_step()
        if closure is None and self._is_asked_for_state():
            return self._make_state()
        if window.in_context and window.micro.ran:
            self._accumulation.collect_stock()
            window.end_micro_batch()

        if closure is not None:
            loss, skipped = self._step_with(closure, arguments), False
        else:
            window.check_untainted()
            ratio = self._accumulation.conclude() if self._reduces else 1.0
            loss, skipped = self._run(ratio, scaling, arguments)
        self._accumulators.leave_step()
        self._end_update(skipped)
        return loss

    def _follow(self) -> None:
        """Be in step with groups that were changed by hand.

        Inside `accumulate()`, what autograd has stored for parameters that are new belongs to this
        micro-batch.
        """
        window = self._window
        for slot in self.follow():
            if window.in_context and slot.param.grad is not None:
                window.micro.ran = True
                if window.weighs:
                    self._accumulators.grads.note_stock(slot)

    def closes_window(self) -> bool:
        """Whether a `step()` now would update."""
        return True

    def show_final(self) -> None:
        """p.grad is the sum already."""

    @property
    def _reduces(self) -> bool:
        """Whether the sums are to be brought to another scale than the one that they were added in."""
        return self._window.reduction != "sum" and self._window.micro_step > 0

    def _step_with(self, closure: Callable[[], Any], arguments: Mapping[str, Any]) -> Any:
        """The inner optimizer evaluates the closure as often as it likes; gradients are readied each time."""
        update = self._update
        for name, is_set in (
            ("skip_nonfinite", update.skip_nonfinite),
            ("master_weights", self._masters is not None),
        ):
            if is_set:
                raise RuntimeError(
                    f"{name}=True does not go with a closure in a manual loop, which the inner optimizer "
                    "calls in the middle of its update; call backward() and then step() without one"
                )

        def evaluate() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._capture.settle()
            self._finish_sums()
            with launch_events.phase("update"):
                update.prepare(Scaling())
            return loss

        self._finish_sums()
        self._accumulators.enter_step(self._accumulators.finals())
        try:
            return self._inner.step(evaluate, **arguments)
        finally:
            update.release()

    def _finish_sums(self) -> None:
        """Bring the sums to their final scale, as far as the host knows it."""
        self._window.check_untainted()
        if self._reduces:
            with launch_events.phase("update"):
                self._accumulation.publish(ending=False)

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear the gradients."""
        self._clear(set_to_none)

    @contextlib.contextmanager
    def around(self, model: torch.nn.Module | None, micro: MicroBatch) -> Iterator[None]:
        """Context around a micro-batch, which ends with it; the model synchronises: any may be the last."""
        try:
            yield
        finally:
            self._capture.settle()
            self._follow()
            window = self._window
            if window.micro is micro and micro.ran and window.tainted is None:
                self._accumulation.collect_stock()
                window.end_micro_batch()
