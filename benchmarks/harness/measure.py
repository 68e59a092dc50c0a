"""Variants timed in turns, as rows."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from tqdm import tqdm

from fusedacc.commands.bench.timing import Timer, cpu_timer, in_turn, queued_timer
from fusedacc.traffic import TrafficMeter

from .results import Case, Row, reached, row, spread

#: Variants of these names measure the machine: the peak is the faster of them.
PEAK = ("copy", "triad")


@dataclasses.dataclass(frozen=True)
class Goal:
    """To be `at_least` so many times as fast as the variant `against` (0: no goal, only the ratio),
    in bytes per second if `by_bandwidth`, else in calls per second."""

    against: str
    at_least: float = 0.0
    by_bandwidth: bool = False


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to do the work.

    `bytes`: read and written by one call, each operand counted once (0: show no bandwidth). `launches`:
    operators (CPU) or kernels (CUDA) of one call. `host_us`: see `Row`. `note`: what a reader must know.
    """

    name: str
    run: Callable[[], object]
    bytes: int = 0
    goals: tuple[Goal, ...] = ()
    launches: int | None = None
    host_us: float | None = None
    note: str = ""


def timer_for(device: torch.device | str) -> Timer:
    """The device's time on a GPU, with the calls queued in advance; else the host's."""
    return queued_timer if torch.device(device).type == "cuda" else cpu_timer


def in_turns(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    what: str,
    calls: int = 1,
    timer: Callable[[Callable[[], object], int], Any] = cpu_timer,
) -> dict[str, list[Any]]:
    """What `timer` finds of each in each round, by name: once per round, after one round that does not count,
    in the order of `timing.in_turn`. `what`: is shown beside the progress.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1; got {rounds}")
    found: dict[str, list[Any]] = {name: [] for name in runs}
    for index in progress(range(-1, rounds), what, "round"):
        for name in in_turn(list(runs), index):
            seconds = timer(runs[name], calls)
            if index >= 0:
                found[name].append(seconds)
    return found


def measure(
    case: Case,
    variants: Sequence[Variant],
    rounds: int,
    calls: int = 1,
    timer: Timer = cpu_timer,
) -> list[Row]:
    """Rows of the times that `in_turns` finds."""
    times = in_turns({variant.name: variant.run for variant in variants}, rounds, case.case, calls, timer)
    return rows_of(case, variants, times)


def rows_of(case: Case, variants: Sequence[Variant], times: Mapping[str, Sequence[float]]) -> list[Row]:
    """Rows of the seconds that each variant took in each round."""
    moved = {variant.name: variant.bytes for variant in variants}
    peaks = [moved[name] / statistics.median(times[name]) for name in PEAK if name in moved]
    rows = []
    for variant in variants:
        own = times[variant.name]
        median = statistics.median(own)
        figure = row(
            case,
            variant.name,
            **spread(own, 1e6),
            launches=variant.launches,
            host_us=variant.host_us,
            note=variant.note,
        )
        if variant.bytes:
            bandwidth = variant.bytes / median
            share = 100 * bandwidth / max(peaks) if peaks else None
            figure = dataclasses.replace(
                figure, bytes=variant.bytes, gb_per_s=bandwidth / 1e9, percent_of_peak=share
            )
        rows += [_against(figure, goal, times, moved) for goal in variant.goals] or [figure]
    return rows


def _against(figure: Row, goal: Goal, times: Mapping[str, Sequence[float]], moved: dict[str, int]) -> Row:
    pairs = zip(times[goal.against], times[figure.provider], strict=True)
    speedup = statistics.median(base / own for base, own in pairs)
    if goal.by_bandwidth:
        speedup *= moved[figure.provider] / moved[goal.against]
    return dataclasses.replace(
        figure,
        against=goal.against + (" (bytes/s)" if goal.by_bandwidth else ""),
        speedup=speedup,
        goal=goal.at_least or None,
        reached=reached(speedup, goal.at_least),
    )


def counted(run: Callable[[], object], parameters: Any = None) -> TrafficMeter:
    """A meter that has seen one call. RuntimeError where an operator has no rule."""
    with TrafficMeter(parameters) as meter:
        run()
    if meter.uncounted:
        raise RuntimeError(f"uncounted: {', '.join(meter.uncounted)}")
    return meter


def progress(items: Iterable, what: str, unit: str, total: int | None = None) -> Iterable:
    """A bar on standard error, gone when it is done. `total`: how many there are of what has no length."""
    return tqdm(items, desc=what, unit=unit, total=total, dynamic_ncols=True, leave=False)
