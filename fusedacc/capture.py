"""Takes gradients before autograd stores them, and adds them in batches.

A pre-hook on a parameter's AccumulateGrad node receives the fresh gradient and returns `(None,)`, so autograd
stores nothing. Small gradients wait until a bucket is full or the backward ends; one pass adds them all. What
is pending belongs to the graph task (one call of the engine): re-entrant checkpointing runs tasks inside
tasks, each flushed at its own end, so that no launch ever holds a sum twice.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import hooks, observers, streams, torch_state
from .accumulators import Accumulators, GradState, Slot
from .accumulators.in_place import Write
from .arming import Arming
from .data_parallel import Reducers
from .hooks import LET_THROUGH, SWALLOWED, Bucket, Task, task_id
from .torch_state import process_group_up, raw_stream
from .window import Window


class Capture(Arming):
    """Hooks on the parameters of `slots`, and what becomes of the gradients that they take.

    Args:
        slots: the parameters; a list shared with its owner, who calls `refresh` after appending.
        window: asked for the scale, told when a backward has ended.
        accumulators: where gradients go.

    Raises:
        ValueError: a parameter is in another live wrapper.
    """

    def __init__(self, slots: list[Slot], window: Window, accumulators: Accumulators) -> None:
        self.ignoring = False
        #: Whether compiled autograd has run, which reads p.grad before any hook can clear it.
        self.compiled = False
        self._lock = threading.RLock()
        #: Whether a CUDA graph was being captured when the window began.
        self._began_in_graph = False
        #: The stream on which the unit of the sums was made, where that is a tensor on a GPU.
        self._aimed_on: torch.cuda.Stream | None = None
        self._reducers = Reducers(slots)
        super().__init__(slots, window, accumulators)

    # A backward runs

    def receive(self, slot: Slot, gradient: Tensor | None, sole: bool) -> tuple[None] | None:
        """One gradient, whatever it is: `(None,)` where it was taken, None to leave it to autograd.

        `sole`: nobody but the engine and the hook refers to it, so that nobody can change it.
        """
        if not slot.param.requires_grad:
            return LET_THROUGH  # frozen since the forward: autograd drops it
        with self._lock:
            task = self._tasks.get(task_id()) or self._begin()
        if slot.paths:
            self._taking.hand_over(slot)
        if not task.captures or slot.param._post_accumulate_grad_hooks:
            self._leave(task, slot)
            return LET_THROUGH
        if gradient is None or task.drops:
            return SWALLOWED
        plain = type(gradient) is Tensor and gradient.layout is torch.strided
        if not plain or slot.odd or gradient.dtype is not slot.lane[1]:
            if not plain:
                slot.set_odd(True)
            task.added = True
            self._flush_shared(task, [slot])
            self.accumulators.adder.add_odd(slot, gradient, self._scale_of(task))
            return SWALLOWED
        identity = task_id()
        if self._taking.adds(slot, identity, gradient):
            return SWALLOWED
        if not sole or (hooks.is_large(slot) and not self.accumulators.adder.may_adopt(slot, gradient)):
            self._flush_shared(task, [slot])
            self._add(task, [slot], [gradient])
            return SWALLOWED
        stream = raw_stream(gradient)
        bucket = task.buckets.get(slot.lane_key)
        if bucket is None:
            bucket = task.buckets[slot.lane_key] = self._taking.open_bucket(slot, identity, stream)
        elif bucket.stream != stream:
            self.flush_bucket(identity, bucket)
            bucket.stream = stream
        bucket.put(slot, slot.param, gradient, 0 if hooks.is_large(slot) else slot.nbytes)
        return SWALLOWED

    def node_of(self, slot: Slot) -> Any:
        """The AccumulateGrad node that carries the slot's hook; None where there is none."""
        return self._nodes.get(slot, (None, None))[0]

    def take_in_place(self, slot: Slot, node: Any, write: Write, by_rows: bool = False) -> bool:
        """Let a module's backward add its weight's gradient to the sum by itself, if that is all right.

        Args:
            slot: the weight's.
            node: the weight's AccumulateGrad node in the graph that runs.
            write: called at most once, with the sum, by what to multiply the gradient, and by what to
                multiply the sum first: 0 where it holds nothing yet.
            by_rows: `write` adds to some rows only, of a sum that is ready to be added to then.

        Returns:
            Whether the weight's gradient is done with: added, or wanted by nobody. Else it is to be returned
            to autograd: somebody differentiates by the weight, or looks at its gradient on the way.
        """
        param, armed = slot.param, self._nodes.get(slot)
        if (
            torch.is_grad_enabled()
            or torch.is_anomaly_enabled()  # which looks for nan in it
            or not param.requires_grad  # frozen since the forward: autograd drops its gradient
            or param._backward_hooks
            or param._post_accumulate_grad_hooks
            or slot.odd
            or armed is None
            or armed[0] is not node  # the parameter was moved or cast
        ):
            return False
        try:
            if not torch._C._will_engine_execute_node(node):
                return True
        except RuntimeError:  # torch.autograd.grad by the weight itself
            return False
        task = self._tasks.get(task_id())
        if task is None:
            with self._lock:
                task = self._begin()
        if not task.captures:
            return False
        if task.drops:
            return True
        self._taking.hand_over(slot)
        if len(self._tasks) > 1:
            self._flush_shared(task, [slot])
        if slot.on_cuda:
            streams.order(task, slot)
        task.added = True
        return self.accumulators.in_place.write(slot, write, self._scale_of(task), by_rows)

    def _begin(self) -> Task:
        """The first gradient of a graph task: decide what is done with all of them.

        Raises RuntimeError where the micro-batch needs a weight and has none, before anything is added.
        """
        identity = task_id()
        if identity == -1 or torch.compiler.is_compiling():
            self.compiled = True  # it traces the hooks, and has no end to call back at
            return Task(captures=False)
        window = self.window
        self._check_graph()
        self._taking.add_later()  # another task's hooks must not add to sums that change here
        if self.ignoring:
            self._make_room()
            self.accumulators.grads.drop_spent()
            task = Task(captures=False, ignored=True)
        else:
            scale = window.base_scale
            differentiable, reduced = torch.is_grad_enabled(), process_group_up()
            task = Task(not (differentiable or reduced), scale, drops=window.leaves_out)
            task.reducer = "ahead" if reduced and not differentiable else ""
            if reduced and window.counted and not window.micro.deferred:
                task.watch = self._reducers.watch()
            if window.full:
                window.restart()  # its update has failed, and nobody has retried it or cleared the gradients
            if not window.counted:
                self.reclaim()
            elif window.empty:
                self.accumulators.grads.make_private()
            if window.counted and window.will_update:
                self._aim(window.target(ending=True))  # the last additions bring the sums to it
        norms = self.accumulators.norms
        # Where p.grad shows the final gradient, users may write to it in ways that leave no trace.
        norms.norm_type = norms.wanted if window.private and window.will_update and not task.ignored else None
        self._tasks[identity] = task
        self._call_back(identity, task)
        if task.captures:
            self._taking.begin(identity, task, len(self._tasks) == 1, self._scale_of(task))
        return task

    def _check_graph(self) -> None:
        """Raise RuntimeError where a CUDA graph would hold a part of a window, or nodes of another stream."""
        window, inside = self.window, torch_state.capturing()
        if inside and not self._armed_in_graph:
            raise RuntimeError(
                "this CUDA graph was begun without the optimizer's knowledge: call optimizer.zero_grad() "
                "inside the capture, before the first forward"
            )
        if window.counted and not window.empty and inside != self._began_in_graph:
            raise RuntimeError(
                f"a CUDA graph must hold whole windows: this one has {window.micro_step} of {window.steps} "
                f"micro-batches {'outside' if inside else 'inside'} the capture, and their count would be "
                "replayed with it"
            )
        self._began_in_graph = inside

    def _make_room(self) -> None:
        """Take in what autograd has stored, before an ignored backward adds to it."""
        window = self.window
        if not window.counted:
            self.reclaim()
            return
        if window.micro.deferred if window.micro.ran else window.unsynchronised:
            window.check_synchronised("a backward inside ignore() would be mixed with them")
        if window.micro.ran:
            self.collect(self.slots)

    def _call_back(self, identity: int, task: Task) -> None:
        """Have the engine call `finish` at the end of the graph task at hand."""
        callback = functools.partial(_finish, weakref.ref(self), identity)
        task.callback = weakref.ref(callback)
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _leave(self, task: Task, slot: Slot) -> None:
        """Let autograd store this gradient, beside nothing of ours."""
        if task.ignored and slot.grad_state is GradState.PUBLISHED:
            task.hidden.append(slot)
            self.accumulators.grads.stash(slot)
        elif not task.ignored and (self.window.counted or self.window.weighs):
            self.accumulators.grads.begin_stock(slot)
        task.stored.append(slot)

    def _add(self, task: Task, slots: list[Slot], gradients: list[Tensor], adoptable: bool = False) -> None:
        task.added = True
        self.accumulators.adder.add(slots, gradients, self._scale_of(task), adoptable)

    def _scale_of(self, task: Task) -> float | Tensor:
        """By what the gradients of a graph task are multiplied, ready on the current stream."""
        if self._aimed_on is not None and isinstance(self.window.factor, Tensor):
            stream = torch.cuda.current_stream(self._aimed_on.device)
            if stream != self._aimed_on:
                stream.wait_stream(self._aimed_on)
        return task.scale_in(self.window.factor)

    def flush_bucket(self, identity: int, bucket: Bucket) -> None:
        """Add what a bucket of this graph task holds, after what enclosing tasks hold for its parameters."""
        task = self._tasks[identity]
        self._flush_shared(task, bucket.slots())
        self._add_bucket(task, bucket)

    def _add_bucket(self, task: Task, bucket: Bucket) -> None:
        with self._lock:
            slots, gradients, adoptable = bucket.take()
        if not slots:
            return
        for slot in slots:
            if slot.paths:  # a module may have made its sum, in memory that held nothing
                self._taking.hand_over(slot)
        if not slots[0].on_cuda:
            self._add(task, slots, gradients, adoptable)
            return
        with streams.on(bucket.stream, slots[0].lane[0]):
            for slot in slots:
                if slot.paths:
                    streams.order(task, slot)
            self._add(task, slots, gradients, adoptable)

    def finish(self, identity: int) -> None:
        """The end of a graph task: add what is pending, and deliver if this was the window's last."""
        task = self._tasks.get(identity)
        if task is None:
            return
        window = self.window
        delivers = window.counted and window.will_update and not window.micro.deferred and not task.ignored
        if delivers and task.reducer == "ahead":  # it has queued its callback after ours
            task.reducer = "done"
            self._call_back(identity, task)
            return
        self._taking.add_later()
        if not task.ignored:
            for bucket in task.buckets.values():
                self.flush_bucket(identity, bucket)
        streams.join(task)
        if not task.ignored:
            if task.watch:
                self._reducers.check(task.watch, task.stored)
            window.micro.ran = True
            if delivers and window.tainted is None:
                if task.captures or task.reducer:
                    self.collect(task.stored)
                if not window.private:
                    self.deliver()
        self._drop(identity)
        if task.ignored:
            self._mark_ignored(task)
        self.settle()

    def _flush_shared(self, inner: Task, slots: Sequence[Slot]) -> None:
        """Add what enclosing tasks hold for these parameters first, in autograd's order.

        Tasks of other threads may come and go meanwhile.
        """
        if len(self._tasks) == 1:
            return
        for task in list(self._tasks.values()):
            for bucket in list(task.buckets.values()) if task is not inner else ():
                if not set(slots).isdisjoint(bucket.slots()):
                    self._add_bucket(task, bucket)

    def _drop(self, identity: int) -> Task | None:
        """Forget a graph task and whatever it still holds; None if another thread has."""
        task = self._tasks.pop(identity, None)
        if task is not None:
            self._taking.end(identity, task)
        return task

    # Between backwards

    def settle(self) -> None:
        """Forget backwards that an exception has ended; taint the window where they have added something."""
        for identity in [key for key, task in list(self._tasks.items()) if task.callback() is None]:
            task = self._drop(identity)
            if task is None:
                continue
            if task.ignored:
                self._mark_ignored(task)
            elif task.added or any(slot.param.grad is not None for slot in task.stored):
                self.window.tainted = "an exception has interrupted a backward"

    def _mark_ignored(self, task: Task) -> None:
        self.accumulators.grads.ignore_present([slot for slot in task.stored if slot not in task.hidden])
        for slot in task.hidden:
            self.accumulators.grads.unstash(slot)

    def collect(self, slots: Sequence[Slot]) -> None:
        """Counted loop: add what autograd has stored as this micro-batch's gradient."""
        if slots is self.slots and not self._taking.any_gradient(slots):
            return
        present = [slot.param.grad for slot in slots]
        foreign = []
        for slot, gradient in zip(slots, present, strict=True):
            if gradient is not None and slot.is_foreign(gradient):
                foreign.append((slot, gradient.detach()))
                slot.param.grad = None
        if not foreign:
            return
        self.refresh()  # a hook that did not fire may belong to a node that is gone
        self.accumulators.grads.drop_spent()  # no backward of ours has begun this window
        window = self.window
        if not window.leaves_out:
            for slot, gradient in foreign:
                if gradient.layout is not torch.strided:
                    slot.set_odd(True)
            with torch.no_grad(), observers.phase("accumulate"):
                owners, gradients = zip(*foreign, strict=True)
                self.accumulators.adder.add_mixed(owners, gradients, window.base_scale * window.factor)
        window.micro.ran = True

    def reclaim(self) -> None:
        """Manual loop with weights: take in what autograd has stored."""
        if self.window.weighs:
            with torch.no_grad(), observers.phase("accumulate"):
                window = self.window
                stored = self.accumulators.grads.end_stock(self.slots)
                if stored and not window.leaves_out:
                    owners, gradients = zip(*stored, strict=True)
                    scale = window.base_scale * window.factor
                    self.accumulators.adder.add_mixed(owners, gradients, scale)

    def deliver(self, ending: bool = True) -> bool:
        """Bring the sums to their final scale and put them into p.grad; False where that is not known yet."""
        window = self.window
        target = window.target(ending)
        if target is None:
            return False
        with torch.no_grad():
            self._aim(target)
            self._settle()
            self.accumulators.publish()
        return True

    def _aim(self, target: float | Tensor | None) -> None:
        """Let the sums be in this unit from now on: those that there are owe the ratio. None: not known."""
        window = self.window
        if target is None or target is window.factor:
            return
        if isinstance(target, Tensor) or isinstance(window.factor, Tensor) or target != window.factor:
            self.accumulators.rescaler.defer(target / window.factor)
            window.factor = target
            if isinstance(target, Tensor) and target.is_cuda:
                self._aimed_on = torch.cuda.current_stream(target.device)

    def _settle(self) -> None:
        """Multiply the sums by what they still owe."""
        if self.accumulators.deferred:
            self.window.tainted = "an exception has interrupted the scaling of the sums"
            self.accumulators.rescaler.apply()
            self.window.tainted = None

    def conclude(self, partial: bool = False) -> float | Tensor | None:
        """Put the sums of a window that ends into p.grad, and leave their final scale to the update.

        Returns by what they are still to be multiplied; None where that is not known, all weights being 0.
        """
        window = self.window
        target = window.target(False, partial)
        if target is None:
            return None
        with torch.no_grad():
            self._settle()
            self.accumulators.publish()
        known = not (isinstance(target, Tensor) or isinstance(window.factor, Tensor))
        return 1.0 if known and target == window.factor else target / window.factor

    def forget(self) -> None:
        """Drop what is pending."""
        for identity in list(self._tasks):
            self._drop(identity)


def _finish(capture: weakref.ref, identity: int) -> None:
    owner = capture()
    if owner is not None:
        owner.finish(identity)
