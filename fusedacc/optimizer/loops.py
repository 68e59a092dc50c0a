"""The counted and the manual loop, which end windows and update."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.optim import Optimizer

from ..accumulators import Slot
from ..autograd.capture import Capture
from ..distributed import fsdp, parallel_in, pipelines
from ..distributed.unattached_ddp import may_defer
from ..kernels import launch_events
from .accumulation import Accumulation
from .master_weights import MasterWeights
from .micro_batch import MicroBatch
from .parameters import ParameterSet
from .pipeline_steps import PipelineSteps, refuse_all_reduce_alone
from .update import Scaling, Update

#: The values of `accumulate(defer=...)`.
DEFER = ("all", "all_reduce", "none")


class Loop:
    """What both loops share. They implement the wrapper's methods, and end windows at different times."""

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
        self.inner = inner
        self._parameters = parameters
        self._capture = capture
        self._registry = capture.registry
        self._accumulation = accumulation
        self._window = accumulation.window
        self._accumulators = accumulation.accumulators
        self._slots = accumulation.accumulators.slots
        self._update = update
        self._masters = masters
        self._pipeline = pipeline

    def sync_param_groups(self) -> list[Slot]:
        """Pick up the user's changes to parameters, and return the new slots. Raises as
        `ParameterSet.sync_param_groups` and `HookRegistry.refresh`.
        """
        pipelines.install()
        if self._window.ignoring:
            self._accumulators.grads.bring_back()  # p.grad is read
        self._parameters.choose_again(self._capture)
        fresh = self._parameters.sync_param_groups(self._capture, self._masters)
        # If no hook has run since a cast, autograd may have added to gradients that do not count, and modules
        # to a main_grad of the former dtype.
        grads = self._accumulators.grads
        if self._registry.reshaped or grads.holds_uncounted or grads.has_main_grads:
            self._registry.refresh()
        return fresh

    def end_plainly(self) -> bool:
        """Return False: only a counted loop can end a window without Python's checks."""
        return False

    def clear_used(self) -> bool:
        """Clear the gradients that an update has used, and return True, if nothing else is to be done."""
        plain = self._clears_like_torch()
        return plain and self._capture.engine.clear_used(self.inner.param_groups, self._parameters.seen)

    def _clears_like_torch(self) -> bool:
        """Whether the inner optimizer's `zero_grad` is torch's own, which clears nothing but p.grad."""
        return getattr(self.inner.zero_grad, "__func__", None) is Optimizer.zero_grad

    def leave_to_python(self, condition: str, holds: bool) -> None:
        """Let Python run every `step()`, and begin every backward pass, while a condition holds."""
        self._capture.engine.set_condition(condition, holds)

    def _begin_next_window(self, skipped: bool) -> None:
        """Begin the next window after an attempted update."""
        self._window.count_update(skipped)
        self._registry.forget_shapes()
        self._registry.refresh()
        if self._accumulation.ranks.parallel is not None:
            self._accumulation.ranks.parallel.check_update()

    def check_defer(self, defer: str, model: torch.nn.Module | None) -> None:
        """Raise ValueError if `accumulate()` does not support this `defer` with this model."""
        if defer not in DEFER:
            raise ValueError(f"defer={defer!r}; allowed: {', '.join(map(repr, DEFER))}")
        is_reduced_here = self._accumulation.ranks.parallel is not None or parallel_in(model) is not None
        if defer == "none" and is_reduced_here and not self._registry.closed:
            raise ValueError(
                "defer='none' does not support DistributedDataParallel or the process group of "
                "data_parallel=, because the wrapper reduces the sums of a whole window; allowed: 'all'. To "
                "reduce in every micro-batch, give the DistributedDataParallel neither to data_parallel= nor "
                "to accumulate()"
            )
        attached = self._accumulation.attached
        if defer == "all_reduce" and attached is not None:
            refuse_all_reduce_alone(attached.schedule())

    def collect_for_step(self) -> bool:
        """Return True: a `step()` now would update. There is nothing to collect."""
        return True

    def show_final(self) -> None:
        """Put every final gradient into p.grad. In a manual loop p.grad is the accumulator."""

    def clear_inner(self, set_to_none: bool) -> None:
        """Call the inner optimizer's `zero_grad` if it is not torch's: it may clear more than p.grad."""
        method = self.inner.zero_grad
        if self._clears_like_torch():
            return
        parameters = inspect.signature(method).parameters.values()
        if any(p.name == "set_to_none" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
            method(set_to_none=set_to_none)
        elif any(p.kind is not inspect.Parameter.KEYWORD_ONLY for p in parameters):
            method(set_to_none)
        else:
            method()

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear all gradients and begin a window. Without `set_to_none`, zeros stay in p.grad."""
        self.clear_inner(set_to_none)
        self._parameters.sync_param_groups(self._capture, self._masters)
        self._parameters.forget_casts()
        self._window.clear()
        # The name that torch's zero_grad has in a profile (torch/optim/optimizer.py).
        with record_function(f"Optimizer.zero_grad#{type(self.inner).__name__}.zero_grad"):
            self._accumulators.clear(set_to_none)
        self._registry.refresh()


class CountedLoop(Loop):
    """The loop with `gradient_accumulation_steps=k`, which counts micro-batches."""

    def step(self, closure: Callable[[], Any] | None, scaling: Scaling, arguments: Mapping[str, Any]) -> Any:
        """End a micro-batch, and update if it was the window's last. Return the closure's result."""
        window = self._window
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._capture.drop_failed_backwards()
        if window.tainted is not None:
            window.check_untainted()
        self.sync_param_groups()
        window.has_updated = False
        if not self.inner.state and self._update.is_asked_for_state():
            with self._parameters.without_casts():
                self._update.make_state()
            self._accumulators.grads.ignore_present(self._slots)
            return loss
        self._collect_present()
        if window.withheld and window.ran and window.will_update:
            window.check_synchronised("step() would update without them")
        if window.close_micro_batch():
            self._close_window(scaling, arguments, partial=False)
        return loss

    def end_plainly(self) -> bool:
        """End a micro-batch and its window, if the update has only to run the inner optimizer; else return
        False. The engine has checked that the rest of `step` would do nothing.
        """
        engine = self._capture.engine
        if self._parameters.must_choose_again:
            return False
        if not engine.begin_update(self.inner.param_groups, self._parameters.seen):
            return False
        self._update.grad_norm = None
        self.inner.step()
        if not engine.end_update():
            self._accumulators.grads.restore_p_grad()
        self._window.count_update()
        self._registry.refresh()
        return True

    def _collect_present(self) -> None:
        """Add gradients that autograd or the user has put into p.grad to this micro-batch."""
        window = self._window
        if not (window.micro_step or window.ran):
            self._registry.refresh()
            self._accumulators.grads.mark_user_gradients()
        if self.inner.defaults.get("differentiable"):
            self._check_graphless()
        # Unsynchronised gradients wait in p.grad until a backward pass synchronises.
        if not (window.deferred or (window.unsynchronised and not window.ran)):
            self._collect_stored()

    def _collect_stored(self) -> None:
        window = self._window
        stored = self._capture.engine.any_foreign_gradient()
        if stored and self._accumulation.collect(self._slots, self._registry.refresh):
            self._capture.warn_of_bypass(window.steps > 1 or window.reduction.weighs)

    def _check_graphless(self) -> None:
        """Raise RuntimeError if a gradient has a graph, which the accumulator would lose."""
        for slot in self._slots:
            gradient = slot.param.grad
            if gradient is not None and gradient.requires_grad and slot.is_foreign(gradient):
                raise RuntimeError(
                    f"the gradient of parameter {slot.name!r} has a graph, and the optimizer was made with "
                    "differentiable=True, but accumulating micro-batches drops the graph. Allowed: "
                    "gradient_accumulation_steps=None (the manual loop), or detached gradients"
                )

    def collect_for_step(self) -> bool:
        """Add gradients in p.grad to the window, as `step()` does. Return whether a `step()` would update."""
        window = self._window
        self._capture.drop_failed_backwards()
        if window.tainted is None and not self._registry.closed:
            self.sync_param_groups()
            self._collect_present()
        return window.full or (window.ran and window.will_update)

    def show_final(self) -> None:
        """In a window's last micro-batch: put every final gradient into p.grad. Raises RuntimeError if the
        weight is missing. The end of the backward pass is too early: a weight may still be missing, and
        gradients that have a graph are collected later.
        """
        window = self._window
        micro = self._window.micro
        window.check_untainted()
        if window.reduction.weighs and window.ran and micro.weight is None:
            raise RuntimeError(
                f"reduction={window.reduction.name!r} needs the weight of the window's last micro-batch "
                "before unscale_(), which acts on the final gradient: set `micro_batch.weight` first"
            )
        self._accumulation.publish(ending=window.ran)

    def flush(self, scaling: Scaling, arguments: Mapping[str, Any], *, until_all: bool = True) -> None:
        """Update from a partly filled window, or do nothing if it is empty. until_all: join other ranks'
        windows until every rank flushes; False: join one window.
        """
        window = self._window
        if not window.withheld:
            window.check_synchronised("flush() would update each rank with only its own gradients")
        self.sync_param_groups()
        # After the update, a parameter cast before it would look as if it was cast since.
        self._registry.refresh()
        if self._accumulation.shards:
            self._accumulation.shards.check_even(window.micro_step + window.ran)
        if window.withheld:
            self._accumulation.synchronise(self._registry.refresh)
        if window.empty:
            self._accumulators.grads.mark_user_gradients()
        self._collect_stored()
        if window.ran:
            window.end_micro_batch()
        if self._accumulation.ranks.parallel is not None:
            self._flush_ranks(scaling, arguments, until_all=until_all)
        elif not window.empty:
            self._close_window(scaling, arguments, partial=True)

    def _flush_ranks(self, scaling: Scaling, arguments: Mapping[str, Any], *, until_all: bool) -> None:
        """Join the windows of ranks that have more of them: until all flush, or one without `until_all`."""
        ranks = self._accumulation.ranks
        ranks.flushing = True
        try:
            while True:
                if self._window.empty:
                    self._accumulators.grads.make_private()  # consumed gradients do not count
                unused_scaling = copy.copy(scaling)  # an update modifies it
                self._close_window(scaling, arguments, partial=True)
                if ranks.all_flush or not until_all:
                    return
                scaling = unused_scaling if scaling.go_on is None else scaling.go_on()
        finally:
            ranks.flushing = False

    def _close_window(self, scaling: Scaling, arguments: Mapping[str, Any], *, partial: bool) -> None:
        """Run one update of the inner optimizer from the window's accumulators.

        If it raises, the window stays full: `step()` or `flush()` retries, `zero_grad()` drops the window.
        """
        self._pipeline.check_weights()
        with self._parameters.without_casts():
            ratio = self._accumulation.finish_sums(partial=partial)
            totals = self._window.totals
            if ratio is None and totals is not None and totals.nothing_came:
                self._window.restart()
                return
            skipped = self._update.step(ratio, scaling, arguments).skipped
        if ratio is None:
            self._accumulators.clear()
        else:
            self._accumulators.end_update()
            if self._accumulators.main_grads is not None:
                self._accumulators.grads.end_window()
            elif self._capture.bypassed:
                self._accumulators.grads.drop_consumed()
        self._begin_next_window(skipped)

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear the gradients of the last update. Between micro-batches of a window, do nothing."""
        window = self._window
        if window.tainted is not None:
            return
        if window.ran:
            raise RuntimeError(
                "zero_grad() after a backward that no step() has ended: its gradients are in the "
                "window's sums and cannot be removed. Put a backward that must not count inside "
                "optimizer.ignore(), or call optimizer.discard() to drop the window"
            )
        if window.micro_step > 0 and not window.full:
            self._accumulators.grads.clear_ignored()
            if self._accumulators.grads.has_main_grads:
                self._registry.refresh()  # a parameter that was cast gets another main_grad
        else:
            super().zero_grad(set_to_none)

    def check_defer(self, defer: str, model: torch.nn.Module | None) -> None:
        """Raise ValueError if `accumulate()` does not support this `defer` with this model."""
        super().check_defer(defer, model)
        if defer == "all_reduce":
            fsdp.check_hybrid(model)

    def around(
        self, model: torch.nn.Module | None, micro: MicroBatch
    ) -> contextlib.AbstractContextManager[None]:
        """Return the context in which the model synchronises in the window's last micro-batch, and before it
        only what `micro.defer` does not defer.
        """
        window = self._window
        if self._accumulation.ranks.parallel is not None:
            return contextlib.nullcontext()
        if fsdp.is_fsdp(model):
            is_last = window.will_update or self._accumulation.shards.must_synchronise
            return fsdp.synchronising(
                model,
                reduces=is_last or micro.defer != "all",
                all_reduces=is_last or micro.defer == "none",
            )
        # p.grad of several micro-batches cannot be separated if the weight of one is 0.
        if hasattr(model, "no_sync") and micro.defer == "all" and not window.reduction.weighs:
            window.deferred = not window.will_update and may_defer(model)
            if window.deferred:
                return model.no_sync()  # type: ignore[union-attr, operator]
        return contextlib.nullcontext()


class ManualLoop(Loop):
    """The loop in which every `step()` updates. It counts only inside `accumulate()`."""

    def step(self, closure: Callable[[], Any] | None, scaling: Scaling, arguments: Mapping[str, Any]) -> Any:
        """Update, and return the result of the inner optimizer's step."""
        self._capture.drop_failed_backwards()
        window = self._window
        self._sync_and_note_gradients()
        self._accumulators.grads.clear_ignored()
        window.has_updated = False
        if closure is None and not self.inner.state and self._update.is_asked_for_state():
            with self._parameters.without_casts():
                return self._update.make_state()
        if window.in_context and window.ran:
            self._accumulation.collect_autograd_gradients()
            window.end_micro_batch()

        with self._parameters.without_casts():
            if closure is not None:
                loss = self._step_with(closure, arguments)
                skipped = False
            else:
                window.check_untainted()
                self._pipeline.check_weights()
                ratio = self._accumulation.finish_sums() if self._reduces else 1.0
                loss, skipped = self._update.step(ratio, scaling, arguments)
        self._accumulators.end_update()
        self._begin_next_window(skipped)
        return loss

    def _sync_and_note_gradients(self) -> None:
        """Pick up the user's changes to parameter groups. Inside `accumulate()`, gradients that autograd has
        stored for new parameters belong to this micro-batch.
        """
        window = self._window
        for slot in self.sync_param_groups():
            if window.in_context and slot.param.grad is not None:
                window.ran = True
                if window.reduction.weighs:
                    self._accumulators.grads.note_autograd_gradient(slot)

    @property
    def _reduces(self) -> bool:
        """Whether the accumulators have to be scaled or reduced before an update."""
        has_gradients = self._window.micro_step > 0 or self._accumulation.ranks.parallel is not None
        return self._window.reduction.divides and has_gradients

    def _step_with(self, closure: Callable[[], Any], arguments: Mapping[str, Any]) -> Any:
        """Let the inner optimizer call the closure, and prepare p.grad after each call."""
        update = self._update
        refused = ""
        if update.settings.skip_nonfinite:
            refused = "skip_nonfinite"
        elif self._masters is not None:
            refused = "master_weights"
        if refused:
            raise RuntimeError(
                f"{refused}=True does not go with a closure in a manual loop, because the inner optimizer "
                "calls the closure during its update; call backward() and then step() without a closure"
            )

        def evaluate() -> Any:
            with self._parameters.without_casts(), torch.enable_grad():
                loss = closure()
            self._capture.drop_failed_backwards()
            self._publish_sums()
            with launch_events.phase("update"):
                update.prepare(Scaling())
            return loss

        self._publish_sums()
        self._accumulators.fill_p_grad(self._accumulators.sums_for_update())
        try:
            return self.inner.step(evaluate, **arguments)
        finally:
            update.release()

    def _publish_sums(self) -> None:
        """Put the accumulators in their final scale, if it is known, into p.grad."""
        self._window.check_untainted()
        if self._reduces:
            with launch_events.phase("update"):
                self._accumulation.publish(ending=False)

    def check_defer(self, defer: str, model: torch.nn.Module | None) -> None:
        """Raise ValueError if `accumulate()` does not support this `defer` with this model."""
        super().check_defer(defer, model)
        if defer == "all_reduce":
            raise ValueError(
                "defer='all_reduce' needs a counted loop (gradient_accumulation_steps=k), because in a "
                "manual loop any micro-batch may be the last; allowed here: 'all' and 'none', and "
                "model.set_requires_all_reduce(False) before the micro-batches that are not the last"
            )

    @contextlib.contextmanager
    def around(self, model: torch.nn.Module | None, micro: MicroBatch) -> Iterator[None]:
        """Context around a micro-batch. The model synchronises in each one, because any may be the last."""
        try:
            yield
        finally:
            self._capture.drop_failed_backwards()
            self._sync_and_note_gradients()
            window = self._window
            if window.micro is micro and window.ran and window.tainted is None:
                self._accumulation.collect_autograd_gradients()
                window.end_micro_batch()
