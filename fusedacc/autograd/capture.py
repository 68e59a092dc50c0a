"""Begins and ends backward passes, and handles the gradients that the engine leaves to Python.

The engine (csrc/autograd/engine.h) has a hook on each parameter's AccumulateGrad node. It adds a plain
gradient at once on a CPU, and with others in one launch on a GPU, so that autograd stores nothing. A
`BackwardPass` describes one call of autograd's engine; re-entrant checkpointing runs such calls inside
others. This file begins and ends those that the engine leaves to Python, as docs/design.md says.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..accumulators import Accumulators, Slot
from ..accumulators.engine import BackwardPass, FallbackEngine, engine_for
from ..accumulators.in_place import Write
from ..accumulators.main_grad import is_sum, take_flag
from ..kernels import torch_state
from ..kernels.checks import GRADIENT_TYPES
from ..kernels.torch_private import current_raw_stream, will_run
from ..kernels.torch_state import on_stream, weakly
from .reasons import HOOK_AFTER_NODE, LEFT_TO_AUTOGRAD
from .registration import HookRegistry


class PostponedProduct(NamedTuple):
    """A weight-gradient product that a backward pass has postponed.

    It holds the arguments of `InPlaceWriter.write`, and the stream of the backward pass.
    """

    slot: Slot
    write: Write
    scale: float | Tensor
    stream: int


class Capture:
    """Handles the backward passes of one wrapper.

    slots: the owner shares this list, and calls `registry.refresh` after appending. policy: the
    `optimizer.accumulation.Accumulation`, which decides how the gradients of a backward pass are handled, and
    their scale. Raises ValueError as `HookRegistry` does.
    """

    def __init__(self, slots: list[Slot], accumulators: Accumulators, policy: Any) -> None:
        self.accumulators = accumulators
        self._warned = False
        self._postponed: list[PostponedProduct] | None = None
        self._policy = policy
        reference = weakref.ref(self)
        policy.shards.receiver = reference
        #: It has the hooks, and shares the state of the sums and of the window.
        self.engine = engine_for(
            accumulators.grads,
            policy.window,
            begin=weakly(self._begin),
            receive=weakly(self.receive),
            add=weakly(self._add),
            scale=weakly(self._scale),
            stored=weakly(self._add_shown_gradient),
            finish=weakly(self._finish),
        )
        policy.window.autograd_stores = isinstance(self.engine, FallbackEngine)
        accumulators.engine = self.engine
        accumulators.passes.lock = self.engine.lock
        self.engine.set_rounds_stochastically(accumulators.noise.seed is not None)
        self.engine.set_condition("sums are rounded stochastically", accumulators.noise.seed is not None)
        self.engine.set_condition("modules add to main_grad", accumulators.main_grads is not None)
        self.registry = HookRegistry(slots, accumulators, policy, self.engine)

    @property
    def bypassed(self) -> bool:
        """Whether a backward pass has bypassed the hooks. No hook clears p.grad before it or sees its end."""
        return self.engine.is_bypassed

    @property
    def postponed(self) -> list[PostponedProduct] | None:
        """Weight-gradient products that a backward pass postpones until `compute_postponed`; None if it
        postpones none.
        """
        return self._postponed

    @postponed.setter
    def postponed(self, postponed: list[PostponedProduct] | None) -> None:
        self._postponed = postponed
        self.engine.set_postpones(postponed is not None)

    # During a backward pass

    def _begin(self) -> Any:
        """Begin the running backward pass at its first gradient, and decide how its gradients are handled.

        Return its `BackwardPass`, or None to leave it to autograd. Raises RuntimeError, with nothing added,
        if the micro-batch needs a weight and has none.
        """
        if torch_state.in_compiled_autograd():
            self.engine.note_bypass()
            return None
        backwards = self.engine.backwards()
        if self.accumulators.grads.holds_uncounted and not backwards:
            self.registry.refresh()  # parameters, and these gradients with them, may have been moved
        if self.accumulators.in_place.begun:  # by an enclosing pass, or by one that has failed
            if all(map(self.engine.has_failed, backwards)):
                self.accumulators.in_place.forget()
            else:
                self._complete()
        self.registry.check_graph()
        return self._policy.begin_backward(outermost=not backwards)

    def receive(
        self, slot: Slot, gradient: Tensor | None, reason: str, is_unshared: bool, of_node: bool = True
    ) -> bool:
        """Handle a gradient that the engine leaves to Python. Return False if autograd has to store it.

        gradient: None if the backward pass has none for this parameter. reason: why, as the engine's `Reason`
        names it. is_unshared: whether only autograd's engine refers to the gradient. of_node: whether the
        parameter's AccumulateGrad node got it, and not a function's backward. What modules add to `main_grad`
        is counted when the node runs.
        """
        backward = self._enter(slot)
        if backward is None:
            return False
        if of_node and slot.main_grad is not None and take_flag(slot, gradient):
            if reason == HOOK_AFTER_NODE and not backward.ignored:
                self._check_reduced(backward, slot)
            self._note_addition(backward, slot, is_returned=gradient is not None and is_sum(slot, gradient))
            return True
        self._complete([slot])
        if not backward.captures or reason in LEFT_TO_AUTOGRAD:
            self._policy.leave_to_autograd(backward, slot)
            if reason == HOOK_AFTER_NODE:
                backward.reduced_outside = True
            elif backward.captures and self._policy.adds_after_hooks():
                self.engine.collect_after_node(slot)
            return False
        if gradient is None or backward.drops:
            return True
        backward.added = True
        is_usual = type(gradient) in GRADIENT_TYPES and gradient.layout is torch.strided
        if not is_usual:
            slot.needs_eager = True
        device, dtype, _ = slot.lane
        adder = self.accumulators.adder
        scale = self._scale(backward)
        if slot.needs_eager or gradient.dtype is not dtype or gradient.device != device:
            adder.add_eagerly(slot, gradient, scale, is_unshared=is_unshared)
        else:
            adder.add([slot], [gradient], scale)
        return True

    def _check_reduced(self, backward: Any, slot: Slot) -> None:
        """Raise RuntimeError if a reducer that the wrapper does not know would miss what a module has added.
        Without the native engine there is no way to find one.
        """
        if torch_state.process_group_up() and not self._policy.window.autograd_stores:
            backward.added = True
            raise RuntimeError(
                f"main_grad=True: a module has added the gradient of parameter {slot.name!r} to main_grad, "
                "where a reducer that the wrapper does not know, such as a DistributedDataParallel, does not "
                "read it; allowed: data_parallel="
            )

    def _note_addition(self, backward: Any, slot: Slot, *, is_returned: bool) -> None:
        """Count what a module has added to `main_grad`, unless it was inside `ignore()`. is_returned: whether
        the module has taken the sum out of p.grad and returned it.
        """
        if backward.ignored:
            return
        backward.added = True
        slot.added_by_module = True
        if is_returned:
            self.accumulators.grads.put(slot, slot.main_grad)
        else:
            self.accumulators.grads.begin_sum(slot)

    def _enter(self, slot: Slot) -> Any:
        """Return the running backward pass, which Python ends. Order the slot's sum after earlier writes."""
        backward = self.engine.enter()
        if backward is not None:
            backward.in_python = True
            self.engine.settle(slot)
        return backward

    def _add(self, backward: Any, slots: list[Slot], gradients: list[Tensor]) -> None:
        """Add gradients that have waited, of slots of one lane."""
        self.accumulators.adder.add(slots, gradients, self._scale(backward))

    def _scale(self, backward: Any) -> float | Tensor:
        """Return the factor of this pass's gradients, ready on the current stream."""
        return self._policy.scale_of(backward)

    def _add_shown_gradient(self, slot: Slot) -> None:
        """Add a gradient that the user's post-accumulate hooks have seen in p.grad, unless another thread's
        backward pass may be writing to p.grad.
        """
        backward = self.engine.current_backward()
        if backward is not None and len(self.engine.backwards()) == 1:
            self._policy.add_shown_gradient(backward, slot)

    def is_prepared_for_fsdp(self) -> bool:
        """Whether `prepare_for_fsdp` was called in the running backward pass."""
        backward = self.engine.current_backward()
        return backward is not None and backward.delivered_late

    def prepare_for_fsdp(self, slots: Sequence[Slot], *, withheld: bool) -> None:
        """Prepare p.grad of these parameters for FSDP2, which will store gradients in it during this backward
        pass. withheld: whether FSDP2 keeps the gradients and adds them to those of a later backward pass.
        """
        with self.engine.lock:
            backward = self.engine.enter()
            if backward is None:  # a pipeline's stage reduces after its backward passes
                backward = BackwardPass(captures=False, ignored=self._policy.window.ignoring)
            backward.in_python = True
            backward.delivered_late = True
            for slot in slots:
                self._policy.leave_to_autograd(backward, slot)
            self._policy.note_withheld(backward, withheld)

    def take_stored(self, slot: Slot) -> None:
        """Take a gradient that FSDP2 has stored in p.grad."""
        with self.engine.lock:
            # No hook on a module's output may have announced this backward pass.
            if not self.is_prepared_for_fsdp():
                self._policy.check_unmixed(slot)
                others = [other for other in self.registry.slots if other.sharded and other is not slot]
                self.prepare_for_fsdp(others, withheld=False)
            backward = self.engine.current_backward()
            if backward is not None:
                self._policy.take_stored(backward, slot)

    def take_in_place(
        self,
        slot: Slot,
        node: Any,
        write: Write,
        by_rows: bool = False,
        part: int | None = None,
        may_wait: bool = False,
        any_layout: bool = False,
    ) -> bool:
        """Let a module's backward add its weight's gradient to the sum, if that is safe.

        Return True if the gradient was added or is not needed. Return False if the caller must return it to
        autograd, because `torch.autograd.grad` or a hook needs the gradient itself, for example.

        node: the weight's AccumulateGrad node in the running graph, or None. write: adds the gradient. It is
        called at most once, with the accumulator, the gradient's scale, and a factor by which to multiply the
        accumulator first (0 if it holds nothing yet). by_rows, part, any_layout: as in `InPlaceWriter.write`.
        may_wait: whether `write` may also be called after the backward pass.
        """
        try:
            if node is not None and not will_run(node):
                return True
        except RuntimeError:  # torch.autograd.grad differentiates with respect to the weight
            return False
        if not self.engine.may_write(slot, node):
            return False
        with self.engine.lock:
            backward = self._enter(slot)
            if backward is None or not backward.captures:
                return False
            if backward.drops:
                return True
            backward.added = True
            scale = self._scale(backward)
            # Compiled graphs reuse the memory of their operands.
            if may_wait and self._postponed is not None and not slot.compiled:
                stream = current_raw_stream(slot.lane[0].index) if slot.on_cuda else 0
                self._postponed.append(PostponedProduct(slot, write, scale, stream))
                return True
            return self.accumulators.in_place.write(slot, write, scale, by_rows, part, any_layout)

    def will_take_in_place(self, slot: Slot, node: Any) -> bool:
        """Whether a backward may add the gradient of this parameter to the sum, and the gradient counts.

        node: as in `take_in_place`. Begins the backward pass if this is its first gradient.
        """
        try:
            if not will_run(node):
                return False
        except RuntimeError:  # torch.autograd.grad differentiates with respect to the parameter
            return False
        if self.engine.may_write(slot, node):
            backward = self.engine.enter()
            return backward is not None and backward.captures and not backward.drops
        return False

    @contextmanager
    def opened(self, slot: Slot) -> Iterator[tuple[Tensor, float | Tensor, float]]:
        """Context in which the caller adds a gradient to the slot's sum. Call it after `will_take_in_place`.

        Yields an accumulator, the gradient's scale and the accumulator's factor, as `take_in_place` passes
        them to `write`; the factor is a number. An exception in the context taints the window.
        """
        in_place = self.accumulators.in_place
        with self.engine.lock:
            backward = self._enter(slot)
            backward.added = True
            scale = self._scale(backward)
            in_place.complete([slot])
            self.accumulators.grads.begin_sum(slot)
            opened = in_place.open(slot, scale, any_layout=True)
            try:
                if opened is None:  # the user has put another kind of tensor into p.grad
                    device, _, dtype = slot.lane
                    gradient = torch.empty_strided(slot.shape, slot.strides, dtype=dtype, device=device)
                    yield gradient, 1.0, 0.0
                    self.accumulators.adder.add_eagerly(slot, gradient, scale)
                else:
                    assert not isinstance(opened.beta, Tensor)
                    yield opened.accumulator, opened.scale, opened.beta
                    in_place.close(slot, opened)
            except BaseException:
                self._policy.note_interruption()
                raise

    def compute_postponed(self, postponed: list[PostponedProduct]) -> None:
        """Compute the postponed products of a backward pass in their order, and empty the list."""
        in_place = self.accumulators.in_place
        adder = self.accumulators.adder
        postponed.reverse()
        while postponed:
            slot, write, scale, stream = postponed.pop()
            # Use the stream of the backward pass, on which the operands were allocated.
            with torch.no_grad(), on_stream(stream, slot.lane[0]) if slot.on_cuda else nullcontext():
                if not in_place.write(slot, write, scale):
                    gradient = torch.empty(slot.shape, dtype=slot.accumulate_dtype, device=slot.lane[0])
                    write(gradient, 1.0, 0.0)
                    adder.add_eagerly(slot, gradient, scale)

    def _complete(self, slots: Collection[Slot] | None = None) -> None:
        """Zero the parts of sums that modules have not written yet, of these parameters (None: all)."""
        in_place = self.accumulators.in_place
        for slot in list(in_place.begun if slots is None else slots):
            if slot in in_place.begun:
                self.engine.settle(slot)
                in_place.complete([slot])

    # The end of a backward pass

    def _finish(self, backward: Any) -> None:
        """End a backward pass: add pending gradients, and tell the policy."""
        is_awaited = backward.captures and (
            backward.delivered_late or self._policy.adds_stored_after(backward)
        )
        if backward.reduced_outside and is_awaited and not backward.follows_reducer:
            backward.follows_reducer = True  # its callback was queued after this one, so queue this one again
            self.engine.call_back(backward)
            return
        self.engine.flush()
        self._complete()
        self.engine.join()
        if len(self.engine.backwards()) > 1:
            self.drop_failed_backwards()
        with self.engine.lock:  # other threads may end passes during this call
            backward.has_ended = True
            backward.inner = not all(other.has_ended for other in self.engine.backwards())
        self._policy.end_backward(backward, self.registry.refresh, outermost=not backward.inner)
        self._drop(backward, failed=False)
        self.drop_failed_backwards()
        if backward.captures and not (backward.stored or self.engine.backwards()):
            self._let_go_on()

    def _let_go_on(self) -> None:
        """Let the engine handle the next backward passes, if they are like the last one."""
        plan = self._policy.plan()
        if plan is None:
            self.engine.drop_plan()
        else:
            self.engine.set_plan(**plan._asdict())

    def add_pending(self, slots: Sequence[Slot]) -> None:
        """Add these parameters' pending gradients of all backward passes."""
        self.engine.flush()
        self._complete(slots)
        self.engine.join()

    def _drop(self, backward: Any, *, failed: bool) -> None:
        """Forget a backward pass and its pending gradients, unless another thread has."""
        if self.engine.drop(backward):
            self._policy.forget_backward(backward, failed)
        if self.accumulators.in_place.begun:
            with self.engine.lock:  # no other pass can begin here
                if not self.engine.backwards():
                    self.accumulators.in_place.forget()

    # Between backward passes

    def pause(self) -> None:
        """Add all that waits. Python begins the next backward pass."""
        self.engine.drop_plan()
        self.engine.join()

    def warn_of_bypass(self, is_raw: bool) -> None:
        """Warn once if `step()` finds gradients in p.grad that no hook could make final. is_raw: whether
        p.grad should hold final gradients and does not.
        """
        if torch_state.traces_backward():
            self.engine.note_bypass()
        if not (is_raw and self.bypassed) or self._warned:
            return
        self._warned = True
        warnings.warn(
            "compiled autograd, or torch._dynamo.config.trace_autograd_ops, has run a backward past the "
            "hooks: until step(), p.grad holds the gradient of the last micro-batch alone, neither scaled "
            "nor summed. The update is right. Do not clip or log p.grad before step(): use max_grad_norm= "
            "and grad_norm, or leave both options off, as torch.compile does",
            stacklevel=6,
        )

    @property
    def num_updates(self) -> int:
        """Number of inner optimizer updates. Its kernels write parameters without a version change."""
        return self._policy.window.num_updates

    def drop_failed_backwards(self) -> None:
        """Forget backward passes that an exception has ended."""
        backwards = self.engine.backwards()
        if not backwards:
            return
        for backward in backwards:
            if self.engine.has_failed(backward):
                self._drop(backward, failed=True)
        if self.engine.backwards():  # these are still running, and the caller will read the sums
            self.engine.flush()
            self._complete()

    def close(self) -> None:
        """Remove the hooks for good."""
        self.registry.close()
        self.forget()

    def forget(self) -> None:
        """Drop all pending gradients."""
        for backward in self.engine.backwards():
            self._drop(backward, failed=False)
        self.engine.drop_plan()
        self._policy.shards.drop_withheld()
