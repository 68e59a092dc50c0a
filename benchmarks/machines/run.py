"""Training of real models against the best plain PyTorch loop, on this machine and on emulated smaller ones.

A machine (emulated.py) is a set of environment variables for a new process, which checks their effect. A cell
is one model of zoo/ in one precision on one machine; its rows go to benchmarks/results/machines.csv at once.
A rerun measures the cells that are missing or that other processes disturbed, and all cells after the sources
or the versions have changed. cells.py has the goals.

    python -m benchmarks.machines.run [--quick] [--only native/gpt-*/float32,avx2] [--minutes 55] [--report]
"""

import argparse
import dataclasses
import fnmatch
import functools
import gc
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

if multiprocessing.parent_process() is None:
    # Otherwise this process, and what it starts, is pinned to one core when torch is loaded.
    os.environ["OMP_PROC_BIND"] = "false"

import torch
from tqdm import tqdm

from fusedacc.commands.measuring.records import Results, first_line, spread
from fusedacc.commands.measuring.timing import ratio as ratio_of
from fusedacc.commands.measuring.timing import take_turns

from ..harness import INTERRUPTED, ROOT, open_results, progress, rounds
from . import cells
from .cells import COLUMNS, RESULTS, STOCK, Key, Row, disturbed, finished, sources
from .emulated import KINDS, MACHINES, effects, flags
from .loops import PRECISIONS, STOCK_VARIANTS, Training, ours, turn
from .zoo import entries

#: Seconds that a process takes before it measures, and that a cell takes besides its timing.
START, BESIDE = 5.0, 3.0
#: The most and the least seconds to time a cell.
MOST, LEAST = 8.0, 2.0
QUICK = 0.2
#: The least and the most timed rounds. With fewer than six rounds there is no 95 % interval.
ROUNDS = (7, 101)
#: A process is killed after so many seconds.
HUNG = 600


def wanted(patterns: str | None) -> list[Key]:
    """Return the cells that match one of the comma-separated patterns machine/model/precision.

    A part that is left out matches anything. Raises SystemExit for a pattern that matches no cell.
    """
    cells = [(m.name, model, p) for m in MACHINES for model in entries() for p in PRECISIONS]
    chosen = set()
    for pattern in patterns.split(",") if patterns else ("*",):
        parts = [*pattern.strip().split("/"), "*", "*"][:3]
        matched = {cell for cell in cells if all(map(fnmatch.fnmatchcase, cell, parts))}
        if not matched:
            names = ["; ".join(dict.fromkeys(cell[place] for cell in cells)) for place in range(3)]
            raise SystemExit(f"--only: {pattern!r} matches no cell; allowed: {' / '.join(names)}")
        chosen |= matched
    return [cell for cell in cells if cell in chosen]


def possible(cells: Sequence[Key], kept: Results, done: dict[tuple[str, ...], Row]) -> list[Key]:
    """Return the cells of machines that can be emulated here; add a row with the reason for each other."""
    here = flags()
    why = {name: kind.left_out(here) for name, kind in KINDS.items()}
    for name in dict.fromkeys(cell[0] for cell in cells):
        if why[name] and (name, "", "", "") not in done:
            kept.add([Row(name, sources=sources(), note=why[name])])
    return [cell for cell in cells if not why[cell[0]]]


def missing(cells: Sequence[Key], done: dict[tuple[str, ...], Row]) -> list[Key]:
    """Return the cells that have no rows, or disturbed ones."""
    rows = {cell: done.get((*cell, STOCK)) for cell in cells}
    return [cell for cell, row in rows.items() if row is None or disturbed(row)]


