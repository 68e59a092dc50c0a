"""Python pre-hooks of AccumulateGrad nodes, and the buckets that they fill during a backward pass."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..accumulators import Accumulators, Slot
from ..accumulators.param import tensor_references
from ..kernels.torch_state import raw_stream, runs_as_written
from .graph_task import Bucket, GraphTask
from .middle import Assumptions, First, LeftToPython, Middle, Owners

#: Pending gradients are added when a bucket holds this many bytes. On a CPU with native hooks only a window's
#: first gradients wait.
BUCKET_BYTES = 25 * 2**20
#: The limit on a CPU for gradients that cannot become accumulators, because the dtypes differ or the
#: accumulators are all-reduced together. A loop that adds each gradient immediately needs no such memory.
CAST_BYTES = 2**20
#: A gradient of at least this many bytes is added immediately, by device type: on a CPU while it is in the
#: cache. On a GPU a launch of 1 MiB does not fill the chip, and costs the host as much as one for a whole
#: bucket; the best limit has not been measured yet (`benchmarks/suites/wrapper_window.py`).
LARGE_BYTES = {"cpu": 2**20, "cuda": 2**24}

#: Results of a hook: autograd stores the gradient, or nothing.
LET_THROUGH = None
SWALLOWED: tuple[None] = (None,)
Hook = Callable[[tuple], tuple | None]
task_id = torch._C._current_graph_task_id


@functools.cache
def references() -> tuple[int, int]:
    """Return the reference counts of a new gradient inside a hook: Python's, and the C++ tensor's.

    A higher count means that other code holds the gradient and may change it. The counts differ between torch
    releases, so they are measured once by a real backward pass.
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
    """Return a function that creates the pre-hook of a parameter of one lane.

    A hook refers weakly to the capture, and lets gradients through when it is gone. The hook handles the
    ordinary case itself and leaves all others to `Capture.receive`, because one more call per parameter and
    micro-batch costs as much as autograd's addition of a small gradient. Layout and dtype are checked when
    the gradient is added.
    """
    current_task = task_id
    python_count = sys.getrefcount
    tensor_count = tensor_references
    python_limit, tensor_limit = references()

    def make_hook(slot: Slot) -> Hook:
        param = slot.param
        nbytes = slot.nbytes
        slot.is_large = is_large(slot)
        buckets = {} if slot.is_large else open_buckets
        limit = bucket_bytes(slot)

        @runs_as_written
        def hook(gradients: tuple) -> tuple | None:
            bucket = buckets.get(current_task())
            (gradient,) = gradients
            if gradient is None and current_task() in tasks:
                return LET_THROUGH  # a module has added it in place
            sole = python_count(gradient) <= python_limit and tensor_count(gradient) <= tensor_limit
            if (
                bucket is not None
                and sole
                and param.requires_grad
                and not param._post_accumulate_grad_hooks
                and type(gradient) is Tensor
                and not slot.needs_eager
                and not slot.is_reduced_outside()
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
    """Whether the parameter's gradients are added immediately, unless they may become the accumulator."""
    return slot.nbytes >= LARGE_BYTES.get(slot.lane[0].type, LARGE_BYTES["cpu"])


def bucket_bytes(slot: Slot) -> int:
    """Return the most bytes of pending gradients in a bucket of this parameter's lane."""
    device, gradient, accumulator = slot.lane
    is_copied = device.type == "cpu" and (gradient != accumulator or slot.in_reduce_bucket)
    return min(CAST_BYTES, BUCKET_BYTES) if is_copied else BUCKET_BYTES


def accumulate_grad_node(param: Tensor) -> Any:
    """Return the AccumulateGrad node of a leaf that requires a gradient, or create one."""
    with torch.inference_mode(False), torch.enable_grad():
        return param.view_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


class PythonHooks:
    """Python hooks, which put gradients into buckets or leave them to `Capture.receive`. `NativeHooks` puts
    native hooks in front of them.
    """

    def __init__(self, accumulators: Accumulators) -> None:
        self._accumulators = accumulators
        self._buckets: dict[int, Any] = {}
        #: Creates the buckets of a lane.
        self._new_buckets: Callable[[], Any] = dict
        #: Handles micro-batches in the middle of a window.
        self.middle: Any = LeftToPython()

    def buckets_for(self, slot: Slot) -> MutableMapping[int, Bucket]:
        """Return the buckets of the slot's lane, by graph task. All hooks of the lane share this mapping."""
        buckets = self._buckets.get(slot.lane_key)
        if buckets is None:
            buckets = self._new_buckets()
            self._buckets[slot.lane_key] = buckets
        return buckets

    def open_bucket(self, slot: Slot, identity: int, stream: int) -> Bucket:
        """Open a bucket for the slot's lane and a graph task."""
        bucket = self._new_bucket(slot, stream)
        self.buckets_for(slot)[identity] = bucket
        return bucket

    def _new_bucket(self, slot: Slot, stream: int) -> Bucket:
        return Bucket(stream)

    # What only native hooks do; `NativeHooks` describes these methods

    def look_at(self, params: list[Tensor]) -> Any:
        """Return None: there is no native snapshot."""
        return None

    def attach(self, slot: Slot, node: Any) -> None:
        """Do nothing."""

    def detach(self, slot: Slot) -> None:
        """Do nothing."""

    def forget(self, slots: Sequence[Slot]) -> None:
        """Do nothing."""

    def begin(self, identity: int, task: GraphTask, scale: float | Tensor, *, alone: bool) -> None:
        """Do nothing."""

    def adds_in(self, task: GraphTask) -> bool:
        """Return False: no gradient is added immediately."""
        return False

    def add_now(self, slot: Slot, identity: int, gradient: Tensor) -> bool:
        """Return False: no gradient is added immediately."""
        return False

    def choose_again(self) -> None:
        """Do nothing: Python selects a backend for each pass."""

    def stop_adding(self) -> None:
        """Do nothing."""

    def release_to_python(self, slot: Slot) -> None:
        """Do nothing."""

    def join(self, *, is_last: bool) -> None:
        """Do nothing."""

    def note_added(self, added: list[int]) -> None:
        """Do nothing."""

    def release_sums(self) -> None:
        """Do nothing."""

    def run_middle_natively(self, owners: Owners, assumptions: Assumptions) -> None:
        """Do nothing."""

    def prepare_next(self, middle: Middle) -> None:
        """Do nothing."""

    def prepare_first(self, first: First) -> None:
        """Do nothing."""

    def take_over(self, task: GraphTask) -> int | None:
        """Return None: native code runs no backward pass."""
        return None

    # The ends of backward passes

    def any_gradient(self) -> bool:
        """Whether any parameter has a p.grad."""
        return any(slot.param.grad is not None for slot in self._accumulators.slots)

    def end(self, identity: int, task: GraphTask) -> None:
        """End a graph task."""
        for lane_key in task.buckets:
            self._buckets[lane_key].pop(identity, None)
