"""What every suite needs: its command line, progress bars, and child processes."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tqdm import tqdm

from fusedacc.commands.measuring import records
from fusedacc.commands.measuring.records import Results
from fusedacc.commands.measuring.timing import Timer, cpu_timer
from fusedacc.traffic import TrafficMeter

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "results.csv"
#: The exit status of what the user has stopped.
INTERRUPTED = 130
#: One thread each; all would be held to the first core if OpenMP placed them.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_PROC_BIND": "false"}


# The command line


def arguments(description: str | None, results: Path = RESULTS) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes: --quick, --full, --results, --device."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sweep = parser.add_mutually_exclusive_group()
    sweep.add_argument("--quick", action="store_true", help="tiny sizes, to try it: nothing is recorded")
    sweep.add_argument("--full", action="store_true", help="the whole sweep, not the one of ten minutes")
    parser.add_argument(
        "--results", type=Path, default=results, help="the CSV that rows are appended to (%(default)s)"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def effort(options: argparse.Namespace) -> str:
    """How much to measure: "quick", "short" (make bench: ten minutes for all) or "full"."""
    return "quick" if options.quick else "full" if options.full else "short"


def results(options: argparse.Namespace, **columns: Any) -> Results:
    return Results(None if options.quick else options.results, options.device, **columns)


def chosen(text: str | None, allowed: Sequence[str], what: str) -> list[str]:
    """The names in a comma-separated list; all where there is none.

    Raises SystemExit, with what is allowed, for any other name.
    """
    names = [name.strip() for name in text.split(",")] if text else list(allowed)
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise SystemExit(f"unknown {what} {', '.join(map(repr, unknown))}; allowed: {', '.join(allowed)}")
    return names


def run(figures: Callable[..., object], options: argparse.Namespace, **own: object) -> None:
    """Measure as the options say, and print the table. `own`: arguments of `figures` beside the rest."""
    kept = results(options)
    complete(kept, figures, effort(options), **own)
    kept.report()


def run_parts(
    description: str | None,
    parts: Mapping[str, Callable[[Results, str], object]],
    path: Path,
    columns: Sequence[str],
    words: Callable[[list[Any]], Iterable[str]],
) -> None:
    """The command of a suite whose parts are chosen by --only, on a CPU. `words`: lines about the rows."""
    parser = arguments(description, path)
    parser.add_argument("--only", help=f"comma-separated; all without it: {', '.join(parts)}")
    options = parser.parse_args()
    kept = Results(None if options.quick else options.results, "cpu", columns)
    for name in chosen(options.only, list(parts), "part"):
        parts[name](kept, effort(options))
    print("\n".join(words(kept.rows)))
    if kept.path is not None:
        print(f"appended to {kept.path}")


def complete(kept: Results, figures: Callable[..., object], effort: str, **own: object) -> Any:
    """Measure a suite; once all of it is there, drop the same machine's older runs of it from the file.

    Returns what `figures` returns.
    """
    before = len(kept.rows)
    returned = figures(kept, effort, **own)
    kept.drop_older_runs({row.benchmark for row in kept.rows[before:]})
    return returned


# Progress


def progress(items: Iterable, what: str, unit: str, total: int | None = None) -> Iterable:
    """A bar on standard error, gone when it is done. `total`: how many there are of what has no length."""
    return tqdm(items, desc=what, unit=unit, total=total, dynamic_ncols=True, leave=False)


def rounds(count: int, what: str, untimed: int = 1) -> Iterable[int]:
    """The rounds for `timing.take_turns`, with a bar; the first `untimed` do not count."""
    if count < 1:
        raise ValueError(f"rounds must be at least 1; got {count}")
    return progress(range(-untimed, count), what, "round")


def measure(
    case: records.Case,
    variants: Sequence[records.Variant],
    count: int,
    calls: int = 1,
    timer: Timer = cpu_timer,
) -> list[records.Row]:
    """Time the variants in turns, with a bar, and return their rows."""
    return records.measure(case, variants, rounds(count, case.case), calls, timer)


def counted(run: Callable[[], object], parameters: Any = None) -> TrafficMeter:
    """A meter that has seen one call. RuntimeError where an operator has no rule."""
    with TrafficMeter(parameters) as meter:
        run()
    if meter.uncounted:
        raise RuntimeError(f"uncounted: {', '.join(meter.uncounted)}")
    return meter


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Other processes


def use_all_cores() -> None:
    """Let this process's threads run on any core: OpenMP may have held its parent to one."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1))


@contextlib.contextmanager
def processes(values: Mapping[str, str], count: int | None = None) -> Iterator[concurrent.futures.Executor]:
    """A pool of `count` new processes with these variables, which are read as torch is loaded."""
    spawn = multiprocessing.get_context("spawn")
    with (
        mock.patch.dict(os.environ, values),
        concurrent.futures.ProcessPoolExecutor(count, spawn, initializer=use_all_cores) as pool,
    ):
        yield pool
