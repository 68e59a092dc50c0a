"""The two loops: when a window ends, and what is done then."""

from __future__ import annotations

import abc
import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.optim import Optimizer

from ..accumulators import Slot
from ..autograd.capture import Capture
from ..autograd.unattached_ddp import may_defer
from ..distributed import fsdp, pipelines
from ..kernels import launch_events
from .accumulation import Accumulation
from .master_weights import MasterWeights
from .parameters import ParameterSet
from .pipeline_steps import PipelineSteps
from .update import Scaling, Update
from .window import MicroBatch


class Loop(abc.ABC):
    """What the wrapper's methods do; `CountedLoop` and `ManualLoop` differ in when a window ends.

    Args:
        inner: the inner optimizer.
        parameters: which are accumulated.
        capture: their hooks.
        accumulation: the window and its accumulators.
        update: runs the inner optimizer.
        masters: the parameters' float32 masters, if there are any; they follow the parameters.
        pipeline: compares the weights of a pipeline's ranks.
    """

    def __init__(
        self,
        inner: Optimizer,
        parameters: ParameterSet,
        capture: Capture,
        accumulation: Accumulation,
        update: Update,
        masters: MasterWeights | None,
        pipeline: PipelineSteps,
    ) -> None:
        self._inner, self._update, self._masters = inner, update, masters
        self._parameters, self._capture, self._registry = parameters, capture, capture.registry
        self._accumulation, self._pipeline = accumulation, pipeline
        self._window, self._accumulators = accumulation.window, accumulation.accumulators
        self._slots = self._accumulators.slots

    @abc.abstractmethod
    def step(self, closure: Callable[[], Any] | None, scaling: Scaling, arguments: Mapping[str, Any]) -> Any:
        """The wrapper's `step()`.

        Args:
            closure: as torch's.
            scaling: what a GradScaler has said of this update.
            arguments: the inner optimizer's own, of this step.
        """

    @abc.abstractmethod
    def closes_window(self) -> bool:
        """Whether a `step()` now would update; takes in what is in p.grad, as that would."""

    @abc.abstractmethod
    def show_final(self) -> None:
        """Before an update: put the final gradient into p.grad, all of it."""

    @abc.abstractmethod
    def zero_grad(self, set_to_none: bool) -> None:
        """The wrapper's `zero_grad()`."""

    @abc.abstractmethod
    def around(
        self, model: torch.nn.Module | None, micro: MicroBatch
    ) -> contextlib.AbstractContextManager[None]:
        """Context around a micro-batch."""

    def sync_param_groups(self) -> list[Slot]:
        """Be in step with what users have done to parameters; the slots that are new.

        Raises as `ParameterSet.sync_param_groups` and `HookRegistry.refresh`.
        """
        pipelines.install()
        if self._accumulation.ignoring:
            self._accumulation.bring_back()
        self._parameters.choose_again(self._accumulators.passes)
        fresh = self._parameters.sync_param_groups(self._capture, self._masters)
        if self._registry.reshaped:
            self._registry.refresh()
        return fresh

    def _end_update(self, skipped: bool) -> None:
        """An update was attempted: the next window begins."""
        self._window.end_update(skipped)
        self._registry.reshaped.clear()
        self._registry.refresh()
        if self._accumulation.ranks.parallel is not None:
            self._accumulation.ranks.parallel.check_update()

    def _clear(self, set_to_none: bool) -> None:
        """Begin a window from nothing; zeros stay in p.grad unless `set_to_none`."""
        self._parameters.sync_param_groups(self._capture, self._masters)
        self._parameters.forget_casts()
        self._window.clear()
        # As torch's own zero_grad names itself in a profile (torch/optim/optimizer.py).
        with record_function(f"Optimizer.zero_grad#{type(self._inner).__name__}.zero_grad"):
            if set_to_none:
                self._accumulators.clear()
            else:
                self._accumulators.zero()
        self._registry.refresh()
        if set_to_none:
            self._capture.await_first()


