"""Order between the streams on which sums are written.

The engine makes a stream wait for the gradients that it hands on; a gradient that a module has added by
itself is handed to nobody, and one that waits in a bucket is added when another stream may be current.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from .accumulators import Slot
from .hooks import Task


def external(raw: int, device: torch.device) -> torch.cuda.Stream:
    """The stream of that address, which torch has somewhere made.

    The default stream's is 0, of which `torch.cuda.ExternalStream` makes a fresh stream: nobody would wait
    for the right one.
    """
    return torch.cuda.get_stream_from_external(raw, device)


def order(task: Task, slot: Slot) -> None:
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


def join(task: Task) -> None:
    """At the end of a graph task: what follows on the current stream waits for what modules have written."""
    for (device, raw), slots in task.streams.items():
        current = torch.cuda.current_stream(device)
        if current.cuda_stream != raw:
            current.wait_stream(external(raw, device))
        for slot in slots:
            slot.stream = None
