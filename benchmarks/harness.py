"""What every suite needs: its command line, progress bars, and child processes."""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import nn
from tqdm import tqdm

import fusedacc
from fusedacc.commands.timing import Run, Timer, cpu_timer
from fusedacc.planner.allocations import recorded_peak

from . import records
from .records import Case, Results, Row, Variant

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "results.csv"
#: The exit status after Ctrl-C.
INTERRUPTED = 130
#: OpenMP would pin all processes to the first core.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_PROC_BIND": "false"}
#: The ways to train that most suites compare.
STOCK, WRAPPED, INSIDE = "stock", "fusedacc", "fusedacc, model="
F32, BF16 = torch.float32, torch.bfloat16

T = TypeVar("T")
#: The names in a list of the command line; None if there is no list.
Names = Sequence[str] | None


def arguments(description: str | None, results: Path = RESULTS) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark: --quick, --full, --results, --device."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sweep = parser.add_mutually_exclusive_group()
    sweep.add_argument("--quick", action="store_true", help="tiny sizes, to try it; records nothing")
    sweep.add_argument("--full", action="store_true", help="all sizes instead of those for ten minutes")
    parser.add_argument("--results", type=Path, default=results, help="append rows to this CSV (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def effort(options: argparse.Namespace) -> str:
    """Return how much to measure: "quick", "short" (make bench: ten minutes for all) or "full"."""
    if options.quick:
        return "quick"
    return "full" if options.full else "short"


def open_results(path: Path | None, device: str, columns: Sequence[str] = records.COLUMNS) -> Results:
    """Return `Results` for the CSV at `path`. Raises SystemExit if it cannot be written."""
    try:
        return Results(path, device, columns)
    except (OSError, ValueError) as error:
        raise SystemExit(f"cannot keep results: {error}") from None


def results(options: argparse.Namespace) -> Results:
    return open_results(None if options.quick else options.results, options.device)


def chosen(text: str | None, allowed: Sequence[str], what: str) -> list[str]:
    """Return the names in a comma-separated list; without one, all. Raises SystemExit for an unknown name."""
    names = [name.strip() for name in text.split(",")] if text else list(allowed)
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise SystemExit(f"unknown {what} {', '.join(map(repr, unknown))}; allowed: {', '.join(allowed)}")
    return names


def parsed(
    parser: argparse.ArgumentParser, **allowed: Sequence[str]
) -> tuple[argparse.Namespace, dict[str, Names]]:
    """Parse the command line, with an option for each list of names. Return the options and the lists."""
    for name, names in allowed.items():
        parser.add_argument(f"--{name}", help=f"comma-separated, of {', '.join(names)} (default: all)")
    options = parser.parse_args()
    given = {name: getattr(options, name) for name in allowed}
    of = {name: chosen(text, allowed[name], name.removesuffix("s")) for name, text in given.items() if text}
    return options, dict.fromkeys(allowed) | of


def run(figures: Callable[..., object], options: argparse.Namespace, **more: object) -> None:
    """Measure as the options say, and print the table. `own`: more arguments of `figures`."""
    kept = results(options)
    complete(kept, figures, effort(options), **more)
    kept.report()


def run_parts(
    description: str | None, parts: Mapping[str, Callable], path: Path, columns: Sequence[str]
) -> None:
    """Run the command of a suite on a CPU; --only selects its parts. Print the values of each row."""
    parser = arguments(description, path)
    parser.add_argument("--only", help=f"comma-separated, of {', '.join(parts)} (default: all)")
    options = parser.parse_args()
    kept = open_results(None if options.quick else options.results, "cpu", columns)
    for name in chosen(options.only, list(parts), "part"):
        parts[name](kept, effort(options))
    for row in kept.rows:
        filled = (value for value in dataclasses.astuple(row) if value not in (None, ""))
        print(", ".join(f"{value:.5g}" if isinstance(value, float) else str(value) for value in filled))
    if kept.path is not None:
        print(f"appended to {kept.path}")


def wrap(way: str, optimizer: torch.optim.Optimizer, steps: int, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that trains `model` in this way, with windows of `steps` micro-batches."""
    if way == STOCK:
        return optimizer
    return fusedacc.AccumulatingOptimizer(optimizer, steps, model=model if way == INSIDE else None)


def complete(kept: Results, figures: Callable[..., T], effort: str, **more: object) -> T:
    """Measure a suite. Once it is complete, drop this machine's older runs of it from the file."""
    before = len(kept.rows)
    returned = figures(kept, effort, **more)
    kept.drop_older_runs({row.benchmark for row in kept.rows[before:]})
    return returned


def progress(items: Iterable, what: str, unit: str, total: int | None = None) -> Iterable:
    """Show a bar on standard error until the end. `total`: the number of items that have no length."""
    return tqdm(items, desc=what, unit=unit, total=total, dynamic_ncols=True, leave=False)


def rounds(count: int, what: str, untimed: int = 1) -> Iterable[int]:
    """Return the rounds for `timing.take_turns`, with a bar. The first `untimed` are not recorded."""
    if count < 1:
        raise ValueError(f"rounds must be at least 1; got {count}")
    return progress(range(-untimed, count), what, "round")


def measure(
    case: Case, variants: Sequence[Variant], count: int, calls: int = 1, timer: Timer = cpu_timer
) -> list[Row]:
    """Time the variants in turns, with a bar, and return their rows."""
    return records.measure(case, variants, rounds(count, case.case), calls, timer)


def thread_time(run: Run, calls: int) -> float:
    """Return the seconds of CPU time of this thread per call: other programs do not count."""
    start = time.thread_time()
    for _ in range(calls):
        run()
    return (time.thread_time() - start) / calls


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def peak_of(run: Callable[[], object], device: torch.device) -> int:
    """Return the live bytes at the peak, beyond those before."""
    if device.type != "cuda":
        return recorded_peak(lambda look: run(), device, "all").bytes
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def use_all_cores() -> None:
    """Let the threads of this process run on any core. OpenMP may have pinned its parent to one."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1))


@contextlib.contextmanager
def processes(values: Mapping[str, str], count: int | None = None) -> Iterator[concurrent.futures.Executor]:
    """Return a pool of `count` new processes with these environment variables, set before torch is loaded."""
    spawn = multiprocessing.get_context("spawn")
    with (
        mock.patch.dict(os.environ, values),
        concurrent.futures.ProcessPoolExecutor(count, spawn, initializer=use_all_cores) as pool,
    ):
        yield pool


def in_process(pool: concurrent.futures.Executor, measure: Callable[..., T], *given: Any) -> T:
    """Return what `measure(*given)` returns in a process of the pool."""
    return pool.submit(measure, *given).result()
