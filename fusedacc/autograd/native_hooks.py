"""Native hooks, which capture gradients without running Python, in front of the Python hooks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..accumulators import Accumulators, Slot
from ..accumulators.param import GradState
from ..kernels import launch_events, native_module
from ..kernels.dtypes import is_deferrable
from ..kernels.torch_state import weakly
from . import python_hooks
from .graph_task import GraphTask
from .middle import Assumptions, First, Middle, Owners, SumRecords
from .python_hooks import PythonHooks

#: Takes the native index of a removed slot. It has no accumulator.
_NOBODY = Slot(torch.empty(0, device="cpu"), -1, "", None)


class NativeHooks(PythonHooks):
    """Native hooks in front of the Python hooks, which get all gradients that are not ordinary.

    On a CPU a gradient is best added while it is still in the cache, and on a GPU many with one launch.
    Native hooks do so (`ImmediateAdder` in csrc/autograd/immediate_add.h) if only acc = beta * acc + scale *
    gradient is needed, rounded to nearest. Other gradients wait in buckets.
    """

    def __init__(self, accumulators: Accumulators, native: Any) -> None:
        super().__init__(accumulators)
        self._native = native
        #: Whether some parameters are, or were, on a GPU.
        self._on_gpu = False
        #: Whether native code can run the backend of a lane, by the lane's key.
        self._native_lanes: dict[int, bool] = {}
        #: The native index of each slot whose gradients may be added immediately, and the slots by it. (The
        #: number in a `Slot` is another one, for noise.)
        self._native_index: dict[Slot, int] = {}
        self._slots_by_index: list[Slot] = []
        self._free_indices: list[int] = []
        self._parameters: list[Tensor] = []
        #: Held while `_task` changes, because closing `ImmediateAdder` lets other threads run.
        self._lock = threading.RLock()
        #: The task whose gradients are added immediately.
        self._task: GraphTask | None = None
        #: The factor of gradients for which native code knows the buckets of all lanes.
        self._lanes_for: float | None = None
        self._new_buckets = native.BucketMap
        self._tasks = native.KnownTasks()
        self._direct = native.ImmediateAdder(native_module.add_flat(), python_hooks.BUCKET_BYTES)

    def run_middle_natively(self, owners: Owners, assumptions: Assumptions) -> None:
        """Let native code handle micro-batches in the middle of a window while the assumptions hold."""
        records = SumRecords(
            self._accumulators.grads,
            self._accumulators.deferred,
            self._slots_by_index,
            GradState.NOT_OURS,
            GradState.PUBLISHED,
        )
        note_added = weakly(self.note_added)  # a sum gets its deferred scale only once
        self.middle = self._native.MiddleOfWindow(
            owners, note_added, records, assumptions, self._direct, self._tasks
        )

    def _new_bucket(self, slot: Slot, stream: int) -> Any:
        return self._native.Bucket(stream, python_hooks.bucket_bytes(slot))

    def look_at(self, params: list[Tensor]) -> Any:
        """Return a snapshot of the parameters' memory, dtype, shape and `requires_grad`.

        Its method `hold(params)` tells whether nothing has changed.
        """
        return self._native.SeenParameters.look_at(params)

    def attach(self, slot: Slot, node: Any) -> None:
        """Put a native hook before the Python hook of the slot's AccumulateGrad node."""
        index = self._index_of(slot) if self._is_native(slot) else -1
        self._on_gpu = self._on_gpu or slot.on_cuda
        slot.native_hook = self._native.attach(
            node,
            slot,
            index,
            slot.nbytes,
            slot.is_large,
            slot.may_be_reduced_outside,
            slot.accumulate_dtype,
            self._direct,
            self.buckets_for(slot),
            self._tasks,
        )
        slot.set_needs_eager(slot.needs_eager)
        self._forget_known()

    def _is_native(self, slot: Slot) -> bool:
        """Whether native code can run the backend that adds the slot's gradients."""
        is_native = self._native_lanes.get(slot.lane_key)
        if is_native is None:
            is_native = self._accumulators.passes.select(slot.lane).backend.name in ("cpu", "cuda")
            self._native_lanes[slot.lane_key] = is_native
        return is_native

    def choose_again(self) -> None:
        """Leave the gradients of lanes to Python whose backend has failed its self-test."""
        self._native_lanes.clear()
        for slot, index in list(self._native_index.items()):
            if not self._is_native(slot):
                del self._native_index[slot]
                # The parameter's hook still uses the index, so `_index_of` must not give it to another slot.
                self._slots_by_index[index] = _NOBODY
        self._forget_known()

    def _forget_known(self) -> None:
        """Discard loaded accumulators, because something has changed."""
        self._lanes_for = None
        self._direct.skip(-1)
        self.middle.disarm()

    def _index_of(self, slot: Slot) -> int:
        index = self._native_index.get(slot)
        if index is None:
            index = self._free_indices.pop() if self._free_indices else len(self._slots_by_index)
            self._slots_by_index[index : index + 1] = [slot]
            self._native_index[slot] = index
        return index

    def forget(self, slots: Sequence[Slot]) -> None:
        """Forget slots whose hooks were removed."""
        self._parameters = []
        self._forget_known()
        for slot in slots:
            index = self._native_index.pop(slot, None)
            if index is not None:
                self._slots_by_index[index] = _NOBODY
                self._free_indices.append(index)

    def detach(self, slot: Slot) -> None:
        """Deactivate the native hook, so that only the Python hook runs."""
        if slot.native_hook is not None:
            slot.native_hook.active = False
            slot.native_hook = None

    def any_gradient(self) -> bool:
        slots = self._accumulators.slots
        if len(self._parameters) != len(slots):
            self._parameters = [slot.param for slot in slots]
        return self._native.any_gradient(self._parameters)

    def begin(self, identity: int, task: GraphTask, scale: float | Tensor, *, alone: bool) -> None:
        """Begin a graph task at its first gradient. alone: whether no other task runs."""
        self.middle.disarm()
        # From now on the native hooks let absent gradients of this task go without a call of Python.
        self._tasks.add(identity)
        if alone and not task.drops and self._may_add(scale):
            with self._lock:
                if not self._load():
                    return
                self._task = task
                self._direct.open(identity, scale)

    def adds_in(self, task: GraphTask) -> bool:
        """Whether gradients of this graph task may be added immediately."""
        return self._task is task

    def _may_add(self, scale: float | Tensor) -> bool:
        """Whether gradients may be added immediately, as far as is known before the first one."""
        needs_more = launch_events.watching or self._accumulators.noise.seed is not None
        return bool(self._native_index) and not needs_more and not isinstance(scale, Tensor)

    def _load(self) -> bool:
        """Load the current accumulators into native code, or return False if there are none yet."""
        accumulators = self._accumulators
        grads = accumulators.grads
        changes = accumulators.deferred.scales or grads.exposed
        if changes or not self._direct.has(grads.generation):
            slots = accumulators.slots
            if (
                not (grads.exposed or accumulators.in_place.any_written)
                and slots[0].accumulator is None
                and slots[-1].accumulator is None
            ):
                return False  # the window's first backward pass
            addable, betas = accumulators.in_place.addable(self._slots_by_index)
            self._direct.load(addable, betas, grads.exposed, grads.generation)
        return True

    def prepare_next(self, middle: Middle) -> None:
        """Let native code handle the following micro-batches, or check the coming update."""
        if middle.awaits_update:
            self.middle.await_update(middle.steps, middle.not_imported)
        elif self._may_add(middle.scale):
            with self._lock:
                if self._load():
                    self.middle.arm(
                        middle.scale, middle.steps, middle.begins_last, middle.not_imported, self._on_gpu
                    )

    def prepare_first(self, first: First) -> None:
        """Let native code begin the first backward pass of an empty window."""
        if self._may_add(first.scale):
            with self._lock:
                if self._lanes_for != first.scale:
                    self._set_lanes(first.scale)
                following = first.following
                self.middle.await_first(
                    first.scale,
                    self._load(),
                    first.not_imported,
                    0 if following is None else following.steps,
                    False if following is None else following.begins_last,
                    first.updates,
                )

    def _set_lanes(self, scale: float) -> None:
        lanes = []
        for key, slot in {slot.lane_key: slot for slot in self._native_index}.items():
            _, gradient, accumulator = slot.lane
            is_private = not slot.in_reduce_bucket
            makes_sums = gradient == accumulator and is_deferrable(scale, accumulator) and is_private
            lanes.append((key, self.buckets_for(slot), python_hooks.bucket_bytes(slot), makes_sums))
        self.middle.set_lanes(lanes)
        self._lanes_for = scale

    def take_over(self, task: GraphTask) -> int | None:
        """Take over the graph task that native code has begun, as if `begin` had been called for `task`.

        Returns its identity, or None if there is none. Call `middle.let_go()` once the task is registered.
        """
        running = self.middle.hand_over()
        if running is None:
            return None
        identity, task.callback, buckets, is_open = running
        task.buckets.update(buckets)
        if is_open:
            with self._lock:
                self._task = task
        return identity

    def add_now(self, slot: Slot, identity: int, gradient: Tensor) -> bool:
        """Add a gradient immediately if nothing else must be done with it."""
        if self._task is None or slot.native_hook is None:
            return False
        if isinstance(gradient, FakeTensor):  # native code cannot add it, but would add a real one
            if slot.accumulator is not None:
                self._accumulators.adder.add([slot], [gradient], 1.0)
            return slot.accumulator is not None
        return self._direct.take(identity, self._native_index.get(slot, -1), gradient, slot.param, False)

    def stop_adding(self) -> None:
        """Stop adding gradients immediately, and record what was added."""
        with self._lock:  # waits for another thread that is doing the same
            if self._task is None:
                return
            task = self._task
            self._task = None
            try:
                added = self._direct.close()
            except BaseException:
                task.added = True  # other launches may have added before one failed
                raise
            task.added = task.added or bool(added)
            self.note_added(added)

    def release_to_python(self, slot: Slot) -> None:
        """Leave the slot's sum to Python: record what was added, and add no more to this slot."""
        with self._lock:
            if self._task is not None:
                added = self._direct.added()
                if added:
                    self._task.added = True
                    self.note_added(added)
            self._direct.skip(self._native_index.get(slot, -1))

    def join(self, *, is_last: bool) -> None:
        """Let the current streams wait for what native code has added on others in the running backward
        passes. is_last: whether no other one is running.
        """
        self._direct.join(is_last)

    def note_added(self, added: list[int]) -> None:
        """Record the native indices of the sums that native code has added to: their deferred scales were
        applied, and newly written memory is an accumulator.
        """
        accumulators = self._accumulators
        slots_by_index = self._slots_by_index
        if accumulators.deferred.scales or accumulators.in_place.any_written:
            made = [(slots_by_index[index], accumulator) for index, accumulator in self._direct.take_made()]
            accumulators.in_place.added_to([slots_by_index[index] for index in added], made)

    def release_sums(self) -> None:
        """Drop native references to the accumulators, which are in p.grad now."""
        self._direct.release()

    def end(self, identity: int, task: GraphTask) -> None:
        """End a graph task."""
        if self._task is task:
            self.stop_adding()
        self._tasks.drop(identity)
        super().end(identity, task)


def hooks_for(accumulators: Accumulators) -> PythonHooks:
    """Create native hooks if the compiled module is available, else Python hooks."""
    native = native_module.module()
    return PythonHooks(accumulators) if native is None else NativeHooks(accumulators, native)
