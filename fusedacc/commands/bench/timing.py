"""Ways timed in turns, and what is certain of a median."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Run = Callable[[], object]
#: Seconds per call of so many calls.
Timer = Callable[[Run, int], float]

_MOST_CALLS = 1000


@dataclass(frozen=True)
class Effort:
    """How much to measure.

    `seconds`: of timing in each case, within `least_rounds` and `most_rounds`. `sample_seconds`: one sample
    makes as many calls as take that long. `cold_bytes`: sets of tensors that take turns hold so many bytes
    together, if `most_sets` are enough.
    """

    name: str
    seconds: float
    least_rounds: int
    most_rounds: int
    sample_seconds: float
    cold_bytes: int
    most_sets: int


SHORT = Effort("short", 1.8, 11, 61, 0.5e-3, 64 * 2**20, 128)
FULL = Effort("full", 4.0, 21, 101, 1e-3, 64 * 2**20, 128)


def cpu_timer(run: Run, calls: int) -> float:
    """Seconds per call on the host."""
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def queued_timer(run: Run, calls: int) -> float:
    """Seconds per call on the current CUDA device, the calls being queued behind a kernel that waits.

    So it is not the host that is timed; a call that synchronises, or fills the queue, shows as the time it
    takes.
    """
    torch.cuda.synchronize()
    issue = cpu_timer(run, 1)
    return device_seconds(run, calls, min(0.05, 20e-6 + 1.5 * calls * issue))


def device_seconds(run: Run, calls: int, ahead: float) -> float:
    """Seconds per call on the current CUDA device, which waits for `ahead` seconds before the first."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    cycles_per_second = 2e9  # at most that, on any GPU of today: it waits too long rather than too short
    torch.cuda._sleep(int(cycles_per_second * ahead))
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def host_seconds(run: Run) -> float:
    """Median seconds to issue one call into an empty queue of the current CUDA device."""
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        times.append(cpu_timer(run, 1))
    torch.cuda.synchronize()
    return statistics.median(times)


def in_turn(names: Sequence[str], index: int) -> list[str]:
    """The order of round `index`: it turns by one with each round, and runs backwards in every second one, so
    that no way always follows the same other."""
    turn = index % len(names)
    order = [*names[turn:], *names[:turn]]
    return order[::-1] if index % 2 else order


def take_turns(ways: Mapping[str, Run], timer: Timer, effort: Effort) -> dict[str, list[float]]:
    """Seconds per call of every way, once per round, in the order of `in_turn`.

    One round is not timed. The garbage collector waits meanwhile.
    """
    names = list(ways)
    collects = gc.isenabled()
    gc.disable()
    try:
        once = {name: statistics.median(timer(ways[name], 1) for _ in range(3)) for name in names}
        calls = {
            name: max(1, min(_MOST_CALLS, math.ceil(effort.sample_seconds / max(seconds, 1e-7))))
            for name, seconds in once.items()
        }
        per_round = sum(calls[name] * once[name] for name in names)
        rounds = int(effort.seconds / max(per_round, 1e-7))
        rounds = max(effort.least_rounds, min(effort.most_rounds, rounds))
        times: dict[str, list[float]] = {name: [] for name in names}
        for index in range(-1, rounds):
            for name in in_turn(names, index):
                seconds = timer(ways[name], calls[name])
                if index >= 0:
                    times[name].append(seconds)
    finally:
        if collects:
            gc.enable()
    return times


def quantile(values: Sequence[float], share: float) -> float:
    """The nearest-rank quantile."""
    return sorted(values)[round(share * (len(values) - 1))]


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """A 95 % interval of the median of what the values are drawn from, whatever its distribution.

    It reaches from one order statistic to another: by the binomial distribution the median lies outside in at
    most 5 of 100 cases. None for fewer than six values, which cannot tell.
    """
    count, rank, outside = len(values), 0, 0.5 ** len(values)
    while outside <= 0.025:
        rank += 1
        outside += math.comb(count, rank) * 0.5**count
    ordered = sorted(values)
    return (ordered[rank - 1], ordered[-rank]) if rank else None
