"""Accumulate the gradients of a window: their scale, their source, and when p.grad shows the result.

The hooks pass gradients to the accumulators directly. This file decides by what each backward pass's
gradients are multiplied, and adds gradients that autograd has stored in p.grad. It gives the accumulators
their final scale at the end of a window, and decides when they are reduced over the ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..accumulators import Accumulators, GradState, Slot
from ..accumulators.engine import BackwardPass
from ..accumulators.memory import owns_memory
from ..distributed.fsdp import Shards
from ..distributed.pipelines import AttachedSchedule
from ..distributed.unattached_ddp import SynchronisationCheck
from ..kernels import launch_events, torch_state
from ..nn import compiled
from .rank_reduction import RankReduction
from .window import Window

#: Registers hooks again where a parameter's AccumulateGrad node may have changed.
Refresh = Callable[[], None]


class Plan(NamedTuple):
    """How the engine handles the next micro-batches without Python: `Engine::Plan` (csrc/autograd/engine.h).

    Attributes:
        scale: the factor of gradients.
        steps: the number of micro-batches in the window; 0 in a manual loop.
        repeats: whether all windows are alike.
        updates_plainly: whether an update needs only what p.grad holds after the last backward pass.
    """

    scale: float
    steps: int
    repeats: bool
    updates_plainly: bool


class Accumulation:
    """Applies the window to the accumulators. `Capture` asks it how to handle each backward pass."""

    def __init__(self, slots: list[Slot], window: Window, accumulators: Accumulators) -> None:
        self.window = window
        self.accumulators = accumulators
        self._slots = slots
        self._grads = accumulators.grads
        self._noise = accumulators.noise
        #: Whether a CUDA graph was being captured when the window began.
        self._began_in_graph = False
        #: Whether a backward pass has ended since a pipeline schedule's `step()` began.
        self._added_in_schedule = False
        #: The stream on which `Window.sum_scale` was computed, if it is a tensor on a GPU.
        self._sum_scale_stream: torch.cuda.Stream | None = None
        #: Counted loop: the check of gradients that a reducer outside the wrapper should have reduced.
        self._synchronisation = SynchronisationCheck() if window.counted else None
        self.ranks = RankReduction(window, accumulators)
        #: Whether an update without clipping or a loss scale has only to run the inner optimizer.
        self.updates_plainly = False
        self._attached: AttachedSchedule | None = None
        #: The parameters that FSDP2 has sharded, added when they are hooked.
        self.shards = Shards(window.reduction)
        window.shards = self.shards

    @property
    def attached(self) -> AttachedSchedule | None:
        """The attached pipeline schedule, if any."""
        return self._attached

    @attached.setter
    def attached(self, attached: AttachedSchedule | None) -> None:
        self._attached = attached
        self.accumulators.engine.set_condition("a pipeline schedule is attached", attached is not None)

    # Backward passes that do not count

    @contextlib.contextmanager
    def ignored(self) -> Iterator[None]:
        """Context in which backward passes do not count."""
        window = self.window
        before = window.ignoring
        window.ignoring = True
        compiled.ignoring[id(window)] = None
        try:
            self._grads.drop_consumed()
            self._grads.set_aside(self._slots)
            main_grads = None if before else self.accumulators.main_grads
            with contextlib.nullcontext() if main_grads is None else main_grads.replaced():
                yield
        finally:
            window.ignoring = before
            if not before:
                del compiled.ignoring[id(window)]
                self._grads.bring_back()

    def close(self) -> None:
        """End the check of synchronisation."""
        if self._synchronisation is not None:
            self._synchronisation.close()

    # Called by the hooks

    def begin_backward(self, outermost: bool, schedule: bool = False) -> Any:
        """Begin a backward pass, and return how to handle its gradients.

        outermost: whether no other backward pass is running. schedule: whether it is a pipeline schedule's
        `step()`. Raises RuntimeError without changes if a weight is missing, or if a CUDA graph would capture
        only a part of a window or stochastic rounding.
        """
        window = self.window
        in_graph = torch_state.capturing()
        outermost = outermost and not window.in_schedule
        if window.counted and not window.empty and in_graph != self._began_in_graph:
            raise RuntimeError(
                f"a CUDA graph must hold whole windows: this one has {window.micro_step} of {window.steps} "
                f"micro-batches {'outside' if in_graph else 'inside'} the capture, and their count would be "
                "replayed with it"
            )
        if window.adds_unscaled and not window.ignoring:
            self._check_may_add()
        if in_graph and self._noise.seed is not None:
            raise RuntimeError(
                "a CUDA graph would replay the random bits of its capture, and round every window's sums "
                "in the same way; allowed: rounding='nearest', or no capture"
            )
        self._began_in_graph = in_graph
        if outermost and not window.ignoring:
            self._noise.begin_own()
        backward = self._begin_ignored() if window.ignoring else self._begin_counting(schedule)
        if self.ranks.parallel is not None and outermost and not window.ignoring:
            self.ranks.begin_backward(self.ranks.parallel, backward.captures and not schedule)
        return backward

    def _check_may_add(self) -> None:
        """With `main_grad`: taint the window and raise RuntimeError if modules, which may have added in this
        backward pass already, must not add now.
        """
        window = self.window
        if window.full:
            reason = "the update of the last window has failed"
            allowed = "step() or flush() again, or zero_grad(), before the next backward pass"
        elif window.counted and window.is_divided:
            reason = "the window's sums were divided at the end of its last backward pass"
            allowed = "as many backward passes in a window's last micro-batch as in the one before"
        elif torch.is_grad_enabled() and not window.counted:
            reason = "create_graph=True in a manual loop adds to p.grad out of place"
            allowed = "a counted loop, or main_grad=False"
        else:
            return
        window.tainted = f"a backward pass has added to main_grad too late: {reason}"
        raise RuntimeError(f"main_grad=True: {reason}, and modules add to it; allowed: {allowed}")

    def _begin_ignored(self) -> Any:
        window = self.window
        if window.counted and (window.deferred if window.ran else window.unsynchronised):
            window.check_synchronised("a backward inside ignore() would be mixed with them")
        return BackwardPass(captures=False, ignored=True)

    def _begin_counting(self, schedule: bool) -> Any:
        window = self.window
        scale = window.gradient_scale
        differentiable = torch.is_grad_enabled()
        in_schedule = window.in_schedule
        # The schedule divides p.grad before its `step()` ends, but cannot divide private accumulators.
        divides = window.counted and in_schedule and window.micro.schedule_divisor is None
        captures = schedule or not (differentiable or divides)
        backward = BackwardPass(captures, scale, drops=window.has_zero_weight)
        if window.full:
            window.restart()  # its update failed, and was not retried
        self._grads.clear_ignored()
        if window.totals is not None:
            self.ranks.reopen()
        if not window.counted:
            if not in_schedule:
                self.collect_autograd_gradients()
        elif window.empty:
            self._grads.make_private()
        if window.counted and window.will_update and not window.adds_unscaled:
            self._change_sum_scale(window.final_scale(ending=True))  # applied by the window's last additions
        return backward

    def plan(self) -> Plan | None:
        """Return how the engine handles the next micro-batch; None if Python begins it.

        It can if one number on the host multiplies the gradients of all micro-batches of a window.
        """
        window = self.window
        if window.reduction.weighs or (window.reduction.divides and not window.counted):
            return None
        # A capture holds whole windows, which Python checks.
        if self.shards or self._began_in_graph or torch_state.process_group_up():
            return None
        scale = window.gradient_scale
        if isinstance(scale, Tensor):
            return None
        if not window.counted:
            return Plan(scale, steps=0, repeats=True, updates_plainly=False)
        repeats = window.steps == window.schedule  # else a function says, or a checkpoint of another one
        updates_plainly = repeats and self.updates_plainly and not self.accumulators.update_needs_norm
        return Plan(scale, window.steps, repeats, updates_plainly)

    def scale_of(self, backward: Any) -> float | Tensor:
        """Return the factor of a backward pass's gradients, ready on the current stream."""
        if self._sum_scale_stream is not None and isinstance(self.window.sum_scale, Tensor):
            stream = torch.cuda.current_stream(self._sum_scale_stream.device)
            if stream != self._sum_scale_stream:
                stream.wait_stream(self._sum_scale_stream)
        return backward.scale * self.window.sum_scale

    def leave_to_autograd(self, backward: Any, slot: Slot) -> None:
        """Take the accumulator out of p.grad, so that autograd stores this backward pass's gradient alone."""
        if backward.ignored:
            self._grads.set_aside([slot])  # `bring_back` may have run since
        elif self.window.adds_stored or self._adds_beside(backward, slot):
            self._grads.begin_autograd_gradient(slot)
        else:
            self._grads.begin_sum(slot)  # autograd adds to it
        backward.note_stored(slot)

    def _adds_beside(self, backward: Any, slot: Slot) -> bool:
        """Manual loop: whether autograd must not add this gradient to p.grad. Either p.grad is a copy of the
        accumulator for an update whose closure runs, or the accumulator is rounded stochastically.
        """
        rounds = self.window.autograd_stores and self._noise.rounds(slot.accumulate_dtype)
        return backward.captures and (rounds or slot.grad_state == GradState.DTYPE_COPY)

    def note_withheld(self, backward: Any, withheld: bool) -> None:
        """Note whether FSDP2 keeps this backward pass's gradients, or reduces them with those kept."""
        window = self.window
        if backward.ignored:
            if withheld:
                raise RuntimeError(
                    "a backward inside ignore() would add its gradients to those that FSDP2 keeps for the "
                    "window: call set_requires_gradient_sync(True) on the model before it"
                )
            return
        # After an exception, some layers' gradients have been added to those that FSDP2 keeps.
        backward.added = backward.added or withheld or window.withheld
        window.withheld = withheld
        window.deferred = withheld
        if not withheld:
            window.unsynchronised = False

    def check_unmixed(self, slot: Slot) -> None:
        """Raise RuntimeError if FSDP2 has added a gradient to an accumulator in p.grad."""
        gradient = slot.param.grad
        if gradient is not None and self.window.adds_stored and self._grads.is_published(slot, gradient):
            raise RuntimeError(
                f"FSDP2 has added a gradient of parameter {slot.name!r} to the accumulator in p.grad, in a "
                "backward that ran through no module with fully_shard applied: call "
                "optimizer.zero_grad() after each optimizer.step(), and discard() this window"
            )

    def synchronise(self, refresh: Refresh) -> None:
        """Counted loop: reduce and add the gradients that FSDP2 has kept. Call it on every rank."""
        window = self.window
        ran = window.ran
        self.shards.synchronise()
        self.collect(self._slots, refresh)
        window.ran = ran
        window.withheld = False
        window.deferred = False
        window.unsynchronised = False

    def adds_after_hooks(self) -> bool:
        """Whether `add_shown_gradient` is called as soon as autograd has stored a gradient in p.grad.

        With `data_parallel=`, the gradients of a backward pass are added together at its end, before the
        reduction.
        """
        return self.ranks.parallel is None

    def add_shown_gradient(self, backward: Any, slot: Slot) -> None:
        """Add the gradient that autograd has put into p.grad, and that the user's hooks have seen there."""
        gradient = slot.param.grad
        if backward.ignored or gradient is None or gradient.requires_grad or not slot.is_foreign(gradient):
            return
        backward.added = not backward.drops
        if not (self.window.adds_stored or slot.grad_state == GradState.AUTOGRAD_PENDING):
            self._own(slot, gradient)
            return
        slot.param.grad = None
        self._add([(slot, gradient.detach())])
        if not self.window.counted:
            self._grads.take_autograd_gradients([slot])  # p.grad is the accumulator again

    def _own(self, slot: Slot, gradient: Tensor) -> None:
        """Copy p.grad if it has another dtype than the accumulator or shares memory: autograd adds to it."""
        is_own = gradient.is_sparse or (gradient.dtype == slot.accumulate_dtype and owns_memory(gradient))
        is_own = is_own or gradient is slot.main_grad
        if slot.may_publish() and not is_own:
            self._grads.publish(slot, gradient.to(slot.accumulate_dtype, copy=True))

    def take_stored(self, backward: Any, slot: Slot) -> None:
        """Add the gradient that FSDP2 has put into p.grad, which is not an accumulator."""
        gradient = slot.param.grad
        adds_later = self.window.adds_stored
        if backward.ignored or gradient is None or torch.is_grad_enabled():
            return
        backward.added = True
        if not adds_later and gradient.dtype == slot.accumulate_dtype:
            return  # FSDP2 adds later gradients to it
        slot.param.grad = None
        with torch.no_grad(), launch_events.phase("accumulate"):
            scale = self.window.gradient_scale * self.window.sum_scale if adds_later else 1.0
            adder = self.accumulators.adder
            if not adder.add_part(slot, gradient, scale, adoptable=True):
                adder.add_eagerly(slot, gradient, scale)

    def collects_after(self, backward: Any) -> bool:
        """Whether gradients that autograd stores in this backward pass are added when it ends."""
        window = self.window
        stays_in_grad = window.deferred or window.in_schedule
        return window.counted and not (stays_in_grad or backward.ignored or backward.inner)

    def adds_stored_after(self, backward: Any) -> bool:
        """Whether `collects_after` holds, or autograd stores all gradients, as there is no native engine."""
        return self.window.autograd_stores or self.collects_after(backward)

    def publishes_after(self, backward: Any) -> bool:
        """Whether p.grad will be the final gradient after this backward pass."""
        return self.window.will_update and self.collects_after(backward)

    def end_backward(self, backward: Any, refresh: Refresh, outermost: bool) -> None:
        """End a backward pass, after its pending gradients were added.

        backward: what `begin_backward` has returned. refresh: see `Refresh`. outermost: as in
        `begin_backward`.
        """
        if backward.ignored:
            return
        window = self.window
        waits = window.deferred or window.in_schedule
        if self._synchronisation is not None and backward.reduced_outside and not waits:
            self._synchronisation.check(backward.stored)
        outermost = outermost and not window.in_schedule
        window.ran = True
        self._added_in_schedule = True
        window.num_backwards += outermost
        try:
            if window.tainted is None:
                self._conclude_backward(backward, refresh, outermost)
        finally:
            if outermost:
                self._noise.finish_numbering()

    def _conclude_backward(self, backward: Any, refresh: Refresh, outermost: bool) -> None:
        """After a backward pass: collect stored gradients, reduce, and publish, if it is time to."""
        if self.window.autograd_stores and outermost and backward.captures:
            self._add_stored(self._grads.take_autograd_gradients(self._slots))
        if outermost and backward.captures and self.collects_after(backward):
            # Another thread's backward pass that has not reached a hook yet may be writing to p.grad. So with
            # several threads, gradients that no hook has announced stay there until `step()`.
            if not self.accumulators.engine.has_threads:
                self.collect_plain(refresh)
            elif self.publishes_after(backward):
                self.collect(self._slots if self.ranks.parallel is not None else backward.stored, refresh)
        if self.publishes_after(backward):
            if self.ranks.parallel is not None and not (
                outermost and backward.captures and self.ranks.reduce_last()
            ):
                return  # `step()` adds gradients with a graph, and then reduces
            if self.window.adds_unscaled and not self.window.is_last_usual_backward:
                return  # modules may add more
            self.publish()
        elif outermost and self.ranks.parallel is not None:
            if any(slot.param.requires_grad and not slot.may_publish() for slot in self._slots):
                refresh()  # unfrozen since the last update: p.grad cannot be an accumulator yet
            if self.ranks.reduces_each and self.ranks.parallel.synchronises:
                self.ranks.reduce()

    def forget_backward(self, backward: Any, failed: bool) -> None:
        """End a backward pass. If it has `failed` after anything that counts was added, taint the window."""
        if not failed or backward.ignored:
            return
        if backward.drops and not self.accumulators.engine.backwards():  # p.grad has only what does not count
            self._drop_stored(backward.stored)
        elif backward.added or any(slot.param.grad is not None for slot in backward.stored):
            self.note_interruption()

    def note_interruption(self) -> None:
        """Taint the window, because an exception has interrupted an addition."""
        self.window.note_interruption()

    def _drop_stored(self, slots: Sequence[Slot]) -> None:
        """Drop the gradients that autograd has stored in a backward pass."""
        if not self.window.counted:
            self._grads.take_autograd_gradients(slots)
            return
        for slot in slots:
            gradient = slot.param.grad
            if gradient is not None and slot.is_foreign(gradient):
                slot.param.grad = None

    # A pipeline schedule's `step()`, which counts as one backward pass

    @contextlib.contextmanager
    def schedule_step(self, refresh: Refresh, divisor: int | None) -> Iterator[None]:
        """Context for a schedule's `step()`. Inside, autograd or the schedule stores gradients in p.grad.
        divisor: the accumulators divide each gradient by it; None: the schedule divides p.grad.
        """
        window = self.window
        grads = self._grads
        backward = self.begin_backward(True, schedule=True)
        if window.counted and not (backward.ignored or window.unsynchronised or window.deferred):
            self.collect(self._slots, refresh)  # else the schedule divides it
        if not backward.ignored:
            window.micro.schedule_divisor = divisor
        self._added_in_schedule = False
        for slot in self._slots if window.adds_stored or backward.ignored else ():
            if not slot.sharded:
                slot.widen()  # only autograd adds to p.grad until the accumulator is put there
            self.leave_to_autograd(backward, slot)
        window.in_schedule = True
        try:
            yield
            window.in_schedule = False
            if window.micro.schedule_divisor is not None and window.tainted is None:
                if window.counted:
                    self.collect(self._slots, refresh)
                else:
                    self._add_stored(grads.take_autograd_gradients(self._slots))
            window.micro.schedule_divisor = None
            if self.ranks.parallel is not None:
                self.ranks.parallel.note_schedule()
            self.end_backward(backward, refresh, outermost=True)
        except BaseException:
            if window.micro.schedule_divisor is not None:
                self._note_failed_schedule(backward)
            self.forget_backward(backward, failed=True)
            raise
        finally:
            window.in_schedule = False
            window.micro.schedule_divisor = None

    def _note_failed_schedule(self, backward: Any) -> None:
        """Note whether an attached schedule's `step()` has added gradients before it failed."""
        backward.added = backward.added or self._added_in_schedule
        if not self.window.counted:
            stored = self._grads.take_autograd_gradients(self._slots)
            backward.added = backward.added or bool(stored)
            backward.stored = []  # p.grad is the accumulator again

    def count_delivery(self, slot: Slot) -> None:
        """Tell the reducer that the slot's node has run."""
        if self.ranks.parallel is not None and not self.window.ignoring:
            self.ranks.parallel.deliveries.count(slot)

    # Gradients that autograd has stored

    def collect_plain(self, refresh: Refresh) -> None:
        """Counted loop, at the end of a backward pass: add gradients that autograd has stored.

        Hooks have not taken these: autograd has given their parameter a new AccumulateGrad node, the
        parameter was unfrozen, or a reducer or a hook of the user needs p.grad. Gradients with a graph stay
        until `step()`, because the user may differentiate them.
        """
        stored = []
        for slot in self._slots:
            gradient = slot.param.grad
            if gradient is not None and not (slot.sharded or gradient.requires_grad):
                stored.append(slot)
        # If a parameter has another shape than its sum, `step()` raises.
        if stored and all(slot.param.shape == slot.shape for slot in stored):
            self.collect(stored, refresh)

    def collect(self, slots: Sequence[Slot], refresh: Refresh) -> bool:
        """Counted loop: add gradients that autograd has stored, and return whether there were any."""
        foreign: list[tuple[Slot, Tensor]] = []
        with_graph: list[Slot] = []
        for slot in slots:
            gradient = slot.param.grad
            if gradient is None or not slot.is_foreign(gradient):
                continue
            if gradient.requires_grad and self._may_keep_graph(slot, gradient):
                with_graph.append(slot)
                continue
            foreign.append((slot, gradient.detach()))
            self.window.dropped_graph = self.window.dropped_graph or gradient.requires_grad
            slot.param.grad = None
        if not (foreign or with_graph):
            return False
        refresh()  # a hook that did not run may be on a node that no longer exists
        self._grads.drop_consumed()  # no captured backward pass has begun this window
        self._add_stored(foreign)
        if with_graph:
            self._grads.keep(with_graph)
        self.window.ran = True
        return True

    def _may_keep_graph(self, slot: Slot, gradient: Tensor) -> bool:
        """Whether the update can use this gradient as autograd has made it, because the window has no other.
        The inner optimizer may differentiate it.
        """
        window = self.window
        is_only = window.micro_step == 0 and window.steps == 1 and not window.reduction.weighs
        fits = gradient.dtype == slot.accumulate_dtype and slot.may_publish() and slot.main_grad is None
        return is_only and fits and self.ranks.parallel is None and slot.accumulator is None

    def collect_autograd_gradients(self) -> None:
        """Manual loop with weights: add gradients that autograd has stored."""
        if self.window.reduction.weighs:
            self._add_stored(self._grads.take_autograd_gradients(self._slots))

    def _add_stored(self, stored: Sequence[tuple[Slot, Tensor]]) -> None:
        """Between backward passes: add gradients that autograd has stored."""
        self._add(stored)
        self._noise.finish_numbering()

    def _add(self, stored: Sequence[tuple[Slot, Tensor]]) -> None:
        window = self.window
        if not stored or window.has_zero_weight:
            return
        for slot, gradient in stored:
            if gradient.layout is not torch.strided:
                slot.needs_eager = True
        slots, gradients = zip(*stored, strict=True)
        with torch.no_grad(), launch_events.phase("accumulate"):
            self.accumulators.adder.add_mixed(slots, gradients, window.gradient_scale * window.sum_scale)

    # The final scale

    def publish(self, *, ending: bool = True) -> None:
        """Put the accumulators in their final scale, if it is known already, into p.grad."""
        self.ranks.reduce_once(ending=ending)
        final = self.window.final_scale(ending=ending)
        if final is not None:
            self._change_sum_scale(final)
            self.apply_scales()
            self.accumulators.publish()
            self._noise.finish_numbering()

    def finish_sums(self, *, partial: bool = False) -> float | Tensor | None:
        """Reduce the accumulators over the ranks, if that was not done yet, and apply their deferred scales.

        Return the factor that the update still has to multiply them by; None if all weights are 0 or no rank
        has a gradient. partial: whether the window is only partly filled.
        """
        window = self.window
        if self.ranks.parallel is not None and window.totals is None:
            if window.counted:
                self.publish(ending=False)  # same bits of the norm as after a backward that reduces
            else:
                self.ranks.reduce_once(ending=False)
        final = window.final_scale(partial=partial)
        if final is None or (window.totals is not None and window.totals.nothing_came):
            return None
        self.apply_scales()  # of gradients that were added since `publish`
        on_host = not (isinstance(final, Tensor) or isinstance(window.sum_scale, Tensor))
        if on_host and final == window.sum_scale:
            return 1.0
        return final / window.sum_scale

    def _change_sum_scale(self, scale: float | Tensor | None) -> None:
        """Set `sum_scale`, and defer the factor new / old for each accumulator. None: not known yet."""
        window = self.window
        if scale is None or scale is window.sum_scale:
            return
        if isinstance(scale, Tensor) or isinstance(window.sum_scale, Tensor) or scale != window.sum_scale:
            with torch.no_grad():
                self.accumulators.passes.defer_scale(scale / window.sum_scale)
            window.sum_scale = scale
            if isinstance(scale, Tensor) and scale.is_cuda:
                self._sum_scale_stream = torch.cuda.current_stream(scale.device)

    def apply_scales(self) -> None:
        """Apply the deferred scales."""
        if self.accumulators.deferred.select_deferred():
            reason = "an exception has interrupted the scaling of the sums"
            with torch.no_grad(), self.window.tainted_by(reason):
                self.accumulators.passes.apply_scales()
