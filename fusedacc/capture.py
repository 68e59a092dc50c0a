"""Takes gradients before autograd stores them, and adds them in batches.

A pre-hook on a parameter's AccumulateGrad node receives the fresh gradient and returns `(None,)`, so autograd
stores nothing. Small gradients wait until a bucket is full or the backward ends; one pass adds them all. What
is pending belongs to the graph task (one call of the engine): re-entrant checkpointing runs tasks inside
tasks, each flushed at its own end, so that no launch ever holds a sum twice.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .arena import Arena
from .slot import Slot, tensor_references
from .window import Window

#: Pending gradients are added when a bucket holds this many bytes.
BUCKET_BYTES = 25 * 2**20
#: A gradient of at least this many bytes is added at once, while it is in the cache.
LARGE_BYTES = 2**20

_LET_THROUGH = None
_SWALLOWED: tuple[None] = (None,)
_task_id = torch._C._current_graph_task_id

#: Which live capture holds a parameter.
_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()


class Bucket:
    """Gradients of one lane and stream that wait to be added."""

    __slots__ = ("adopting", "gradients", "nbytes", "slots", "stream")

    def __init__(self, stream: int, adopting: bool) -> None:
        self.stream = stream
        self.adopting = adopting
        self.slots: list[Slot] = []
        self.gradients: list[Tensor] = []
        self.nbytes = 0


class Task:
    """What one call of the engine has delivered so far."""

    __slots__ = ("added", "buckets", "captures", "ignored", "scale", "stored", "swallows")

    def __init__(self, captures: bool, scale: float = 1.0, swallows: bool = False, ignored: bool = False):
        #: Whether gradients are taken; else all are left to autograd, and if ignored, do not count.
        self.captures = captures
        self.ignored = ignored
        self.scale = scale
        #: Whether gradients are dropped: a micro-batch of weight 0.
        self.swallows = swallows
        self.buckets: dict[Any, Bucket] = {}
        #: Whether any gradient is in a sum already, and whose gradients autograd was left to store.
        self.added = False
        self.stored: list[Slot] = []


@functools.cache
def _references() -> tuple[int, int]:
    """References to a fresh gradient inside `Capture.receive`: Python's count, and the tensor's own.

    More of either means that somebody else holds the gradient and may change it. Measured once by a real
    backward, since they differ between torch releases.
    """
    seen: list[tuple[int, int]] = []

    class Probe:
        def receive(self, slot: Any, gradients: Any) -> Any:
            gradient = gradients[0]
            seen.append((sys.getrefcount(gradient), tensor_references(gradient)))
            return _SWALLOWED

    probe, slot = Probe(), Probe()
    with torch.enable_grad():
        leaf = torch.zeros(2, requires_grad=True)
        node = accumulate_grad_node(leaf)
        node.register_prehook(_hook(weakref.ref(probe), weakref.ref(slot)))
        (leaf * 2.0).sum().backward()
    return seen[0]


def _hook(capture: weakref.ref, slot: weakref.ref) -> Callable[[tuple], tuple | None]:
    """A pre-hook that keeps nothing alive, and lets gradients through when its capture is gone."""

    def hook(gradients: tuple) -> tuple | None:
        owner = capture()
        return _LET_THROUGH if owner is None else owner.receive(slot(), gradients)

    return hook


def accumulate_grad_node(param: Tensor) -> Any:
    """The AccumulateGrad node of a leaf that requires a gradient; new ones are made when none is alive."""
    with torch.enable_grad():
        return param.view_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def multi_process() -> bool:
    """Whether a process group of more than one rank is up, whose reducer needs the gradients in p.grad."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


