"""Measures the cells of one model in this process, which run.py has started as one of its machines."""

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
from .emulated import KINDS, effects
from .loops import STOCK_VARIANTS, Training, ours
from .zoo import entries

#: The least and the most timed rounds. With fewer than six rounds there is no 95 % interval.
ROUNDS = (7, 101)


class Others:
    """Measures the share of the CPUs' time that other processes take from now on."""

    def __init__(self) -> None:
        self.start = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Return seconds by the clock, of work on all CPUs (other guests included), and of this process.

        None without /proc/stat.
        """
        if not Path("/proc/stat").exists():
            return None
        ticks = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        idle = ticks[3] + ticks[4]  # includes waiting for disks
        return time.monotonic(), (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK"), sum(os.times()[:2])

    def share(self) -> float | None:
        """Return the share, from 0 to 1; None if the system does not report it."""
        now = self._now()
        if self.start is None or now is None:
            return None
        clock, all_work, own = (after - before for before, after in zip(self.start, now, strict=True))
        return max(0.0, (all_work - own) / (clock * (os.cpu_count() or 1)))


class Turn:
    """A loop that trains on two windows alternately."""

    def __init__(self, way: LoopVariant, training: Training) -> None:
        self.loop = way.make(training)
        self.windows = [training.window(number) for number in range(2)]
        self.count = 0

    def __call__(self) -> None:
        self.loop.update(self.windows[self.count % 2])
        self.count += 1


def micro_batches(training: Training, seconds: float) -> int:
    """Return the micro-batches per window: a half or a quarter of all if the rounds would take too long."""
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
    """Time the loops in turns for about so many seconds, then record their peaks.

    A few first rounds find the fastest of stock's loops. Only that one is in the recorded rounds.
    """
    stock, own = STOCK_VARIANTS[training.precision], ours(training.precision)
    training = dataclasses.replace(training, steps=micro_batches(training, seconds))
    turns = {way.name: Turn(way, training) for way in (*stock, *own)}
    for turn in progress(turns.values(), f"{what}, first windows", "loop"):
        turn()  # compiles, tunes and allocates before anything is timed
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
    short = dataclasses.replace(training, steps=2)
    data = [short.window(number) for number in range(2)]
    peaks = {name: sum(way.peak(short, data).values()) for name, way in ways.items()}
    same = Row("", training.entry.name, training.precision, shapes=training.entry.shapes, others=others)
    rows = []
    for name in ways:
        held_to = baseline(name)
        median, low, high = ratio_of(times[held_to], times[name])
        speed = {**spread(times[name], 1e6), "ratio": median, "low": low, "high": high}
        memory = {"peak": peaks[name], "stock_peak": peaks[held_to]}
        own = {"loop": name, "steps": training.steps, "way": ways[held_to].name}
        rows.append(dataclasses.replace(same, **own, **speed, **memory))
    return rows


def measure(
    name: str, model: str, precisions: Sequence[str], seconds: float, path: Path | None, quick: bool
) -> None:
    """Add each cell's rows to the CSV at `path` as soon as it is measured, or one that says why it failed.

    All cells fail if this process is not the machine that it should be.
    """
    # U-Net has no layer that `model=` accepts. Its row shows that nothing is lost.
    warnings.filterwarnings("ignore", message="model= was given, but")
    kept = Results(path, "cpu", COLUMNS)
    found = effects()
    wrong = KINDS[name].wrong(found)
    effect = ", ".join(f"{library}: {what}" for library, what in found.items())
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
        kept.add([dataclasses.replace(r, machine=name, effects=effect, sources=sources()) for r in rows])
        figures = [f"{row.loop} {ratio(row)}" for row in rows if row.ratio and row.loop != STOCK]
        tqdm.write(f"{what}: {'; '.join(figures) or rows[0].note}")
        gc.collect()