class CountedLoop(Loop):
    """Counts micro-batches; arguments as `Loop`."""

    def step(self, closure: Callable[[], Any] | None, scaling: Scaling, arguments: Mapping[str, Any]) -> Any:
        """End a micro-batch and, if it was the window's last, update; returns what the closure returned."""
        window = self._window
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._capture.tasks:
            self._capture.drop_failed_backwards()
        if window.tainted is not None:
            window.check_untainted()
        self.sync_param_groups()
        window.begin_step()
        if not self._inner.state and self._update.is_asked_for_state():
            with self._parameters.without_casts():
                self._update.make_state()
            self._accumulators.grads.ignore_present(self._slots)
            return loss
        self._collect()
        if window.withheld and window.micro.ran and window.will_update:
            window.check_synchronised("step() would update without them")
        if window.close_micro_batch():
            self._close_window(scaling, arguments, partial=False)
        return loss

    def _collect(self) -> None:
        """What autograd or the user has put into p.grad belongs to this micro-batch."""
        window = self._window
        if not (window.micro_step or window.micro.ran):
            self._registry.refresh()
            self._accumulators.grads.mark_user_gradients()
        waiting = window.unsynchronised and not window.micro.ran  # for a backward that synchronises
        if self._inner.defaults.get("differentiable"):
            self._check_graphless()
        if not (window.micro.deferred or waiting):
            self._collect_stored()

    def _collect_stored(self) -> None:
        all_ours = self._accumulators.grads.num_published == len(self._slots)
        stored, window = not all_ours and self._capture.hooks.any_gradient(), self._window
        if stored and self._accumulation.collect(self._slots, self._registry.refresh):
            self._capture.note_stored((window.steps > 1 or window.reduction.weighs) and not window.private)

    def _check_graphless(self) -> None:
        """Raise RuntimeError where a sum would lose the graph of a gradient."""
        for slot in self._slots:
            gradient = slot.param.grad
            if gradient is not None and gradient.requires_grad and slot.is_foreign(gradient):
                raise RuntimeError(
                    f"the gradient of parameter {slot.name!r} has a graph, and the optimizer is made with "
                    "differentiable=True: sums over micro-batches have none. Allowed: "
                    "gradient_accumulation_steps=None (the manual loop), or gradients that are detached"
                )

    def closes_window(self) -> bool:
        """Whether a `step()` now would update; takes in what is in p.grad, as that would."""
        window = self._window
        self._capture.drop_failed_backwards()
        if window.tainted is None and not self._registry.closed:
            self.sync_param_groups()
            self._collect()
        return window.full or (window.micro.ran and window.will_update)

    def show_final(self) -> None:
        """On a window's last micro-batch: put the final gradient into p.grad, all of it.

        At the end of the backward its weight may not have been set, and a gradient that autograd has stored
        with its graph is collected later.

        Raises:
            RuntimeError: the weight is still missing.
        """
        window, micro = self._window, self._window.micro
        window.check_untainted()
        if window.reduction.weighs and micro.ran and micro.weight is None:
            raise RuntimeError(
                f"reduction={window.reduction.name!r} needs the weight of the window's last micro-batch "
                "before unscale_(), which acts on the final gradient: set `micro_batch.weight` first"
            )
        self._accumulation.publish(ending=micro.ran)

    def flush(self, scaling: Scaling, arguments: Mapping[str, Any], until_all: bool = True) -> None:
        """Update from a part-filled window; a no-op if it is empty.

        With ranks, it takes part in the windows of those that have more of them: until every rank flushes,
        or, without `until_all`, in one.
        """
        window = self._window
        if not window.withheld:
            window.check_synchronised("flush() would update every rank with gradients of its own")
        self.sync_param_groups()
        # After the update, a parameter that was cast before it would look cast since.
        self._registry.refresh()
        if self._accumulation.shards:
            self._accumulation.shards.check_even(window.micro_step + window.micro.ran)
        if window.withheld:
            self._accumulation.synchronise(self._registry.refresh)
        if window.empty:
            self._accumulators.grads.mark_user_gradients()
        self._collect_stored()
        if window.micro.ran:
            window.end_micro_batch()
        if self._accumulation.ranks.parallel is not None:
            self._flush_ranks(scaling, arguments, until_all)
        elif not window.empty:
            self._close_window(scaling, arguments, partial=True)

    def _flush_ranks(self, scaling: Scaling, arguments: Mapping[str, Any], until_all: bool) -> None:
        """Take part in the windows of ranks that have more of them: in one, or `until_all` flush."""
        ranks = self._accumulation.ranks
        ranks.flushing = True
        try:
            while True:
                if self._window.empty:
                    self._accumulators.grads.make_private()  # what was consumed is no part of this one
                again = copy.copy(scaling)  # an update changes it
                self._close_window(scaling, arguments, partial=True)
                if ranks.all_flush or not until_all:
                    return
                scaling = again if scaling.go_on is None else scaling.go_on()
        finally:
            ranks.flushing = False

    def _close_window(self, scaling: Scaling, arguments: Mapping[str, Any], partial: bool) -> None:
        """One update of the inner optimizer from the window's sums.

        If it raises, the window stays as it is: `step()` or `flush()` tries again, `zero_grad()` gives up.
        """
        self._pipeline.check_weights()
        with self._parameters.without_casts():
            ratio = self._accumulation.conclude(partial)
            totals = self._window.totals
            if ratio is None and totals is not None and totals.nothing_came:
                self._window.restart()
                return
            _, skipped = self._update.step(ratio, scaling, arguments)
        if ratio is None:
            self._accumulators.clear()
        else:
            self._accumulators.end_update()
            if self._capture.bypassed:
                self._accumulators.grads.drop_consumed()
        self._end_update(skipped)

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear the gradients of the last update; nothing in mid-window."""
        window = self._window
        if window.tainted is not None:
            return
        if window.micro.ran:
            raise RuntimeError(
                "zero_grad() after a backward that no step() has ended: its gradients are in the "
                "window's sums and cannot be taken back. Put a backward that shall not count inside "
                "optimizer.ignore(), or call optimizer.discard() to throw the window away"
            )
        if window.micro_step > 0 and not window.full:
            self._accumulators.grads.clear_ignored()
        else:
            self._clear(set_to_none)

    def around(
        self, model: torch.nn.Module | None, micro: MicroBatch
    ) -> contextlib.AbstractContextManager[None]:
        """Context around a micro-batch: the model does not synchronise before the window's last."""
        if self._accumulation.ranks.parallel is not None:
            return contextlib.nullcontext()
        if fsdp.is_fsdp(model):
            return fsdp.synchronising(model, self._window.will_update)
        if hasattr(model, "no_sync") and not self._window.reduction.scales_by_weight:
            micro.deferred = not self._window.will_update and may_defer(model)
            if micro.deferred:
                return model.no_sync()  # type: ignore[union-attr, operator]
        return contextlib.nullcontext()


