"""What one call of the engine has delivered, and the order between the streams on which it adds.

The engine makes a stream wait for the gradients that it hands on; a gradient that a module has added by
itself is handed to nobody, and one that waits in a bucket is added when another stream may be current.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..accumulators import Slot
from ..kernels.torch_state import raw_stream
from .unattached_ddp import Watch


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


class GraphTask:
    """What one call of the engine has delivered so far."""

    __slots__ = (
        "added",
        "buckets",
        "callback",
        "captures",
        "delivered_late",
        "drops",
        "host_scale",
        "ignored",
        "inner",
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
        #: By what gradients are multiplied, in the unit of the sums; None where a device has that number.
        self.host_scale: float | None = None
        #: A unit of the sums and, where it is made on a device, a stream; the scale in that unit.
        self.scaled: tuple[float | Tensor, int, float | Tensor] | None = None
        self.buckets: dict[int, Bucket] = {}
        #: Whether any gradient is in a sum already, and whose gradients autograd was left to store.
        self.added = False
        self.stored: list[Slot] = []
        #: On which streams modules have added to which sums by themselves.
        self.streams: dict[tuple[torch.device, int], list[Slot]] = {}
        #: The engine's callback, which dies with a graph task that fails.
        self.callback: Callable[[], object] = object
        #: Whether a reducer may fill p.grad in a callback of its own: "" if not, "ahead" or "done".
        self.reducer = ""
        #: Whether FSDP2 delivers gradients, some of them in a callback of its own.
        self.delivered_late = False
        #: Whether it ends inside a task to which FSDP2 will deliver more.
        self.inner = False
        #: What reducers knew when it began.
        self.watch: Watch = []

    def scale_in(self, factor: float | Tensor) -> float | Tensor:
        """The scale in this unit of the sums; where it is a tensor, one for all launches, and ours alone."""
        weight = self.scale if isinstance(self.scale, Tensor) else factor
        stream = raw_stream(weight) if isinstance(weight, Tensor) else 0
        if self.scaled is None or self.scaled[0] is not factor or self.scaled[1] != stream:
            self.scaled = factor, stream, self.scale * factor
        return self.scaled[2]


def external(raw: int, device: torch.device) -> torch.cuda.Stream:
    """The stream of that address, which torch has somewhere made.

    The default stream's is 0, of which `torch.cuda.ExternalStream` makes a fresh stream: nobody would wait
    for the right one.
    """
    return torch.cuda.get_stream_from_external(raw, device)


def order(task: GraphTask, slot: Slot) -> None:
    """Before a write to the slot's sum on the current stream: wait for an earlier one on another."""
    device = slot.lane[0]
    raw = torch._C._cuda_getCurrentRawStream(device.index)
    if slot.stream not in (None, raw):
        torch.cuda.current_stream(device).wait_stream(external(slot.stream, device))
    slot.stream = raw
    task.streams.setdefault((device, raw), []).append(slot)


@contextlib.contextmanager
def on(raw: int, device: torch.device) -> Iterator[None]:
    """What is done inside is done on that stream, and the current one waits for it.

    All micro-batches add a parameter's gradients on the stream of its node, as autograd does: were they added
    on the callers' streams, two callers that do not wait for each other would add to one sum at once.
    """
    current = torch.cuda.current_stream(device)
    if current.cuda_stream == raw:
        yield
        return
    stream = external(raw, device)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


def join(task: GraphTask) -> None:
    """At the end of a graph task: what follows on the current stream waits for what modules have written."""
    for (device, raw), slots in task.streams.items():
        current = torch.cuda.current_stream(device)
        if current.cuda_stream != raw:
            current.wait_stream(external(raw, device))
        for slot in slots:
            slot.stream = None
