"""Peak memory by kind: what was alive at the peak, and what each piece of it was.

Every allocation and release is recorded (on a CPU by the profiler, on a GPU by the caching allocator) and
replayed. At a few points of the loop one looks where the tensors that are known lie: weights, gradients and
their sums, optimizer state. An allocation that holds such a tensor while one looks is of that kind from its
beginning to its end. All else that is alive at the peak is activations, temporaries, and gradients on their
way to a sum.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

OTHER = "activations and others"
KINDS = ("weights", "gradients", "optimizer", OTHER)
#: Called with the known tensors by kind.
Look = Callable[[Mapping[str, Iterable[Tensor]]], None]


@dataclasses.dataclass
class Event:
    """`bytes` > 0: allocated at `address`; < 0: released; 0: a look, whose number is `address`."""

    address: int
    bytes: int


@dataclasses.dataclass
class Block:
    """An allocation: alive from event `start` up to event `end`."""

    bytes: int
    start: int
    end: float = float("inf")
    kind: str = OTHER


def peak_by_kind(train: Callable[[Look], object], device: torch.device) -> dict[str, int]:
    """Runs `train`, which must make all it uses and look where kinds may have changed.

    Returns the bytes of each of KINDS at the first moment at which most bytes were alive; their sum is the
    peak. Bytes are those asked for, without the allocator's rounding.
    """
    looks: list[dict[int, str]] = []

    def address_kinds(held: Mapping[str, Iterable[Tensor]]) -> None:
        looks.append(
            {
                tensor.untyped_storage().data_ptr(): kind
                for kind, tensors in held.items()
                for tensor in tensors
                if tensor.device.type == device.type
            }
        )

    record = _record_cuda if device.type == "cuda" else _record_cpu
    return replay(record(train, address_kinds, device), looks)


def replay(events: Sequence[Event], looks: Sequence[Mapping[int, str]]) -> dict[str, int]:
    """The bytes of each kind at the peak. Releases of what was there before the first event do not count."""
    alive: dict[int, Block] = {}
    blocks = []
    now = peak = peak_at = 0
    for index, event in enumerate(events):
        if event.bytes == 0:
            for address, kind in looks[event.address].items():
                if address in alive:
                    alive[address].kind = kind
        elif event.bytes > 0:
            blocks.append(Block(event.bytes, index))
            alive[event.address] = blocks[-1]
            now += event.bytes
            if now > peak:
                peak, peak_at = now, index
        elif event.address in alive:
            block = alive.pop(event.address)
            block.end = index
            now -= block.bytes
    kinds = dict.fromkeys(KINDS, 0)
    for block in blocks:
        if block.start <= peak_at < block.end:
            kinds[block.kind] += block.bytes
    return kinds


def _record_cpu(train: Callable[[Look], object], look: Look, device: torch.device) -> list[Event]:
    count = 0

    def mark(held: Mapping[str, Iterable[Tensor]]) -> None:
        nonlocal count
        with record_function(f"look {count}"):
            look(held)
        count += 1

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        train(mark)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        traced = json.loads(path.read_text())["traceEvents"]
    events = []
    for found in sorted((e for e in traced if "ts" in e), key=lambda e: e["ts"]):
        if found["name"] == "[memory]":
            events.append(Event(found["args"]["Addr"], found["args"]["Bytes"]))
        elif found["name"].startswith("look ") and found.get("cat") == "user_annotation":
            events.append(Event(int(found["name"].removeprefix("look ")), 0))
    return events


def _record_cuda(train: Callable[[Look], object], look: Look, device: torch.device) -> list[Event]:
    index = device.index if device.index is not None else torch.cuda.current_device()

    def history() -> list[dict]:
        return torch.cuda.memory._snapshot()["device_traces"][index]

    positions: list[int] = []

    def mark(held: Mapping[str, Iterable[Tensor]]) -> None:
        look(held)
        positions.append(len(history()))

    torch.cuda.memory._record_memory_history("all", context=None)
    try:
        before = len(history())
        train(mark)
        traced = history()
    finally:
        torch.cuda.memory._record_memory_history(None)
    events = []
    for place in range(before, len(traced) + 1):
        events += [Event(number, 0) for number, at in enumerate(positions) if at == place]
        if place < len(traced):
            found = traced[place]
            sign = {"alloc": 1, "free_completed": -1}.get(found["action"], 0)
            if sign:
                events.append(Event(found["addr"], sign * found["size"]))
    return events
