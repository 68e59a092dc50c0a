"""The pre-hook of one parameter's AccumulateGrad node, and what it fills while a backward runs."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .accumulators import Slot
from .accumulators.buffers import tensor_references
from .data_parallel import Watch
from .torch_state import raw_stream

#: Pending gradients are added when a bucket holds this many bytes.
BUCKET_BYTES = 25 * 2**20
#: The same on a CPU where they are of another dtype than their sums, and cannot become them: until then they
#: are memory that a loop which adds each as it comes does not have.
CAST_BYTES = 2**20
#: A gradient of at least this many bytes, by type of device, is added at once: on a CPU while it is in the
#: cache. On a GPU a launch of 1 MiB does not fill the chip, and costs the host as much as one of a whole
#: bucket; what is best there has not been measured yet (`benchmarks/at_once.py`).
LARGE_BYTES = {"cpu": 2**20, "cuda": 2**24}

#: A hook's answers: autograd stores the gradient, or nothing.
LET_THROUGH = None
SWALLOWED: tuple[None] = (None,)
Hook = Callable[[tuple], tuple | None]
task_id = torch._C._current_graph_task_id


class Bucket:
    """Gradients of one lane, taken on one stream, that wait to be added."""

    __slots__ = ("_pending", "nbytes", "stream")

    def __init__(self, stream: int) -> None:
        self._pending: list[Any] = []  # a slot, its gradient, and so on
        self.stream = stream
        self.nbytes = 0

    def put(self, slot: Slot, param: Tensor, gradient: Tensor, nbytes: int) -> None:
        """Let a gradient wait that nobody else refers to."""
        self._pending += (slot, gradient)
        self.nbytes += nbytes

    def slots(self) -> list[Slot]:
        """Whose gradients wait."""
        return self._pending[0::2]

    def take(self) -> tuple[list[Slot], list[Tensor], bool]:
        """Empty it: the slots and, in their order, the gradients; whether each is known to have memory of its
        own and its parameter's layout.

        What another thread's hook appends meanwhile stays.
        """
        taken = self._pending[:]
        del self._pending[: len(taken)]
        self.nbytes = 0
        return taken[0::2], taken[1::2], False


class Task:
    """What one call of the engine has delivered so far."""

    __slots__ = (
        "added",
        "buckets",
        "callback",
        "captures",
        "drops",
        "stashed",
        "ignored",
        "reducer",
        "scale",
        "scaled",
        "stored",
        "streams",
        "watch",
    )

    def __init__(
        self, captures: bool, scale: float | Tensor = 1.0, ignored: bool = False, drops: bool = False
    ) -> None:
        #: Whether gradients are taken; else all are left to autograd, and if ignored, do not count.
        self.captures = captures
        self.ignored = ignored
        #: Whether gradients are taken and thrown away.
        self.drops = drops
        self.scale = scale
        #: A unit of the sums and, where it is made on a device, a stream; the scale in that unit.
        self.scaled: tuple[float | Tensor, int, float | Tensor] | None = None
        self.buckets: dict[int, Bucket] = {}
        #: Whether any gradient is in a sum already, and whose gradients autograd was left to store.
        self.added = False
        self.stored: list[Slot] = []
        #: Whose accumulators were taken out of p.grad for the time of an ignored backward.
        self.stashed: list[Slot] = []
        #: On which streams modules have added to which sums by themselves.
        self.streams: dict[tuple[torch.device, int], list[Slot]] = {}
        #: The engine's callback, which dies with a graph task that fails.
        self.callback: Callable[[], object] = object
        #: Whether a reducer may fill p.grad in a callback of its own: "" if not, "ahead" or "done".
        self.reducer = ""
        #: What reducers knew when it began.
        self.watch: Watch = []

    def scale_in(self, factor: float | Tensor) -> float | Tensor:
        """The scale in this unit of the sums; where it is a tensor, one for all launches, and ours alone."""
        weight = self.scale if isinstance(self.scale, Tensor) else factor
        stream = raw_stream(weight) if isinstance(weight, Tensor) else 0
        if self.scaled is None or self.scaled[0] is not factor or self.scaled[1] != stream:
            self.scaled = factor, stream, self.scale * factor
        return self.scaled[2]


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
    capture: weakref.ref, open_buckets: Mapping[int, Bucket], tasks: Mapping[int, Task], on_cuda: bool
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
        buckets = {} if is_large(slot) else open_buckets
        limit = bucket_bytes(slot)

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
                and not slot.odd
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
    casts = device.type == "cpu" and gradient != accumulator
    return min(BUCKET_BYTES, CAST_BYTES) if casts else BUCKET_BYTES


def accumulate_grad_node(param: Tensor) -> Any:
    """The AccumulateGrad node of a leaf that requires a gradient; new ones are made when none is alive."""
    with torch.enable_grad():
        return param.view_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