class Others:
    """Measures the share of the CPUs' time that other processes take from now on."""

    def __init__(self) -> None:
        self.start = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Return seconds by the clock, of work on all CPUs (other guests too), and of this process."""
        if not Path("/proc/stat").exists():
            return None
        ticks = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        idle = ticks[3] + ticks[4]  # includes waiting for disks
        return time.monotonic(), (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK"), sum(os.times()[:2])

    def share(self) -> float | None:
        """Return the share, from 0 to 1; None without /proc/stat."""
        now = self._now()
        if self.start is None or now is None:
            return None
        clock, all_work, own = (after - before for before, after in zip(self.start, now, strict=True))
        return max(0.0, (all_work - own) / (clock * (os.cpu_count() or 1)))


def micro_batches(training: Training, seconds: float) -> int:
    """Return the micro-batches per window: a half or a quarter of all if the rounds would take too long."""
    model = training.model()
    parameters = list(model.parameters())
    for batch in training.window(0)[:2]:
        start = time.perf_counter()
        torch.autograd.grad(training.loss(model, *batch), parameters)
        took = time.perf_counter() - start
    steps, loops = training.steps, len(cells.names(training.precision))
    while steps > 2 and took * steps * loops * ROUNDS[0] > 2 * seconds:
        steps //= 2
    return steps


def cell(training: Training, seconds: float, what: str) -> list[Row]:
    """Time the loops in turns for about so many seconds, then record their peaks.

    A few first rounds find the fastest of stock's loops. Only that one is in the recorded rounds.
    """
    stock, own = STOCK_VARIANTS[training.precision], ours(training.precision)
    training = dataclasses.replace(training, steps=micro_batches(training, seconds))
    turns = {way.name: turn(way, training) for way in (*stock, *own)}
    for train in progress(turns.values(), f"{what}, first windows", "loop"):
        train()  # compiles, tunes and allocates before anything is timed
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
        held_to = cells.baseline(name)
        median, low, high = ratio_of(times[held_to], times[name])
        speed = {**spread(times[name], 1e6), "ratio": median, "low": low, "high": high}
        memory = {"peak": peaks[name], "stock_peak": peaks[held_to]}
        own = {"loop": name, "steps": training.steps, "way": ways[held_to].name}
        rows.append(dataclasses.replace(same, **own, **speed, **memory))
    return rows


def measure_here(
    name: str, model: str, precisions: Sequence[str], seconds: float, path: Path | None, quick: bool
) -> None:
    """In this process, add each cell's rows to the CSV as soon as it is measured, or why it failed.

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
        figures = [f"{row.loop} {cells.ratio(row)}" for row in rows if row.ratio and row.loop != STOCK]
        tqdm.write(f"{what}: {'; '.join(figures) or rows[0].note}")
        gc.collect()


def measure(cells: Sequence[Key], kept: Results, caches: Path, minutes: float, quick: bool) -> bool:
    """Measure the cells, in a new process per machine and model. Return whether there was time for all."""
    end = time.monotonic() + 60 * minutes
    todo: dict[tuple[str, str], list[str]] = {}
    for name, model, precision in cells:
        todo.setdefault((name, model), []).append(precision)
    cells_left = len(cells)
    for index, ((name, model), precisions) in enumerate(todo.items()):
        remaining = end - time.monotonic()
        if remaining <= 0:
            return False
        text = f"{index + 1} of {len(todo)}: {name}, {model}; at most {remaining / 60:.0f} minutes are left"
        print(text, file=sys.stderr)
        share = (remaining - START * (len(todo) - index)) / cells_left - BESIDE
        seconds = QUICK if quick else min(max(share, LEAST), MOST)
        run(name, model, precisions, seconds, kept, caches, quick)
        cells_left -= len(precisions)
    return True


def run(
    name: str, model: str, precisions: Sequence[str], seconds: float, kept: Results, caches: Path, quick: bool
) -> None:
    """Measure in one process, which writes its rows itself. If it fails, add a row that says so."""
    digest, arguments = sources(), (name, model, precisions, seconds, kept.path, quick)
    process = multiprocessing.get_context("spawn").Process(target=measure_here, args=arguments)
    with mock.patch.dict(os.environ, KINDS[name].environment(caches, digest)):
        process.start()
    process.join(HUNG)
    why = f"its process ended with {process.exitcode}" if process.exitcode else ""
    if process.is_alive():
        process.kill()
        why = f"its process took longer than {HUNG} seconds"
    if why:
        kept.add([Row(name, model, sources=digest, note=f"not run: {why}")])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny models; only --results records them")
    parser.add_argument("--only", help="comma-separated patterns machine/model/precision (default: all)")
    parser.add_argument("--minutes", type=float, default=55, help="stop after so long (%(default)s)")
    parser.add_argument("--results", type=Path, help=f"the CSV ({RESULTS.relative_to(ROOT)})")
    parser.add_argument("--report", action="store_true", help="only print the table of what was measured")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.results or (Path(folder, "quick.csv") if options.quick else RESULTS)
        kept = open_results(path, "cpu", COLUMNS)
        chosen = wanted(options.only)
        found = functools.partial(finished, path, kept.conditions, sources())
        done = found()
        can = possible(chosen, kept, done)
        todo = missing(can, done)
        interrupted, complete = False, True
        if not options.report:
            print(f"{len(todo)} cells to measure, {len(can) - len(todo)} already measured", file=sys.stderr)
            caches = Path(folder) if options.quick else ROOT / "build" / "machines"
            try:
                complete = measure(todo, kept, caches, options.minutes, options.quick)
            except KeyboardInterrupt:
                interrupted = True
        print(cells.report(row for row in found().values() if row.key in chosen or not row.model))
    if interrupted or not complete:
        print("\nnot all cells are measured; run the same command again to continue", file=sys.stderr)
    if interrupted:
        raise SystemExit(INTERRUPTED)


if __name__ == "__main__":
    main()
