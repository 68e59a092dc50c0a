"""The pre-hook of one parameter's AccumulateGrad node, and what it fills while a backward runs."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..accumulators import Accumulators, Slot
from ..accumulators.memory import tensor_references
from ..kernels.torch_state import raw_stream, runs_as_written
from .graph_task import Bucket, GraphTask
from .middle import Assumptions, First, LeftToPython, Middle, Owners

#: Pending gradients are added when a bucket holds this many bytes.
BUCKET_BYTES = 25 * 2**20
#: The same on a CPU where they cannot become their sums, being of another dtype, or because these are reduced
#: together: until then they are memory that a loop which adds each as it comes does not have.
CAST_BYTES = 2**20
#: A gradient of at least this many bytes, by type of device, is added at once: on a CPU while it is in the
#: cache. On a GPU a launch of 1 MiB does not fill the chip, and costs the host as much as one of a whole
#: bucket; what is best there has not been measured yet (`benchmarks/suites/wrapper_window.py`).
LARGE_BYTES = {"cpu": 2**20, "cuda": 2**24}

#: A hook's answers: autograd stores the gradient, or nothing.
LET_THROUGH = None
SWALLOWED: tuple[None] = (None,)
Hook = Callable[[tuple], tuple | None]
task_id = torch._C._current_graph_task_id


@functools.cache
def references() -> tuple[int, int]:
    """References to a fresh gradient inside a hook: Python's count, and the C++ tensor's.

    More of either means that somebody else holds the gradient and may change it. Measured once by a real
    backward, since they differ between torch releases.
    """
    seen: list[tuple[int, int]] = []
    engine: Any = torch.autograd.Variable._execution_engine

    def hook(gradients: tuple) -> tuple[None]:
        (gradient,) = gradients
        seen.append((sys.getrefcount(gradient), tensor_references(gradient)))
        return SWALLOWED

    with torch.enable_grad():
        leaf = torch.zeros(2, requires_grad=True)
        node = accumulate_grad_node(leaf)
        node.register_prehook(hook)
        # Not Tensor.backward, which a test may have replaced.
        engine.run_backward((leaf * 2.0,), (torch.ones(2),), False, False, (), False, accumulate_grad=True)
    return seen[0]


def hook_maker(
    capture: weakref.ref, open_buckets: Mapping[int, Bucket], tasks: Mapping[int, GraphTask], on_cuda: bool
) -> Callable[[Slot], Hook]:
    """What makes the pre-hooks of one lane's parameters, which share all that is the lane's.

    A hook holds no capture, and lets gradients through when that is gone. The ordinary case is spelled out
    in it and everything else left to `Capture.receive`, because a call per parameter and micro-batch costs as
    much as autograd's own addition of a small gradient. What is not looked at there (layout, dtype) the adder
    finds out.

    Args:
        capture: a weak reference to the owner.
        open_buckets: the buckets of the lane, by graph task.
        tasks: the graph tasks that are known.
        on_cuda: whether the lane's gradients are on a GPU.
    """
    current_task, python_count, tensor_count = task_id, sys.getrefcount, tensor_references
    python_limit, tensor_limit = references()

    def make_hook(slot: Slot) -> Hook:
        param, nbytes = slot.param, slot.nbytes
        slot.at_once = is_large(slot)
        buckets = {} if slot.at_once else open_buckets
        limit = bucket_bytes(slot)

        @runs_as_written
        def hook(gradients: tuple) -> tuple | None:
            bucket = buckets.get(current_task())
            (gradient,) = gradients
            if gradient is None and current_task() in tasks:
                return LET_THROUGH  # a module has added it by itself
            sole = python_count(gradient) <= python_limit and tensor_count(gradient) <= tensor_limit
            if (
                bucket is not None
                and sole
                and param.requires_grad
                and not param._post_accumulate_grad_hooks
                and type(gradient) is Tensor
                and not slot.needs_eager
                and not (on_cuda and raw_stream(gradient) != bucket.stream)
            ):
                bucket.put(slot, param, gradient, nbytes)
                if bucket.nbytes >= limit:
                    owner = capture()
                    if owner is not None:
                        owner.flush_bucket(current_task(), bucket)
                return SWALLOWED
            owner = capture()
            return LET_THROUGH if owner is None else owner.receive(slot, gradient, sole)

        return hook

    return make_hook


def is_large(slot: Slot) -> bool:
    """Whether the parameter's gradients are added at once, unless they may become the sum."""
    return slot.nbytes >= LARGE_BYTES.get(slot.lane[0].type, LARGE_BYTES["cpu"])


