"""Takes gradients before autograd stores them, and adds them in batches.

A pre-hook on a parameter's AccumulateGrad node receives the new gradient and returns `(None,)`, so autograd
stores nothing. Small gradients wait in a bucket until it is full or the backward pass ends. One pass then
adds them all. On a CPU with native hooks only a window's first gradients wait: later ones are added
immediately (`NativeHooks`). Pending gradients belong to a graph task (one call of the engine). Re-entrant
checkpointing runs tasks inside tasks. Each task is flushed at its end, so no launch adds to the same sum
twice.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..accumulators import Accumulators, Slot
from ..accumulators.in_place import Write
from ..kernels import launch_events, torch_state
from ..kernels.torch_state import raw_stream, weakly
from . import eligibility, graph_task
from .eligibility import Taker
from .graph_task import Bucket, GraphTask
from .middle import Assumptions, Attribute, LeftToPython, Owners
from .native_hooks import hooks_for
from .python_hooks import LET_THROUGH, SWALLOWED, task_id
from .registration import HookRegistry


class Product(NamedTuple):
    """A weight-gradient product that a backward pass has postponed.

    It holds the arguments of `InPlaceWriter.write`, and the stream of the backward pass.
    """

    slot: Slot
    write: Write
    scale: float | Tensor
    stream: int


class Capture:
    """Delivers gradients to accumulators, and reports when a backward pass begins and ends.

    slots: the owner shares this list, and calls `registry.refresh` after appending. policy: the
    `optimizer.accumulation.Accumulation`, which decides how the gradients of a backward pass are handled, and
    their scale. Raises ValueError as `HookRegistry`.
    """

    def __init__(self, slots: list[Slot], accumulators: Accumulators, policy: Any) -> None:
        self.accumulators = accumulators
        #: Whether a backward pass has bypassed the hooks. No hook clears p.grad before it or sees its end.
        self.bypassed = False
        self._warned = False
        #: Weight-gradient products that a backward pass postpones; `do_products` computes them. None: nothing
        #: is postponed.
        self.undone: list[Product] | None = None
        self._policy = policy
        #: The thread that has ended the last backward pass that Python has handled.
        self._thread: int | None = None
        self._lock = threading.RLock()
        #: Represents a graph task without pending gradients: at its end only the window has work to do.
        self._ordinary = GraphTask(captures=True)
        self._ordinary.added = True
        self._tasks: dict[int, GraphTask] = {}
        self.hooks = hooks_for(accumulators)
        reference = weakref.ref(self)
        policy.shards.receiver = reference
        self.registry = HookRegistry(slots, accumulators, policy, self.hooks, self._tasks, reference)

    def run_middle_natively(self, inner: Optimizer, parameters: Any, assumptions: Assumptions) -> None:
        """Let native code handle micro-batches in the middle of a window while its assumptions, and this
        object's, hold. inner: the optimizer, whose groups have the parameters. parameters: the parameter set.
        """
        is_false: list[Attribute] = [
            (self, "bypassed"),
            (self, "_tasks"),
            (launch_events, "watching"),
            (self.registry, "closed"),
            (self.registry, "reshaped"),
            (self.registry, "on_delivery"),
        ]
        owners = Owners(
            self._policy.window,
            inner,
            parameters,
            self.registry,
            weakly(self.finish),
            weakly(self.finish_first_or_last),
        )
        self.hooks.run_middle_natively(owners, assumptions._replace(is_false=is_false + assumptions.is_false))

    def take_over_tasks(self) -> dict[int, GraphTask]:
        """Return the running backward passes, by identity, and take over the one that native code runs.

        Failed ones remain until `drop_failed_backwards`. Read `_tasks` itself only where a backward pass that
        native code runs may go on without Python, or where Python has just begun or ended one.
        """
        if self.hooks.middle.runs:
            with self._lock:
                task = self._policy.middle_task()
                identity = self.hooks.take_over(task)
                if identity is not None:
                    self._tasks.setdefault(identity, task)
                    self.hooks.middle.let_go()
        return self._tasks

    def stop_adding(self) -> None:
        """Stop native code from adding in the running backward passes, and note what it has added."""
        if self.take_over_tasks():
            self.hooks.stop_adding()

    # During a backward pass

    def receive(self, slot: Slot, gradient: Tensor | None, sole: bool) -> tuple[None] | None:
        """Handle a gradient that has arrived at a hook. Return `(None,)` if it was taken, or None to leave it
        to autograd.

        gradient: of any kind; None if the backward pass has none for this parameter. sole: whether only the
        engine and the hook refer to it, so no other code can change it.
        """
        case = eligibility.of_gradient(slot, gradient)
        taker = case.taker
        if taker is Taker.NOBODY:
            return LET_THROUGH
        with self._lock:
            task = self.take_over_tasks().get(task_id()) or self._begin()
        if slot.paths and slot.native_hook is not None:
            self.hooks.release_to_python(slot)
        self._complete(task, [slot])
        if not task.captures or taker is Taker.AUTOGRAD:
            self._policy.leave_to_autograd(task, slot)
            if case is eligibility.REDUCED_OUTSIDE:
                task.reduced_outside = True
            elif task.captures and self._policy.adds_after_hooks():
                self.registry.add_after_hooks(slot, task_id())
            return LET_THROUGH
        if taker is Taker.DONE or gradient is None or task.drops:
            return SWALLOWED
        if taker is Taker.TORCH:
            if case.lasts:
                slot.set_needs_eager(True)
            task.added = True
            self._flush_shared(task, [slot])
            self.accumulators.adder.add_eagerly(slot, gradient, self._scale(task), is_unshared=sole)
            return SWALLOWED
        identity = task_id()
        adder = self.accumulators.adder
        if slot.native_hook is not None and self.hooks.add_now(slot, identity, gradient):
            return SWALLOWED
        waits = not slot.is_large or (slot.accumulator is None and adder.may_adopt(slot, gradient))
        if not (sole and waits):
            self._flush_shared(task, [slot])
            self._add(task, [slot], [gradient])
            return SWALLOWED
        stream = raw_stream(gradient)
        bucket = task.buckets.get(slot.lane_key)
        if bucket is None:
            bucket = self.hooks.open_bucket(slot, identity, stream)
            task.buckets[slot.lane_key] = bucket
        elif bucket.stream != stream:
            self.flush_bucket(identity, bucket)
            bucket.stream = stream
        bucket.put(slot, slot.param, gradient, 0 if slot.is_large else slot.nbytes)
        return SWALLOWED

    def add_shown_gradient(self, slot: Slot) -> None:
        """Add a gradient that the user's post-accumulate hooks have seen in p.grad, unless another thread's
        backward pass may be writing to p.grad.
        """
        with self._lock:
            task = self.take_over_tasks().get(task_id())
            if task is not None and len(self._tasks) == 1:
                self._policy.add_shown_gradient(task, slot)

    def has_entered(self) -> bool:
        """Whether `enter` was called in the running backward pass."""
        task = self.take_over_tasks().get(task_id())
        return task is not None and task.delivered_late

    def enter(self, slots: Sequence[Slot], *, withheld: bool) -> None:
        """Prepare p.grad of these parameters for FSDP2, which will store gradients in it during this backward
        pass. withheld: whether FSDP2 keeps the gradients and adds them to those of a later backward pass.
        """
        with self._lock:
            task = self.take_over_tasks().get(task_id()) or self._begin()
            task.delivered_late = True
            for slot in slots:
                self._policy.leave_to_autograd(task, slot)
            self._policy.note_withheld(task, withheld)

    def take_stored(self, slot: Slot) -> None:
        """Take a gradient that FSDP2 has stored in p.grad."""
        with self._lock:
            if not self.has_entered():  # no hook on a module's output has announced this backward pass
                self._policy.check_unmixed(slot)
                others = [other for other in self.registry.slots if other.sharded and other is not slot]
                self.enter(others, withheld=False)
            task = self.take_over_tasks().get(task_id())
            if task is not None:
                self._policy.take_stored(task, slot)

    def take_in_place(
        self,
        slot: Slot,
        node: Any,
        write: Write,
        by_rows: bool = False,
        part: int | None = None,
        may_wait: bool = False,
    ) -> bool:
        """Let a module's backward add its weight's gradient to the sum, if that is safe.

        Return True if the gradient was added or is not needed. Return False if the caller must return it to
        autograd, because `torch.autograd.grad` or a hook needs the gradient itself.

        node: the weight's AccumulateGrad node in the running graph. write: adds the gradient. It is called at
        most once, with the accumulator, the gradient's scale, and a factor by which to multiply the
        accumulator first (0 if it holds nothing yet). by_rows, part: as in `InPlaceWriter.write`. may_wait:
        whether `write` may also be called after the backward pass.
        """
        param = slot.param
        hooked = self.registry.nodes.get(slot)
        try:
            if node is not None and not torch._C._will_engine_execute_node(node):
                return True
        except RuntimeError:  # torch.autograd.grad differentiates with respect to the weight
            return False
        if (
            torch.is_grad_enabled()
            or torch.is_anomaly_enabled()  # anomaly mode checks the gradient for nan
            or not param.requires_grad  # frozen after the forward pass: autograd drops its gradient
            or param._backward_hooks
            or param._post_accumulate_grad_hooks
            or slot.needs_eager
            or slot.is_reduced_outside()
            or hooked is None
            or hooked.node is not node  # the parameter was moved or cast
        ):
            return False
        task = self.take_over_tasks().get(task_id())
        if task is None:
            with self._lock:
                task = self._begin()
        if not task.captures:
            return False
        if task.drops:
            return True
        if slot.native_hook is not None:
            self.hooks.release_to_python(slot)
        if len(self.take_over_tasks()) > 1:
            self._flush_shared(task, [slot])
        if slot.on_cuda:
            graph_task.wait_for_last_writer(task, slot)
        task.added = True
        if may_wait and self.undone is not None and not slot.compiled:  # compiled graphs reuse their memory
            stream = torch._C._cuda_getCurrentRawStream(slot.lane[0].index) if slot.on_cuda else 0
            self.undone.append(Product(slot, write, self._scale(task), stream))
            return True
        return self.accumulators.in_place.write(slot, write, self._scale(task), by_rows, part)

    def do_products(self, undone: list[Product]) -> None:
        """Compute the postponed products of a backward pass in their order, and empty the list."""
        in_place = self.accumulators.in_place
        adder = self.accumulators.adder
        undone.reverse()
        while undone:
            slot, write, scale, stream = undone.pop()
            # Use the stream of the backward pass, on which the operands were allocated.
            on_stream = graph_task.on_stream(stream, slot.lane[0]) if slot.on_cuda else nullcontext()
            with torch.no_grad(), on_stream:
                if not in_place.write(slot, write, scale):
                    gradient = torch.empty(slot.shape, dtype=slot.accumulate_dtype, device=slot.lane[0])
                    write(gradient, 1.0, 0.0)
                    adder.add_eagerly(slot, gradient, scale)

    def begin_natively(self) -> bool:
        """Begin the running graph task, before it has delivered a gradient. Return whether native code may
        add its gradients to sums that are ready for it.
        """
        with self._lock:
            return self.hooks.adds_in(self.take_over_tasks().get(task_id()) or self._begin())

    def _begin(self) -> GraphTask:
        """Begin a graph task at its first gradient, and decide how its gradients are handled. Raises
        RuntimeError, with nothing added, if the micro-batch needs a weight and has none.
        """
        if torch_state.in_compiled_autograd():
            self.bypassed = True
            return GraphTask(captures=False, ignored=self._policy.window.ignoring)
        identity = task_id()
        if self.accumulators.grads.holds_uncounted and not self._tasks:
            self.registry.refresh()  # parameters, and these gradients with them, may have been moved
        if self.accumulators.in_place.begun:  # by an enclosing task, or by one that has failed
            running = [task for task in list(self.take_over_tasks().values()) if not task.has_failed]
            if running:
                self._complete(running[0])
            else:
                self.accumulators.in_place.forget()
        self.registry.check_graph()
        self.hooks.stop_adding()  # another task's hooks must not add to accumulators that change here
        task = self._policy.begin_backward(outermost=len(self.take_over_tasks()) == 0)
        self._tasks[identity] = task  # stops native code from beginning other tasks
        if len(self.take_over_tasks()) > 1:
            self.hooks.stop_adding()
        self._call_back(identity, task)
        if task.captures:
            # Native code cannot postpone products.
            alone = len(self.take_over_tasks()) == 1 and self.undone is None
            self.hooks.begin(identity, task, self._scale(task), alone=alone)
        return task

    def _call_back(self, identity: int, task: GraphTask) -> None:
        """Have the engine call `finish` at the end of the running graph task."""
        callback = functools.partial(weakly(self.finish), identity)
        task.callback = weakref.ref(callback)
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _scale(self, task: GraphTask) -> float | Tensor:
        """Return the scale of this task's gradients, ready on the current stream."""
        return self._policy.scale_of(task) if task.host_scale is None else task.host_scale

    def _add(
        self, task: GraphTask, slots: list[Slot], gradients: list[Tensor], adoptable: bool = False
    ) -> None:
        task.added = True
        self.accumulators.adder.add(slots, gradients, self._scale(task), adoptable)

    def _complete(self, task: GraphTask, slots: Collection[Slot] | None = None) -> None:
        """Zero the parts of sums that modules have not written yet, of these parameters (None: all)."""
        in_place = self.accumulators.in_place
        if not in_place.begun:
            return
        for slot in list(in_place.begun if slots is None else slots):
            if slot.on_cuda and slot in in_place.begun:
                graph_task.wait_for_last_writer(task, slot)
        in_place.complete(slots)

    def flush_bucket(self, identity: int, bucket: Bucket) -> None:
        """Add a bucket's gradients, after enclosing tasks' gradients of the same parameters."""
        task = self.take_over_tasks()[identity]
        self._flush_shared(task, bucket.slots())
        self._add_bucket(task, bucket)

    def _add_bucket(self, task: GraphTask, bucket: Bucket) -> None:
        with self._lock:
            slots, gradients, adoptable = bucket.take()
        if not slots:
            return
        for slot in slots:
            if slot.paths and slot.native_hook is not None:  # a module may have begun its sum in empty memory
                self.hooks.release_to_python(slot)
        if not slots[0].on_cuda:
            self._add(task, slots, gradients, adoptable)
            return
        with graph_task.on_stream(bucket.stream, slots[0].lane[0]):
            for slot in slots:
                if slot.paths:
                    graph_task.wait_for_last_writer(task, slot)
            self._add(task, slots, gradients, adoptable)

    def finish(self, identity: int) -> None:
        """End a graph task: add pending gradients, and tell the policy."""
        task = self.take_over_tasks().get(identity)
        if task is None:
            return
        is_awaited = task.captures and (task.delivered_late or self._policy.collects_after(task))
        if task.reduced_outside and is_awaited and not task.follows_reducer:
            task.follows_reducer = True  # its callback was queued after this one, so queue this one again
            self._call_back(identity, task)
            return
        self.hooks.stop_adding()
        if not task.ignored:
            for bucket in task.buckets.values():
                self.flush_bucket(identity, bucket)
        self._complete(task)
        graph_task.wait_for_all_writers(task)
        self.hooks.join(is_last=len(self._tasks) == 1)
        if len(self._tasks) > 1:
            self.drop_failed_backwards()
        with self._lock:  # other threads may end tasks during this call
            self._note_thread()
            task.has_ended = True
            task.inner = not all(other.has_ended for other in self._tasks.values())
        self._policy.end_backward(task, self.registry.refresh, outermost=not task.inner)
        self._drop(identity, failed=False)
        self.drop_failed_backwards()
        self._release_shown()
        if task.captures and not (task.stored or self._tasks):
            self._prepare_next()

    def finish_first_or_last(self, scale: float, added: list[int], buckets: list[Bucket]) -> None:
        """End a window's first or last backward pass, which native code began. Arguments: as in `Owners`."""
        self._note_thread()
        try:
            self.hooks.note_added(added)
            for bucket in buckets:
                slots, gradients, adoptable = bucket.take()
                self.accumulators.adder.add(slots, gradients, scale, adoptable)
            self._policy.end_backward(self._ordinary, self.registry.refresh, outermost=True)
        except BaseException:
            self._policy.forget_backward(self._ordinary, failed=True)
            raise
        self._release_shown()
        self._prepare_next()

    def _note_thread(self) -> None:
        """Record the thread that ends a backward pass, which is the one that has called it."""
        thread = threading.get_ident()
        self._policy.has_threads |= self._thread not in (None, thread)
        self._thread = thread

    def _release_shown(self) -> None:
        """Drop native references to the tensors in p.grad, so that `swap_tensors` accepts them."""
        if self.accumulators.grads.exposed:
            self.hooks.release_sums()

    def _prepare_next(self) -> None:
        """Let native code handle the next backward passes, if they are like the last one."""
        middle = self._policy.middle()
        if middle is not None:
            self.hooks.prepare_next(middle)

    def _flush_shared(self, inner: GraphTask, slots: Sequence[Slot]) -> None:
        """Add what enclosing tasks hold for these parameters first, in the order of autograd.

        Other threads may begin and end tasks during this call.
        """
        if len(self.take_over_tasks()) == 1:
            return
        outer = [task for task in list(self.take_over_tasks().values()) if task is not inner]
        for task in outer:
            for bucket in list(task.buckets.values()):
                if not set(slots).isdisjoint(bucket.slots()):
                    self._add_bucket(task, bucket)

    def add_pending(self, slots: Sequence[Slot]) -> None:
        """Add these parameters' pending gradients of all backward passes, and stop native adding to them."""
        slots_to_add = set(slots)
        for task in list(self.take_over_tasks().values()):
            for bucket in list(task.buckets.values()):
                if not slots_to_add.isdisjoint(bucket.slots()):
                    self._add_bucket(task, bucket)
            self._complete(task, slots)
        for slot in slots:
            if slot.native_hook is not None:
                self.hooks.release_to_python(slot)

    def _drop(self, identity: int, *, failed: bool) -> None:
        """Forget a graph task and its pending gradients, unless another thread has."""
        task = self.take_over_tasks().pop(identity, None)
        if task is not None:
            self.hooks.end(identity, task)
            if not self._tasks:
                self.hooks.join(is_last=True)
            self._policy.forget_backward(task, failed)
        if self.accumulators.in_place.begun:
            with self._lock:  # no other task can begin here
                if not self.take_over_tasks():
                    self.accumulators.in_place.forget()

    # Between backward passes

    def prepare_first(self) -> None:
        """Let native code begin the next window's first backward pass. Called after a window was emptied."""
        first = None if self._tasks else self._policy.first()
        if first is not None:
            self.hooks.prepare_first(first)

    def note_stored(self, is_raw: bool) -> None:
        """Warn once if `step()` finds gradients in p.grad that no hook could make final. is_raw: whether
        p.grad should hold final gradients and does not.
        """
        self.bypassed = self.bypassed or torch_state.traces_backward()
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
        tasks = self.take_over_tasks()
        if not tasks:
            return
        for identity in [key for key, task in list(tasks.items()) if task.has_failed]:
            self._drop(identity, failed=True)
        for task in list(self.take_over_tasks().values()):
            self._complete(task)  # this pass is still running, and the caller will read the sums

    def close(self) -> None:
        """Remove the hooks for good."""
        self.registry.close()
        self.forget()
        # Native code refers to this object, and the garbage collector does not see that.
        self.hooks.middle = LeftToPython()

    def forget(self) -> None:
        """Drop all pending gradients."""
        for identity in list(self.take_over_tasks()):
            self._drop(identity, failed=False)
        self._policy.shards.drop_withheld()
