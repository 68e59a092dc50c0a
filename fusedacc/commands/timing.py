"""Time variants in turns, and compute how certain the results are."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

Run = Callable[[], object]
#: Takes a function and a number of calls; returns the seconds per call or another measure.
Timer = Callable[[Run, int], Any]
Calls = int | Mapping[str, int]


@contextlib.contextmanager
def garbage_uncollected() -> Iterator[None]:
    """Context: disable the garbage collector."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def cpu_timer(run: Run, calls: int) -> float:
    """Return the seconds per call on the host."""
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - begin) / calls


def queued_timer(run: Run, calls: int) -> float:
    """Return the seconds per call on the current CUDA device.

    The calls are queued behind a kernel that waits, so the host's time does not count. A call that
    synchronizes or fills the queue shows its real time.
    """
    torch.cuda.synchronize()
    issue = cpu_timer(run, 1)
    return device_seconds(run, calls, min(0.05, 20e-6 + 1.5 * calls * issue))


def timer_for(device: torch.device | str) -> Timer:
    """Return `queued_timer` for a GPU, else `cpu_timer`."""
    return queued_timer if torch.device(device).type == "cuda" else cpu_timer


def device_seconds(run: Run, calls: int, ahead: float) -> float:
    """Return the seconds per call on the current CUDA device, after it has waited `ahead` seconds."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    cycles_per_second = 2e9  # above that of today's GPUs: rather wait too long
    torch.cuda._sleep(int(cycles_per_second * ahead))
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def host_seconds(run: Run) -> float:
    """Return the median seconds to issue one call into an empty queue of the current CUDA device."""
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        times.append(cpu_timer(run, 1))
    torch.cuda.synchronize()
    return statistics.median(times)


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; do nothing for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_of(moved: int, device: torch.device) -> Run:
    """Return a copy that reads and writes so many bytes, at least eight."""
    source = torch.ones(max(1, moved // 8), dtype=torch.float32, device=device)
    return functools.partial(torch.zeros_like(source).copy_, source)


def rotated(runs: Sequence[Run]) -> Run:
    """Return a function that calls the next of `runs` each time."""
    following = itertools.cycle(runs)
    return runs[0] if len(runs) == 1 else lambda: next(following)()


def in_turn(names: Sequence[str], index: int) -> list[str]:
    """Return the order of round `index`.

    It shifts by one each round and is reversed in every second one, so that no variant always follows the
    same other.
    """
    turn = index % len(names)
    order = [*names[turn:], *names[:turn]]
    return order[::-1] if index % 2 else order


def take_turns(
    runs: Mapping[str, Run], rounds: Iterable[int], timer: Timer = cpu_timer, calls: Calls = 1
) -> dict[str, list[Any]]:
    """Time every variant once per round, in the order of `in_turn`.

    Rounds with negative numbers warm up and are not recorded. `calls`: of each sample; by name if they
    differ. Returns what `timer` returned in each recorded round, by name.
    """
    samples: dict[str, list[Any]] = {name: [] for name in runs}
    with garbage_uncollected():
        for index in rounds:
            for name in in_turn(list(runs), index):
                sample = timer(runs[name], calls if isinstance(calls, int) else calls[name])
                if index >= 0:
                    samples[name].append(sample)
    return samples


def quantile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank quantile."""
    return sorted(values)[round(share * (len(values) - 1))]


def spread(values: Sequence[float], scale: float = 1.0) -> dict[str, float | int]:
    """Return the columns of what was measured in each round."""
    scaled = [scale * value for value in values]
    ends = {"p20": quantile(scaled, 0.2), "p80": quantile(scaled, 0.8)}
    return {"median": statistics.median(scaled), **ends, "rounds": len(scaled)}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a 95 % interval of the median, for any distribution.

    It reaches from one order statistic to another: by the binomial distribution, the median lies outside in
    at most 5 % of cases. Fewer than six values are too few: then it is their whole range.
    """
    count = len(values)
    rank = 0
    outside = 0.5**count
    while outside <= 0.025:
        rank += 1
        outside += math.comb(count, rank) * 0.5**count
    ordered = sorted(values)
    return ordered[max(rank, 1) - 1], ordered[-max(rank, 1)]


def ratio(over: Sequence[float], under: Sequence[float]) -> tuple[float, float, float]:
    """Return the median over rounds of the ratio within a round, and the ends of its `interval`.

    Other programs slow both runs of a pair, so the median of ratios is steadier than a ratio of medians.
    """
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    return (statistics.median(ratios), *interval(ratios))
