"""What was allocated when and for what, and what was alive at the peak.

Allocations come from fake tensors (`prediction.py`), or in real training from torch's profiler (CPU) or
caching allocator (GPU). At a few points the recorder looks where the known tensors are: an allocation that
holds one of them gets its kind. Bytes are the requested ones, without the allocator's rounding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import operator
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

#: Kinds of memory. Accumulators are the wrapper's sums. Gradients are on their way to a sum, or the plain
#: loop's `p.grad`. Temporaries are the short-lived memory of the backward and the update.
KINDS = ("parameters", "accumulators", "gradients", "optimizer", "activations", "temporaries")
PARAMETERS, ACCUMULATORS, GRADIENTS, OPTIMIZER, ACTIVATIONS, TEMPORARIES = KINDS
#: Memory that libraries keep outside torch's allocator.
LIBRARIES = "libraries"


@dataclasses.dataclass(eq=False)
class Block:
    """An allocation: alive from moment `start` up to moment `end`."""

    bytes: int
    start: int
    kind: str
    end: float = float("inf")
    #: The last dimension of its first tensor, where that is known.
    columns: int = 0


@dataclasses.dataclass(frozen=True)
class Inside:
    """What an operator allocates: at most `peak` bytes at once, and `kept` bytes that outlive it."""

    peak: int
    kept: int


@dataclasses.dataclass
class Operator:
    """A call of an operator. start: the moment before its first allocation. outputs: its results' memory."""

    start: int
    signature: Any
    outputs: list[Block] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Peak:
    """The most bytes that were alive at once, and their kinds.

    `logits`: the bytes of a cross-entropy's logits, their softmax and their gradient.
    """

    bytes: int
    by_kind: Mapping[str, int]
    logits: int = 0


def peak(
    blocks: Iterable[Block],
    operators: Iterable[Operator] = (),
    inside: Mapping[Any, Inside] | None = None,
    classes: Collection[int] = (),
) -> Peak:
    """Return the first moment at which the most bytes are alive.

    operators: calls that allocate more than they return. inside: what those calls allocate, by signature;
    calls without an entry allocate nothing else. classes: number of classes of each cross-entropy.
    """
    blocks = list(blocks)
    inside = inside or {}
    measured = [(call, inside[call.signature]) for call in operators if call.signature in inside]
    for call, allocated in measured:
        # The last output also gets what fake tensors did not show, such as workspaces of unknown size.
        unseen = allocated.kept - sum(block.bytes for block in call.outputs)
        if unseen > 0 and call.outputs:
            call.outputs[-1].bytes += unseen
    changes: Counter[float] = Counter()
    for block in blocks:
        changes[block.start] += block.bytes
        changes[block.end] -= block.bytes
    bytes_inside: dict[float, int] = {call.start: allocated.peak for call, allocated in measured}
    bytes_alive = 0
    most = 0
    moment_of_most: float = -1
    inside_at_most = 0
    for moment in sorted({*changes, *bytes_inside}):
        in_operator = bytes_inside.get(moment, 0)
        bytes_alive += changes[moment]
        if bytes_alive + in_operator > most:
            most = bytes_alive + in_operator
            moment_of_most = moment
            inside_at_most = in_operator
    kinds: Counter[str] = Counter()
    if inside_at_most:
        kinds[TEMPORARIES] = inside_at_most
    alive = [block for block in blocks if block.start <= moment_of_most < block.end and block.bytes]
    for block in alive:
        kinds[block.kind] += block.bytes
    passing = [block for block in alive if block.kind in (ACTIVATIONS, TEMPORARIES)]
    return Peak(most, kinds, sum(block.bytes for block in passing if block.columns in classes))


#: Called with the known tensors by kind.
Look = Callable[[Mapping[str, Iterable[Tensor]]], None]


@dataclasses.dataclass
class Event:
    """bytes > 0: allocated at `address`; < 0: released; 0: look number `address`."""

    address: int
    bytes: int


def recorded_peak(train: Callable[[Look], object], device: torch.device, other: str) -> Peak:
    """Run `train` and return its peak.

    `train` must create everything that it uses, and look whenever kinds may have changed. other: the kind of
    allocations that no look has found.
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
    return peak(blocks_of(record(train, address_kinds, device), looks, other))


def blocks_of(events: Sequence[Event], looks: Sequence[Mapping[int, str]], other: str) -> list[Block]:
    """Return the allocations. Releases of memory from before the first event do not count."""
    alive: dict[int, Block] = {}
    blocks = []
    for index, event in enumerate(events):
        if event.bytes == 0:
            for address, kind in looks[event.address].items():
                if address in alive:
                    alive[address].kind = kind
        elif event.bytes > 0:
            blocks.append(Block(event.bytes, index, other))
            alive[event.address] = blocks[-1]
        elif event.address in alive:
            alive.pop(event.address).end = index
    return blocks


def inside_of_calls(calls: Sequence[Callable[[], Callable[[], Any]]]) -> list[Inside | None]:
    """Return what calls of CPU operators allocate; None for calls that fail.

    calls: each makes operands and returns what calls the operator with them.
    """
    inside: list[Inside | None] = [None] * len(calls)
    marks: list[tuple[int, str]] = []

    def run(mark: Callable[[Any], None]) -> None:
        for number, call in enumerate(calls):
            with contextlib.suppress(Exception):  # the operator may refuse zeros
                run_once = call()
                mark((number, "begins"))
                result = run_once()
                mark((number, "ends"))
                del result, run_once

    bytes_alive = 0
    most = 0
    for event in _record_cpu(run, marks.append) if calls else ():
        bytes_alive += event.bytes
        most = max(most, bytes_alive)
        if event.bytes == 0:
            number, what = marks[event.address]
            if what == "begins":
                bytes_alive = 0
                most = 0
            else:
                inside[number] = Inside(most, max(bytes_alive, 0))
    return inside


def _record_cpu(
    train: Callable[..., object], look: Callable[[Any], None], device: torch.device | None = None
) -> list[Event]:
    count = 0

    def mark(held: Any) -> None:
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
    for entry in sorted((entry for entry in traced if "ts" in entry), key=lambda entry: entry["ts"]):
        if entry["name"] == "[memory]":
            events.append(Event(entry["args"]["Addr"], entry["args"]["Bytes"]))
        elif entry["name"].startswith("look ") and entry.get("cat") == "user_annotation":
            events.append(Event(int(entry["name"].removeprefix("look ")), 0))
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
    events = [(position, Event(number, 0)) for number, position in enumerate(positions)]
    signs = {"alloc": 1, "free_completed": -1}
    for position, entry in enumerate(traced[before:], before):
        if entry["action"] in signs:
            events.append((position, Event(entry["addr"], signs[entry["action"]] * entry["size"])))
    return [event for _, event in sorted(events, key=operator.itemgetter(0))]  # looks first
