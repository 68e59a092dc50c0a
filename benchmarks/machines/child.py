"""Measures the cells of one model in this process, which run.py has started as one of its machines."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import statistics
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from fusedacc.commands.measuring.records import Results, first_line, spread
from fusedacc.commands.measuring.timing import ratio as ratio_of
from fusedacc.commands.measuring.timing import take_turns

from ..contestants.loops import LoopVariant
from ..harness import progress, rounds
from .cells import COLUMNS, STOCK, Row, baseline, names, ratio, sources
from .emulated import MACHINES, effects
from .loops import PRECISIONS, STOCK_VARIANTS, Training, ours
from .zoo import entries

#: The least and the most rounds that are timed: of fewer than seven the interval is no 95 %.
ROUNDS = (7, 101)


class Others:
    """How much of the CPUs' time other processes take from here on."""

    def __init__(self) -> None:
        self.start = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Seconds: by the clock, of all CPUs at work or held by other guests, and of this process at work.
        None where there is no /proc/stat."""
        if not Path("/proc/stat").exists():
            return None
        ticks = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        idle = ticks[3] + ticks[4]  # with waiting for disks
        return time.monotonic(), (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK"), sum(os.times()[:2])

    def share(self) -> float | None:
        """Of the CPUs' time, from 0 to 1; None where it cannot be told."""
        now = self._now()
        if self.start is None or now is None:
            return None
        clock, all_work, own = (after - before for before, after in zip(self.start, now, strict=True))
        return max(0.0, (all_work - own) / (clock * (os.cpu_count() or 1)))


class Turn:
    """A loop that trains on two windows in turn."""

    def __init__(self, way: LoopVariant, training: Training) -> None:
        self.loop = way.make(training)
        self.windows = [training.window(number) for number in range(2)]
        self.count = 0

    def __call__(self) -> None:
        self.loop.update(self.windows[self.count % 2])
        self.count += 1


def micro_batches(training: Training, seconds: float) -> int:
    """How many make a window: all, unless the least number of rounds would take far longer than `seconds`;
    then half of them, or a quarter."""
    model = training.model()
    parameters = list(model.parameters())
    for batch in training.window(0)[:2]:
        start = time.perf_counter()
        torch.autograd.grad(training.loss(model, *batch), parameters)
        took = time.perf_counter() - start
    steps, loops = training.steps, len(names(training.precision))
    while steps > 2 and took * steps * loops * ROUNDS[0] > 2 * seconds:
        steps //= 2
    return steps


def cell(training: Training, seconds: float, what: str) -> list[Row]:
    """Times the loops in turns for about so many seconds, then takes their peaks.

    A few rounds of stock's ways say which of them is the fastest; the others are not in those that count.
    """
    stock, own = STOCK_VARIANTS[training.precision], ours(training.precision)
    training = dataclasses.replace(training, steps=micro_batches(training, seconds))
    turns = {way.name: Turn(way, training) for way in (*stock, *own)}
    for turn in progress(turns.values(), f"{what}, first windows", "loop"):
        turn()  # what is compiled, tried and allocated once takes no part of the time
    end = time.perf_counter() + seconds
    theirs = {way.name: turns[way.name] for way in stock}
    first = take_turns(theirs, rounds(3 if len(stock) > 1 else 1, f"{what}, first rounds"))
    medians = {name: statistics.median(times) for name, times in first.items()}
    best = min(stock, key=lambda way: medians[way.name])
    ways = {STOCK: best, **{way.name: way for way in own}}
    runs = {name: turns[way.name] for name, way in ways.items()}
    del turns, theirs
    gc.collect()
    count = int((end - time.perf_counter()) / (len(runs) * medians[best.name])) - 1
    busy = Others()
    times = take_turns(runs, rounds(min(max(count, ROUNDS[0]), ROUNDS[1]), what))
    others = busy.share()
    del runs
    gc.collect()
    peaks = {name: peak(way, training) for name, way in ways.items()}

    rows = []
    for name in ways:
        held_to = baseline(name)
        median, low, high = ratio_of(times[held_to], times[name])
        rows.append(
            Row(
                machine="",
                model=training.entry.name,
                precision=training.precision,
                loop=name,
                shapes=training.entry.shapes,
                steps=training.steps,
                **spread(times[name], 1e6),
                way=ways[held_to].name,
                ratio=median,
                low=low,
                high=high,
                peak=peaks[name],
                stock_peak=peaks[held_to],
                others=others,
            )
        )
    return rows


def peak(way: LoopVariant, training: Training) -> int:
    """Live bytes through two updates of two micro-batches."""
    training = dataclasses.replace(training, steps=2)
    data = [training.window(number) for number in range(2)]
    return sum(way.peak(training, data).values())


def measure(
    name: str, model: str, precisions: Sequence[str], seconds: float, kept: Results, quick: bool
) -> None:
    """Adds each cell's rows as soon as it is measured, or one that says why it could not be: none can, if
    this process is not the machine that it should be.
    """
    (kind,) = (known for known in MACHINES if known.name == name)
    found = effects()
    wrong = kind.wrong(found)
    told = ", ".join(f"{library}: {what}" for library, what in found.items())
    same = {"machine": name, "effects": told, "sources": sources()}
    for precision in precisions:
        what = f"{name}, {model}, {precision}"
        try:
            if wrong:
                raise RuntimeError(f"settings took no effect: {wrong}")
            rows = cell(Training(entries(quick)[model], precision), seconds, what)
        except Exception as error:
            with tqdm.external_write_mode():
                traceback.print_exc()
            rows = [Row("", model, precision, note=f"not run: {first_line(error)}")]
        rows = [dataclasses.replace(row, **same) for row in rows]
        kept.add(rows)
        figures = [f"{row.loop} {ratio(row)}" for row in rows if row.ratio and row.loop != STOCK]
        tqdm.write(f"{what}: {'; '.join(figures) or rows[0].note}")
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", required=True, choices=[kind.name for kind in MACHINES])
    parser.add_argument("--model", required=True)
    parser.add_argument("--precisions", required=True, help=f"some of {', '.join(PRECISIONS)}")
    parser.add_argument("--seconds", type=float, required=True, help="that a cell may take to be timed")
    parser.add_argument("--results", type=Path, help="the CSV; without it nothing is recorded")
    parser.add_argument("--quick", action="store_true", help="tiny models")
    options = parser.parse_args()
    # U-Net has no layer that `model=` takes; a row of it shows that nothing is lost.
    warnings.filterwarnings("ignore", message="model= was given, but")
    precisions = options.precisions.split(",")
    kept = Results(options.results, "cpu", COLUMNS)
    measure(options.machine, options.model, precisions, options.seconds, kept, options.quick)


if __name__ == "__main__":
    main()