class Capture:
    """Hooks on the parameters of `slots`, and what they have taken.

    Args:
        slots: the parameters; a list shared with its owner, who calls `refresh` after appending.
        window: asked for the scale, told when a backward has ended.
        arena: where gradients go.

    Raises:
        ValueError: a parameter is in another live wrapper.
    """

    def __init__(self, slots: list[Slot], window: Window, arena: Arena) -> None:
        self.slots = slots
        self.window = window
        self.arena = arena
        self.ignoring = False
        self._tasks: dict[int, Task] = {}
        self._python_references, self._tensor_references = _references()
        self.claim(slots)
        self.refresh()

    def __del__(self) -> None:
        self.release()

    # Arming

    def claim(self, slots: Sequence[Slot]) -> None:
        """Make these parameters ours, or raise ValueError and claim none."""
        for slot in slots:
            owner = _owners.get(slot.param)
            if owner is not None and owner() is not None and owner() is not self:
                raise ValueError(
                    f"parameter {slot.name!r} is already accumulated by another live AccumulatingOptimizer; "
                    "close() that one first, or give each wrapper its own parameters"
                )
        for slot in slots:
            _owners[slot.param] = weakref.ref(self)

    def refresh(self) -> None:
        """Hook what can be hooked; called again after whatever may have changed a parameter's node."""
        for slot in self.slots:
            changed = slot.signature != slot.current_signature()
            if changed:
                former = slot.lane[1]
                slot.describe()
                self.arena.convert(slot)
                if slot.widened and slot.former_grad_dtype == former:
                    slot.former_grad_dtype = slot.param.dtype
            if not slot.param.requires_grad:
                self._disarm(slot)
            elif changed or slot.node is None:
                self._arm(slot)

    def _arm(self, slot: Slot) -> None:
        param = slot.param
        if slot.accumulate_dtype != param.dtype and not slot.widened and not multi_process():
            slot.former_grad_dtype, slot.widened = param.grad_dtype, True
            param.grad_dtype = None
        node = accumulate_grad_node(param)
        if node is not slot.node:
            self._disarm(slot)
            slot.node = node
            slot.handle = node.register_prehook(_hook(weakref.ref(self), weakref.ref(slot)))

    @staticmethod
    def _disarm(slot: Slot) -> None:
        if slot.handle is not None:
            slot.handle.remove()
        slot.node = slot.handle = None

    def release(self) -> None:
        """Take the hooks off and give back what was changed on the parameters. Sums are left alone."""
        for slot in self.slots:
            self._disarm(slot)
            if slot.widened:
                param, slot.widened = slot.param, False
                gradient, param.grad = param.grad, None
                param.grad_dtype = slot.former_grad_dtype
                if gradient is not None:
                    param.grad = gradient.to(slot.former_grad_dtype or gradient.dtype)
            owner = _owners.get(slot.param)
            if owner is not None and owner() in (None, self):
                del _owners[slot.param]
        self._tasks.clear()

    # A backward runs

    def receive(self, slot: Slot, gradients: tuple[Tensor | None]) -> tuple[None] | None:
        """The pre-hook's body: `(None,)` where the gradient was taken, None to leave it to autograd."""
        gradient = gradients[0]
        task = self._tasks.get(_task_id())
        if task is None:
            task = self._begin()
        if not task.captures or slot.param._post_accumulate_grad_hooks:
            self._leave(task, slot)
            return _LET_THROUGH
        if gradient is None or task.swallows:
            return _SWALLOWED
        if gradient.dtype is not slot.lane[1] or gradient.layout is not torch.strided or slot.odd:
            return self._receive_odd(task, slot, gradient)
        first = self.arena.is_first(slot)
        adopting = first and gradient.dtype is slot.lane[2]
        shared = (
            sys.getrefcount(gradient) > self._python_references
            or tensor_references(gradient) > self._tensor_references
        )
        if shared or type(gradient) is not Tensor or (slot.nbytes >= LARGE_BYTES and not adopting):
            if type(gradient) is not Tensor:
                return self._receive_odd(task, slot, gradient)
            self._add(task, [slot], [gradient])
            return _SWALLOWED
        stream = torch._C._cuda_getCurrentRawStream(slot.lane[0].index) if gradient.is_cuda else 0
        key = (slot.lane_key, adopting, stream)
        bucket = task.buckets.get(key)
        if bucket is None:
            bucket = task.buckets[key] = Bucket(stream, adopting)
        bucket.slots.append(slot)
        bucket.gradients.append(gradient)
        if not adopting:
            bucket.nbytes += slot.nbytes
            if bucket.nbytes >= BUCKET_BYTES:
                self._flush(task, bucket)
        return _SWALLOWED

    def _receive_odd(self, task: Task, slot: Slot, gradient: Tensor) -> tuple[None]:
        """Add what no kernel takes, at once."""
        if gradient.layout is not torch.strided or type(gradient) is not Tensor:
            slot.odd = True
        task.added = True
        self.arena.add_odd(slot, gradient, task.scale * self.window.factor)
        return _SWALLOWED

    def _begin(self) -> Task:
        """The first gradient of a graph task: decide what is done with all of them.

        Raises RuntimeError where the micro-batch needs a weight and has none, before anything is added.
        """
        identity = _task_id()
        if identity == -1:  # compiled autograd runs hooks outside any task
            return Task(captures=False)
        window = self.window
        if self.ignoring:
            task = Task(captures=False, ignored=True)
        else:
            scale = window.base_scale
            stock = torch.is_grad_enabled() or multi_process()
            task = Task(not stock, scale, window.leaves_out)
            if window.counted and window.empty:
                self.arena.retract()
        torch.autograd.Variable._execution_engine.queue_callback(
            functools.partial(_finish, weakref.ref(self), identity)
        )
        self._tasks[identity] = task
        return task

    def _leave(self, task: Task, slot: Slot) -> None:
        """Let autograd store this gradient, beside nothing of ours."""
        if not task.ignored:
            self.arena.make_way(slot)
        task.stored.append(slot)

    def _add(self, task: Task, slots: list[Slot], gradients: list[Tensor], adopt: bool = False) -> None:
        task.added = True
        self.arena.add(slots, gradients, task.scale * self.window.factor, adopt)

    def _flush(self, task: Task, bucket: Bucket) -> None:
        slots, gradients, bucket.slots, bucket.gradients = bucket.slots, bucket.gradients, [], []
        bucket.nbytes = 0
        if slots and slots[0].lane[0].type == "cuda":
            stream = torch.cuda.current_stream(slots[0].lane[0])
            if stream.cuda_stream != bucket.stream:
                # The engine has made this stream wait for the other; the allocator does not know.
                for gradient in gradients:
                    gradient.record_stream(stream)
        self._add(task, slots, gradients, bucket.adopting)

    def finish(self, identity: int) -> None:
        """The end of a graph task: add what is pending, and deliver if this was the window's last."""
        task = self._tasks.get(identity)
        if task is None:
            return
        if not task.ignored:
            for bucket in task.buckets.values():
                self._flush(task, bucket)
            window = self.window
            window.micro.ran = True
            if window.counted and window.will_update and not window.micro.deferred:
                if task.captures and task.stored:
                    self.collect(task.stored)
                self.deliver()
        del self._tasks[identity]
        if task.ignored:
            self._mark_ignored(task)
        if torch._C._current_autograd_node() is None:
            self.settle()

    # Between backwards

    def settle(self) -> None:
        """Forget backwards that an exception has ended; taint the window where they have added something."""
        active = _task_id()
        for identity in [key for key in self._tasks if key != active]:
            task = self._tasks.pop(identity)
            if task.ignored:
                self._mark_ignored(task)
            elif task.added or any(slot.param.grad is not None for slot in task.stored):
                self.window.tainted = "an exception has interrupted a backward"

    @staticmethod
    def _mark_ignored(task: Task) -> None:
        for slot in task.stored:
            if not slot.delivered:
                slot.ignored = slot.param.grad

    def collect(self, slots: Sequence[Slot]) -> bool:
        """Counted loop: add what autograd has stored as this micro-batch's gradient; False if nothing."""
        foreign = []
        for slot in slots:
            gradient = slot.param.grad
            if gradient is not None and slot.is_foreign(gradient):
                foreign.append((slot, gradient.detach()))
                slot.param.grad = None
        if not foreign:
            return False
        window = self.window
        if not window.leaves_out:
            for slot, gradient in foreign:
                slot.odd = slot.odd or gradient.layout is not torch.strided
            with torch.no_grad():
                owners, gradients = zip(*foreign, strict=True)
                self.arena.add_mixed(owners, gradients, window.base_scale * window.factor)
        window.micro.ran = True
        return True

    def deliver(self, ending: bool = True, partial: bool = False) -> bool:
        """Bring the sums to their final scale and put them into p.grad; False where that is not known yet."""
        window = self.window
        target = window.target(ending, partial)
        if target is None:
            return False
        with torch.no_grad():
            self.arena.rescale(target / window.factor)
            window.factor = target
            self.arena.deliver()
        return True

    def forget(self) -> None:
        """Drop what is pending."""
        self._tasks.clear()


def _finish(capture: weakref.ref, identity: int) -> None:
    owner = capture()
    if owner is not None:
        owner.finish(identity)
