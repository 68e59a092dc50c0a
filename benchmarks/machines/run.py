"""Training on real models against the best stock loop, on this machine and on lesser ones that it emulates.

Machines (emulated.py) are environment variables for a fresh process, which looks at what took effect.
On each, every model of zoo/ is trained in four precisions by the fastest of stock's exact loops, by fusedacc,
and by fusedacc with `model=`, under autocast also with `keep_casts=True`; all with the fused AdamW, clipping,
and windows of eight micro-batches (fewer where one takes too long). A cell, one model in one precision on one
machine, is a few rows of benchmarks/results/machines.csv as soon as it is measured; a rerun goes on with
those that are missing, or that other processes disturbed. All are measured anew when the sources or the
versions have changed.

A loop falls short where the upper end of the 95 % interval of its median ratio is below 0.98; `model=` is to
be at least 1.05 in the median over all cells; no peak may be above stock's by more than 1 MB and 1 %. For
`keep_casts=True`, `model=` without it stands in stock's place.

    python -m benchmarks.machines.run [--quick] [--only native/gpt-*/float32,avx2] [--minutes 55] [--report]
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

# Else this process is pinned to a core when torch is loaded, and what it starts is with it.
os.environ["OMP_PROC_BIND"] = "false"

from fusedacc.commands.measuring.records import Results

from ..harness import INTERRUPTED, ROOT
from .cells import COLUMNS, RESULTS, STOCK, Key, Row, disturbed, finished, report, sources
from .emulated import MACHINES, flags
from .loops import PRECISIONS
from .zoo import entries

#: What measures the cells of a model in a process of its own.
CHILD = "benchmarks.machines.child"
#: What a process takes before it measures, and a cell beside its timing, in seconds.
START, BESIDE = 5.0, 3.0
#: A cell is timed for at most and for at least so long.
MOST, LEAST = 8.0, 2.0
QUICK = 0.2
#: A process is ended after so many seconds.
HUNG = 600
KINDS = {kind.name: kind for kind in MACHINES}


def wanted(patterns: str | None) -> list[Key]:
    """The cells that one of the comma-separated patterns machine/model/precision matches; what is left out
    of a pattern is anything. Raises SystemExit for a pattern that matches none.
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


def groups(cells: Sequence[Key]) -> dict[tuple[str, str], list[str]]:
    """The precisions of each machine and model: what one process measures."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, model, precision in cells:
        found.setdefault((name, model), []).append(precision)
    return found


def possible(cells: Sequence[Key], kept: Results, done: dict[tuple[str, ...], Row]) -> list[Key]:
    """The cells of machines that can be emulated here; the others' machines get a row that says why."""
    here = flags()
    why = {name: kind.left_out(here) for name, kind in KINDS.items()}
    for name in dict.fromkeys(cell[0] for cell in cells):
        if why[name] and (name, "", "", "") not in done:
            kept.add([Row(name, sources=sources(), note=why[name])])
    return [cell for cell in cells if not why[cell[0]]]


def missing(cells: Sequence[Key], done: dict[tuple[str, ...], Row]) -> list[Key]:
    """The cells that have no rows, or such as others disturbed."""
    rows = {cell: done.get((*cell, STOCK)) for cell in cells}
    return [cell for cell, row in rows.items() if row is None or disturbed(row)]


def measure(cells: Sequence[Key], kept: Results, caches: Path, minutes: float, quick: bool) -> bool:
    """Measures the cells, those of a machine and model in a fresh process, until the time is up. Returns
    whether there was time for all.
    """
    end = time.monotonic() + 60 * minutes
    todo, cells_left = groups(cells), len(cells)
    for index, ((name, model), precisions) in enumerate(todo.items()):
        remaining = end - time.monotonic()
        if remaining <= 0:
            return False
        told = f"{index + 1} of {len(todo)}: {name}, {model}; {remaining / 60:.0f} minutes at most are left"
        print(told, file=sys.stderr)
        share = (remaining - START * (len(todo) - index)) / cells_left - BESIDE
        seconds = QUICK if quick else min(max(share, LEAST), MOST)
        run(name, model, precisions, seconds, kept, caches, quick)
        cells_left -= len(precisions)
    return True


def run(
    name: str, model: str, precisions: Sequence[str], seconds: float, kept: Results, caches: Path, quick: bool
) -> None:
    """One process, which writes its rows itself; if it breaks down, a row that says so."""
    command = [sys.executable, "-m", CHILD, "--machine", name, "--model", model]
    command += ["--precisions", ",".join(precisions), "--seconds", f"{seconds:.2f}"]
    command += ["--results", str(kept.path.resolve())] if kept.path else []
    command += ["--quick"] if quick else []
    digest = sources()
    environment = KINDS[name].environment(caches, digest)
    try:
        status = subprocess.run(command, cwd=ROOT, env=environment, timeout=HUNG).returncode
        why = f"its process ended with {status}" if status else ""
    except subprocess.TimeoutExpired:
        why = f"its process took longer than {HUNG} seconds"
    if why:
        kept.add([Row(name, model, sources=digest, note=f"not run: {why}")])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny models, to try it: recorded only by --results"
    )
    parser.add_argument("--only", help="comma-separated patterns machine/model/precision; all without it")
    parser.add_argument("--minutes", type=float, default=55, help="to take at most (%(default)s)")
    parser.add_argument("--results", type=Path, help=f"the CSV ({RESULTS.relative_to(ROOT)})")
    parser.add_argument("--report", action="store_true", help="only the table of what was measured")
    parser.add_argument(
        "--any-sources", action="store_true", help="take older sources' cells as finished too"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.results or (Path(folder, "quick.csv") if options.quick else RESULTS)
        try:
            kept = Results(path, "cpu", COLUMNS)
        except (OSError, ValueError) as error:
            raise SystemExit(f"cannot keep results: {error}") from None
        digest = "" if options.any_sources else sources()
        chosen = wanted(options.only)
        found = functools.partial(finished, path, kept.conditions, digest)
        done = found()
        can = possible(chosen, kept, done)
        todo = missing(can, done)
        interrupted = False
        complete = True
        if not options.report:
            print(f"{len(todo)} cells to measure, {len(can) - len(todo)} there already", file=sys.stderr)
            caches = Path(folder) if options.quick else ROOT / "build" / "machines"
            try:
                complete = measure(todo, kept, caches, options.minutes, options.quick)
            except KeyboardInterrupt:
                interrupted = True
        print(report(row for row in found().values() if row.key in chosen or not row.model))
    if interrupted or not complete:
        print("\nnot all cells are measured: the same command goes on with the others", file=sys.stderr)
    if interrupted:
        raise SystemExit(INTERRUPTED)


if __name__ == "__main__":
    main()
