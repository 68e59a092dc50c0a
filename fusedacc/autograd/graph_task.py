"""The gradients delivered by one call of the autograd engine, and the order of CUDA streams that add them.

The engine synchronises streams for the gradients that it passes on. It does not do so for gradients that a
module adds in place, nor for gradients that wait in a bucket until another stream may be current.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..accumulators import Slot
from ..kernels.torch_state import raw_stream


class Bucket:
    """Gradients of one lane, taken on one stream, that wait to be added.

    Only Python hooks without native ones use it. The C++ class `Bucket` (csrc/autograd/hook.h) has the same
    methods.
    """

    __slots__ = ("_pending", "nbytes", "stream")

    def __init__(self, stream: int) -> None:
        self._pending: list[Any] = []  # a slot, its gradient, and so on
        self.stream = stream
        self.nbytes = 0

    def put(self, slot: Slot, param: Tensor, gradient: Tensor, nbytes: int) -> None:
        """Put in a gradient that no other code refers to."""
        self._pending += (slot, gradient)
        self.nbytes += nbytes

    def slots(self) -> list[Slot]:
        """Return the slots whose gradients wait."""
        return self._pending[0::2]

    def take(self) -> tuple[list[Slot], list[Tensor], bool]:
        """Empty the bucket, except for gradients that another thread appends during the call.

        Return the slots, their gradients, and whether each gradient is known to share no memory and to have
        its parameter's layout.
        """
        taken = self._pending[:]
        del self._pending[: len(taken)]
        self.nbytes = 0
        return taken[0::2], taken[1::2], False


class Scaled(NamedTuple):
    """A graph task's scale times a factor."""

    #: A `Window.sum_scale`.
    factor: float | Tensor
    #: The stream on which the product was computed; 0 on the host.
    stream: int
    product: float | Tensor


@dataclass(slots=True, eq=False)
class GraphTask:
    """The state of one call of the autograd engine."""

    #: Whether gradients are captured. Otherwise autograd stores them; if `ignored`, they do not count.
    captures: bool
    scale: float | Tensor = 1.0
    ignored: bool = False
    #: Whether gradients are captured and dropped.
    drops: bool = False
    #: The factor of gradients, including `Window.sum_scale`; None if it is a tensor on a device.
    host_scale: float | None = None
    #: The last result of `scale_in`.
    scaled: Scaled | None = None
    buckets: dict[int, Bucket] = field(default_factory=dict)
    #: Whether a gradient was added to a sum, and the slots whose gradients autograd stores.
    added: bool = False
    stored: list[Slot] = field(default_factory=list)
    #: The slots that modules have added to in place, by stream.
    slots_by_stream: dict[tuple[torch.device, int], list[Slot]] = field(default_factory=dict)
    #: Returns the engine's callback, or None if the graph task has failed: the engine has freed it then.
    callback: Callable[[], object] = object
    #: Whether a reducer outside the wrapper may fill p.grad in its engine callback, and whether `callback`
    #: was queued again, after the reducer's.
    reduced_outside: bool = False
    follows_reducer: bool = False
    #: Whether FSDP2 delivers gradients, some of them in its engine callback.
    delivered_late: bool = False
    #: Whether its gradients were added, and whether other tasks were running then: an enclosing one, or those
    #: of other threads. The last one collects what autograd has stored, and shows the result.
    has_ended: bool = False
    inner: bool = False

    @property
    def has_failed(self) -> bool:
        """Whether an exception has ended the graph task."""
        return self.callback() is None

    def scale_in(self, factor: float | Tensor) -> float | Tensor:
        """Return the scale times `factor` (`Window.sum_scale`); a tensor is shared by all launches."""
        tensor_or_number = self.scale if isinstance(self.scale, Tensor) else factor
        stream = raw_stream(tensor_or_number) if isinstance(tensor_or_number, Tensor) else 0
        if self.scaled is None or self.scaled.factor is not factor or self.scaled.stream != stream:
            self.scaled = Scaled(factor, stream, self.scale * factor)
        return self.scaled.product


def stream_at(raw: int, device: torch.device) -> torch.cuda.Stream:
    """Return the existing torch stream with this address.

    The default stream has address 0, for which `torch.cuda.ExternalStream` would create a new stream.
    """
    return torch.cuda.get_stream_from_external(raw, device)


def wait_for_last_writer(task: GraphTask, slot: Slot) -> None:
    """Let the current stream wait for an earlier write to the slot's sum on another stream."""
    device = slot.lane[0]
    raw = torch._C._cuda_getCurrentRawStream(device.index)
    if slot.writer_stream not in (None, raw):
        torch.cuda.current_stream(device).wait_stream(stream_at(slot.writer_stream, device))
    slot.writer_stream = raw
    task.slots_by_stream.setdefault((device, raw), []).append(slot)


@contextlib.contextmanager
def on_stream(raw: int, device: torch.device) -> Iterator[None]:
    """Run the block on the given stream, and let the current stream wait for it.

    All micro-batches add a parameter's gradients on the stream of its AccumulateGrad node, as autograd does.
    On the callers' streams, two callers that do not wait for each other would add to one sum at once.
    """
    current = torch.cuda.current_stream(device)
    if current.cuda_stream == raw:
        yield
        return
    stream = stream_at(raw, device)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


def wait_for_all_writers(task: GraphTask) -> None:
    """At the end of a graph task, let the current stream wait for the streams on which modules have added."""
    for (device, raw), slots in task.slots_by_stream.items():
        current = torch.cuda.current_stream(device)
        if current.cuda_stream != raw:
            current.wait_stream(stream_at(raw, device))
        for slot in slots:
            slot.writer_stream = None