class ManualLoop(Loop):
    """Counts nothing outside `accumulate()`; arguments as `Loop`."""

    def step(self, closure: Callable[[], Any] | None, scaling: Scaling, arguments: Mapping[str, Any]) -> Any:
        """Update; returns what the inner optimizer's step returned."""
        self._capture.drop_failed_backwards()
        window = self._window
        self._sync_and_note_gradients()
        self._accumulators.grads.clear_ignored()
        window.begin_step()
        if closure is None and not self._inner.state and self._update.is_asked_for_state():
            with self._parameters.without_casts():
                return self._update.make_state()
        if window.in_context and window.micro.ran:
            self._accumulation.collect_autograd_gradients()
            window.end_micro_batch()

        with self._parameters.without_casts():
            if closure is not None:
                loss, skipped = self._step_with(closure, arguments), False
            else:
                window.check_untainted()
                self._pipeline.check_weights()
                ratio = self._accumulation.conclude() if self._reduces else 1.0
                loss, skipped = self._update.step(ratio, scaling, arguments)
        self._accumulators.end_update()
        self._end_update(skipped)
        return loss

    def _sync_and_note_gradients(self) -> None:
        """Be in step with groups that were changed by hand.

        Inside `accumulate()`, what autograd has stored for parameters that are new belongs to this
        micro-batch.
        """
        window = self._window
        for slot in self.sync_param_groups():
            if window.in_context and slot.param.grad is not None:
                window.micro.ran = True
                if window.reduction.weighs:
                    self._accumulators.grads.note_autograd_gradient(slot)

    def closes_window(self) -> bool:
        """Whether a `step()` now would update."""
        return True

    def show_final(self) -> None:
        """p.grad is the sum already."""

    @property
    def _reduces(self) -> bool:
        """Whether the sums are to be brought to another scale than the one that they were added in."""
        begun = self._window.micro_step > 0 or self._accumulation.ranks.parallel is not None
        return self._window.reduction.divides and begun

    def _step_with(self, closure: Callable[[], Any], arguments: Mapping[str, Any]) -> Any:
        """The inner optimizer evaluates the closure as often as it likes; gradients are readied each time."""
        update = self._update
        for name, is_set in (
            ("skip_nonfinite", update.settings.skip_nonfinite),
            ("master_weights", self._masters is not None),
        ):
            if is_set:
                raise RuntimeError(
                    f"{name}=True does not go with a closure in a manual loop, which the inner optimizer "
                    "calls in the middle of its update; call backward() and then step() without one"
                )

        def evaluate() -> Any:
            with self._parameters.without_casts(), torch.enable_grad():
                loss = closure()
            self._capture.drop_failed_backwards()
            self._finish_sums()
            with launch_events.phase("update"):
                update.prepare(Scaling())
            return loss

        self._finish_sums()
        self._accumulators.begin_update(self._accumulators.sums_for_update())
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
            self._capture.drop_failed_backwards()
            self._sync_and_note_gradients()
            window = self._window
            if window.micro is micro and micro.ran and window.tainted is None:
                self._accumulation.collect_autograd_gradients()
                window.end_micro_batch()
