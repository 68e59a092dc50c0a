"""Training of real models against the best plain PyTorch loop, on this machine and on emulated smaller ones.

A machine (emulated.py) is a set of environment variables for a new process, which checks their effect. A cell
is one model of zoo/ in one precision on one machine; its rows go to benchmarks/results/machines.csv at once.
A rerun measures the cells that are missing or that other processes disturbed, and all cells after the sources
or the versions have changed. cells.py has the goals.

    python -m benchmarks.machines.run [--quick] [--only native/gpt-*/float32,avx2] [--minutes 55] [--report]
"""

import argparse
import fnmatch
import functools
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

if multiprocessing.parent_process() is None:
    # Otherwise this process, and what it starts, is pinned to one core when torch is loaded.
    os.environ["OMP_PROC_BIND"] = "false"

from fusedacc.commands.measuring.records import Results

from ..harness import INTERRUPTED, ROOT, open_results
from . import child
from .cells import COLUMNS, RESULTS, STOCK, Key, Row, disturbed, finished, report, sources
from .emulated import KINDS, MACHINES, flags
from .loops import PRECISIONS
from .zoo import entries

#: Seconds that a process takes before it measures, and that a cell takes besides its timing.
START, BESIDE = 5.0, 3.0
#: The most and the least seconds to time a cell.
MOST, LEAST = 8.0, 2.0
QUICK = 0.2
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


def measure(cells: Sequence[Key], kept: Results, caches: Path, minutes: float, quick: bool) -> bool:
    """Measure the cells until the time is up, one new process per machine and model.

    Returns whether there was time for all cells.
    """
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
    process = multiprocessing.get_context("spawn").Process(target=child.measure, args=arguments)
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
        print(report(row for row in found().values() if row.key in chosen or not row.model))
    if interrupted or not complete:
        print("\nnot all cells are measured; run the same command again to continue", file=sys.stderr)
    if interrupted:
        raise SystemExit(INTERRUPTED)


if __name__ == "__main__":
    main()
