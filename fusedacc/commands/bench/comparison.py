"""Measure one case: check every variant, count its bytes, and time all in turns with a copy."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...kernels import registry
from ...kernels.selftest import first_line
from ...traffic import TrafficMeter
from .. import machine, timing
from ..timing import Run, Timer, rotated, spread
from .cases import OURS, STOCK, YARDSTICK, BenchVariant, Work

COPY = "copy of as many bytes as an ideal pass"
MEASURED = "measured"
NOT_MEASURED = "not measured"
WRONG = "wrong"

_MOST_CALLS = 1000
#: Calls per sample at least, if all use the same tensors: the first call finds other data in the caches.
_LEAST_WARM_CALLS = 10
#: Share of the free memory that a case may use.
SHARE = 0.25
#: Seconds of warm-up with the other sets.
_WARMING = 0.5
#: Tensors in all sets together, at most.
_MOST_TENSORS = 40_000

Entry = dict[str, Any]


@dataclass(frozen=True)
class Effort:
    """How much to measure."""

    name: str
    #: Of timing per case, within `least_rounds` and `most_rounds`.
    seconds: float
    least_rounds: int
    most_rounds: int
    #: Sets of tensors that take turns, at most.
    most_sets: int
    #: A sample makes as many calls as take this time.
    sample_seconds: float = 0.5e-3
    #: Bytes of all sets, if `most_sets` are enough; up to `most_times_cold` times as many if the caches are
    #: larger.
    cold_bytes: int = 64 * 2**20
    most_times_cold: int = 8


SHORT = Effort("short", seconds=1.8, least_rounds=11, most_rounds=61, most_sets=128)
FULL = Effort("full", seconds=4.0, least_rounds=21, most_rounds=101, most_sets=128, sample_seconds=1e-3)
#: Figures of an entry: `inexact` (why it is no baseline), `note`, `bytes` and `calls` of one call (`bytes` is
#: None if operators in `uncounted` have no rule), `samples` (seconds per call in each round), `host_seconds`
#: (to issue a call, on a GPU), `against` and so on.
_FIGURES = (
    *("inexact", "note", "bytes", "calls", "uncounted", "seconds", "samples"),
    *("gb_per_s", "percent_of_copy", "host_seconds", "against", "speed", "interval"),
)


def limit(device: torch.device) -> int:
    """Return the bytes that a case may use now."""
    return int(SHARE * machine.available_memory(device))


def our_backends(device: torch.device, effort: str) -> list[str]:
    """Return the backends to measure: "auto", and in a full run every other that can run here."""
    if effort != "full":
        return ["auto"]
    default = registry.select(device, torch.float32, torch.float32).backend.name
    others = [name for name in registry.order(device) if name != default]
    available = [
        name for name in others if registry.obstacle(name, device, torch.float32, torch.float32) is None
    ]
    return ["auto", *available]


def measure(work: Work, variants: Sequence[BenchVariant], effort: Effort, most: int) -> dict[str, Any]:
    """Measure the variants and a copy. Return the figures of the case, as plain values.

    `what`, `name`, `dtypes`, `sizes`, `warm` and `sets` describe the case, which may use `most` bytes.
    `backend` and `reason`: what "auto" selects. `why`: why nothing was measured, or None. `rounds`, and
    `ways`: the entries of `_entry`. Entries with role "fusedacc" have `speed`, the median over rounds of how
    many times as fast they are as the fastest PyTorch variant (`against`), and its 95 % `interval`.
    """
    backend, reason = work.chosen()
    facts: dict[str, Any] = {
        **{name: getattr(work, name) for name in ("what", "name", "title", "dtypes", "sizes", "warm")},
        "sets": _sets(work, effort, most),
        "backend": backend,
        "reason": reason,
        "why": None,
        "rounds": 0,
        "ways": [],
    }
    if facts["sets"] == 0:
        needed = work.set_bytes + work.moved + work.working_bytes
        facts["why"] = f"needs {needed} bytes; allowed: {most}, a quarter of the free memory"
        return facts
    try:
        facts["ways"] = _entries(work, variants, effort, facts["sets"])
    except (MemoryError, RuntimeError) as error:  # such as out of memory: go on with the other cases
        facts["why"] = first_line(error)
    facts["rounds"] = max((len(entry["samples"]) for entry in facts["ways"]), default=0)
    return facts


def _sets(work: Work, effort: Effort, most: int) -> int:
    """Return how many sets of tensors take turns, so that a call finds none of its tensors in a cache."""
    room = (most - work.working_bytes) // max(1, work.set_bytes + work.moved)
    if room < 1 or work.warm:
        return max(0, min(1, room))
    caches = (4 if work.device.type == "cuda" else 2) * machine.cache_bytes(work.device)
    cold = max(effort.cold_bytes, min(caches, effort.most_times_cold * effort.cold_bytes))
    wanted = math.ceil(cold / max(1, work.set_bytes))
    return max(1, min(wanted, effort.most_sets, room, _MOST_TENSORS // work.tensors))


def _entries(work: Work, variants: Sequence[BenchVariant], effort: Effort, sets: int) -> list[Entry]:
    tensors = [work.make() for _ in range(sets)]
    copies = [timing.copy_of(work.moved, work.device) for _ in range(sets)]
    checked = [_checked(work, variant, tensors) for variant in variants]
    entries = [*(entry for entry, _ in checked), _entry(COPY, YARDSTICK, MEASURED)]
    runs = {entry["name"]: run for entry, run in checked if run is not None} | {COPY: rotated(copies)}
    _count(entries[-1], runs[COPY])
    if work.device.type == "cuda":
        for entry in (entry for entry in entries if entry["name"] in runs):
            entry["host_seconds"] = timing.host_seconds(runs[entry["name"]])
    timer = timing.timer_for(work.device)
    calls, rounds = samples_and_rounds(runs, timer, effort, _LEAST_WARM_CALLS if work.warm else 1)
    times = timing.take_turns(runs, range(-1, rounds), timer, calls)
    for entry in (entry for entry in entries if entry["name"] in times):
        samples = times[entry["name"]]
        entry["samples"] = samples
        entry["seconds"] = {name: value for name, value in spread(samples).items() if name != "rounds"}
        if entry["bytes"] is not None:
            entry["gb_per_s"] = entry["bytes"] / entry["seconds"]["median"] / 1e9
    _compare(entries)
    return entries


def samples_and_rounds(
    runs: Mapping[str, Run], timer: Timer, effort: Effort, least_calls: int = 1
) -> tuple[dict[str, int], int]:
    """Return the calls per sample of each variant, and the number of rounds there is time for."""
    with timing.garbage_uncollected():
        once = {name: statistics.median(timer(run, 1) for _ in range(3)) for name, run in runs.items()}
    calls = {
        name: max(least_calls, min(_MOST_CALLS, math.ceil(effort.sample_seconds / max(seconds, 1e-7))))
        for name, seconds in once.items()
    }
    rounds = int(effort.seconds / max(sum(calls[name] * once[name] for name in runs), 1e-7))
    return calls, max(effort.least_rounds, min(effort.most_rounds, rounds))


def _entry(name: str, role: str, status: str, why: str | None = None) -> Entry:
    """Return an entry without figures. why: why it was not measured, or what is wrong."""
    figures = dict.fromkeys(_FIGURES) | {"uncounted": {}, "samples": []}
    return {"name": name, "role": role, "status": status, "why": why, **figures}


def _checked(work: Work, variant: BenchVariant, tensors: Sequence[Any]) -> tuple[Entry, Run | None]:
    """Return the variant's entry, and what calls it with each set in turn unless it failed."""
    entry = functools.partial(_entry, variant.name, variant.role)
    if variant.obstacle is not None:
        return entry(NOT_MEASURED, variant.obstacle), None
    try:
        runs = [variant.make(set_of_tensors) for set_of_tensors in tensors]
        problem = None
        if variant.role == YARDSTICK:
            runs[0]()
        else:
            problem = work.check(variant, runs[0], tensors[0])
    except Exception as error:  # report whatever torch or a broken installation raises
        return entry(WRONG if variant.role == OURS else NOT_MEASURED, first_line(error)), None
    if problem is not None:
        return entry(WRONG, problem), None
    start = time.perf_counter()
    for run in runs[1:]:
        if time.perf_counter() - start > _WARMING:  # hundreds of sets of a slow form
            break
        run()
    measured = entry(MEASURED) | {"inexact": variant.inexact, "note": work.notes.get(variant.name)}
    _count(measured, runs[0])
    return measured, rotated(runs)


def _count(entry: Entry, run: Run) -> None:
    with TrafficMeter() as meter:
        run()
    entry["calls"] = meter.calls
    entry["uncounted"] = meter.uncounted
    entry["bytes"] = None if meter.uncounted else meter.total_bytes


def _compare(entries: Sequence[Entry]) -> None:
    """Add the share of the copy's bandwidth, and for ours the speed against the fastest PyTorch variant."""
    copy = entries[-1]["gb_per_s"]
    for entry in entries:
        if entry["gb_per_s"] is not None:
            entry["percent_of_copy"] = 100 * entry["gb_per_s"] / copy
    base = fastest([entry for entry in entries if entry["role"] == STOCK and not entry["inexact"]])
    if base is None:
        return
    for entry in entries:
        if entry["role"] == OURS and entry["samples"]:
            entry["against"] = base["name"]
            entry["speed"], *entry["interval"] = timing.ratio(base["samples"], entry["samples"])


def fastest(entries: Sequence[Entry]) -> Entry | None:
    """Return the entry with the lowest median; None if nothing was measured."""
    timed = [entry for entry in entries if entry["seconds"]]
    return min(timed, key=lambda entry: entry["seconds"]["median"], default=None)