def bucket_bytes(slot: Slot) -> int:
    """How many bytes of pending gradients there may be in the lane of this parameter."""
    device, gradient, accumulator = slot.lane
    copied = device.type == "cpu" and (gradient != accumulator or slot.in_bucket)
    return min(BUCKET_BYTES, CAST_BYTES) if copied else BUCKET_BYTES


def accumulate_grad_node(param: Tensor) -> Any:
    """The AccumulateGrad node of a leaf that requires a gradient; new ones are made when none is alive."""
    with torch.enable_grad():
        return param.view_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


class PythonHooks:
    """Hooks in Python take all gradients; they wait in buckets, or are added by `Capture.receive`.

    `NativeHooks` is the same with hooks in front of them that do without Python.

    Args:
        accumulators: where gradients go.
    """

    def __init__(self, accumulators: Accumulators) -> None:
        self._accumulators = accumulators
        self._buckets: dict[int, Any] = {}
        #: Deals with micro-batches in the middle of a window.
        self.middle: Any = LeftToPython()

    def buckets_for(self, slot: Slot) -> MutableMapping[int, Bucket]:
        """The buckets of the slot's lane, by graph task: one mapping that all hooks of the lane look at."""
        found = self._buckets.get(slot.lane_key)
        if found is None:
            found = self._buckets[slot.lane_key] = self._new_buckets()
        return found

    def _new_buckets(self) -> Any:
        return {}

    def open_bucket(self, slot: Slot, identity: int, stream: int) -> Bucket:
        """A new bucket for the slot's lane and a graph task."""
        bucket = self.buckets_for(slot)[identity] = self._new_bucket(slot, stream)
        return bucket

    def _new_bucket(self, slot: Slot, stream: int) -> Bucket:
        return Bucket(stream)

    def look_at(self, params: list[Tensor]) -> Any:
        """What `hold(params)` of the result compares with later: the parameters' memory, dtype, shape and
        whether they require gradients. None where only Python can look.
        """
        return None

    def attach(self, slot: Slot, node: Any) -> None:
        """The slot's node has got its hook in Python."""

    def detach(self, slot: Slot) -> None:
        """The slot's node has lost its hook in Python."""

    def forget(self, slots: Sequence[Slot]) -> None:
        """These slots have no hooks any more, and no others will have."""

    def deal_with_middle(self, owners: Owners, assumptions: Assumptions) -> None:
        """Have native code deal with micro-batches in the middle of a window, while the assumptions hold."""

    def go_on(self, middle: Middle) -> None:
        """Further micro-batches are in the middle of the window."""

    def await_first(self, first: First) -> None:
        """A window is empty: the next backward is its first."""

    def note_added(self, added: list[int]) -> None:
        """Native code has added to the sums of these numbers in a backward that it has begun by itself."""

    def take_over(self, task: GraphTask) -> int | None:
        """Make `task` the record of the graph task that native code has begun, as if `begin` had been called.

        Returns its identity; None where there is none. Call `middle.let_go()` once it is known.
        """
        return None

    def any_gradient(self) -> bool:
        """Whether anything stands in the p.grad of any parameter."""
        return any(slot.param.grad is not None for slot in self._accumulators.slots)

    def begin(self, identity: int, task: GraphTask, alone: bool, scale: float | Tensor) -> None:
        """A graph task's first gradient is at hand. `alone`: no other task runs."""

    def adds_in(self, task: GraphTask) -> bool:
        """Whether native code may add gradients of this graph task to sums at once."""
        return False

    def add_now(self, slot: Slot, identity: int, gradient: Tensor) -> bool:
        """Add a gradient at once without Python, if that is all that is to be done with it."""
        return False

    def stop_adding(self) -> None:
        """No gradient is added at once any more; deferred scales of what has been added to are discharged."""

    def release_to_python(self, slot: Slot) -> None:
        """Python is about to deal with the slot's accumulator: nobody else adds to it in this backward."""

    def end(self, identity: int, task: GraphTask) -> None:
        """A graph task is over."""
        for lane_key in task.buckets:
            self._buckets[lane_key].pop(identity, None)
