"""What every benchmark shares: variants timed in turns, rows that are safe once measured, a table."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import machine  # before torch, for the threads
import torch
from tqdm import tqdm

from fusedacc.commands.bench.timing import Timer, cpu_timer, quantile

RESULTS = machine.ROOT / "benchmarks" / "results" / "results.csv"
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
class Case:
    """What is worked on: the columns that say so. `mode`: what one call does ("accumulate", "window", ...);
    `shapes`: in words a reader can check; `dtypes`: "bfloat16 into float32"."""

    benchmark: str
    case: str
    mode: str = ""
    shapes: str = ""
    dtypes: str = ""


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


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure against at most one goal: a line of the CSV.

    `median`, `p20` and `p80` are in `unit`; empty where the provider could not run, and `note` says why.
    `speedup` is the median over rounds of the ratio within a round, so that a busy machine, which slows
    neighbours alike, moves it little. `percent_of_peak` is of the faster of a copy and a triad in the same
    rounds. `host_us` is, on CUDA, the time to issue one call; on a CPU, the time of the same call on tensors
    of one element.
    """

    benchmark: str
    case: str
    provider: str
    mode: str = ""
    shapes: str = ""
    dtypes: str = ""
    metric: str = "time"
    unit: str = "us"
    median: float | None = None
    p20: float | None = None
    p80: float | None = None
    rounds: int | None = None
    bytes: int | None = None
    gb_per_s: float | None = None
    percent_of_peak: float | None = None
    launches: int | None = None
    host_us: float | None = None
    against: str = ""
    speedup: float | None = None
    goal: float | None = None
    reached: str = ""
    note: str = ""


COLUMNS = tuple(field.name for field in dataclasses.fields(Row))


def row(case: Case, provider: str, **columns: object) -> Row:
    """A row of a case."""
    return Row(**dataclasses.asdict(case), provider=provider, **columns)  # type: ignore[arg-type]


def cannot_run(case: Case, provider: str, why: str) -> Row:
    """The row of a provider that cannot run here."""
    return row(case, provider, note=f"not run: {why}")


def first_line(error: BaseException) -> str:
    """The error's first line, as a reason for a row."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{type(error).__name__}: {lines[0][:160]}"


# Timing


def event_timer(run: Callable[[], object], calls: int) -> float:
    """Seconds per call on the device, by CUDA events.

    A first call fills the queue, so that the host is ahead; a host that cannot keep up shows as the time it
    takes.
    """
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    run()
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def timer_for(device: torch.device | str) -> Timer:
    return event_timer if torch.device(device).type == "cuda" else cpu_timer


def in_turns(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    what: str,
    calls: int = 1,
    timer: Timer = cpu_timer,
) -> dict[str, list[float]]:
    """Seconds of each in each round, by name: once per round, after one untimed round. The order turns with
    each round, and runs backwards in every second one, so that none always follows the same other. `what`:
    is shown beside the progress.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1; got {rounds}")
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for index in progress(range(-1, rounds), what, "round"):
        turn = index % len(names)
        order = names[turn:] + names[:turn]
        for name in reversed(order) if index % 2 else order:
            seconds = timer(runs[name], calls)
            if index >= 0:
                times[name].append(seconds)
    return times


def measure(
    case: Case,
    variants: Sequence[Variant],
    rounds: int,
    calls: int = 1,
    timer: Timer = cpu_timer,
) -> list[Row]:
    """Rows of the times that `in_turns` finds."""
    times = in_turns({variant.name: variant.run for variant in variants}, rounds, case.case, calls, timer)
    moved = {variant.name: variant.bytes for variant in variants}
    peaks = [moved[name] / statistics.median(times[name]) for name in PEAK if name in moved]
    rows = []
    for variant in variants:
        own = times[variant.name]
        median = statistics.median(own)
        figure = row(
            case,
            variant.name,
            median=1e6 * median,
            p20=1e6 * quantile(own, 0.2),
            p80=1e6 * quantile(own, 0.8),
            rounds=rounds,
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


def _against(figure: Row, goal: Goal, times: dict[str, list[float]], moved: dict[str, int]) -> Row:
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


def reached(value: float | None, goal: float) -> str:
    return "" if value is None or not goal else "yes" if value >= goal else "no"


def progress(items: Iterable, what: str, unit: str) -> Iterable:
    """A bar on standard error, gone when it is done."""
    return tqdm(items, desc=what, unit=unit, dynamic_ncols=True, leave=False)


# Rows that are kept


class Results:
    """The rows of one run, each appended to the CSV as soon as it is measured.

    Args:
        path: the CSV, made with its header if it is not there; None records nothing.
        device: whose name goes into the rows.
        columns: the rows' own, before those of the conditions; attributes of what is added.

    Raises:
        ValueError: `path` holds a table with other columns.
    """

    def __init__(
        self, path: Path | None, device: torch.device | str = "cpu", columns: Sequence[str] = COLUMNS
    ) -> None:
        self.path, self.device, self.columns = path, torch.device(device), columns
        self.conditions = machine.environment(device)
        self.rows: list[Row] = []
        header = [*columns, *machine.CONDITIONS]
        if path is not None and path.exists() and path.stat().st_size:
            with path.open(newline="") as file:
                found = next(csv.reader(file))
            if found != header:
                raise ValueError(
                    f"{path} has other columns ({', '.join(found)}); allowed: {', '.join(header)}"
                )
        elif path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._append([header])

    def add(self, rows: Sequence[Row]) -> None:
        """Keeps the rows and appends them to the file, on the disk when this returns.

        If the disk is full the file is cut back to its last whole row, the rows are printed as CSV instead,
        and OSError is raised.
        """
        self.rows += rows
        if self.path is None:
            return
        conditions = [self.conditions[name] for name in machine.CONDITIONS]
        lines = [[*(_short(getattr(row, name)) for name in self.columns), *conditions] for row in rows]
        try:
            self._append(lines)
        except OSError:
            csv.writer(sys.stdout, lineterminator="\n").writerows(lines)
            raise

    def _append(self, lines: Sequence[Sequence[str]]) -> None:
        assert self.path is not None
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(lines)
        with self.path.open("ab", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            try:
                data = memoryview(text.getvalue().encode())
                while data:
                    data = data[file.write(data) :]
                os.fsync(file.fileno())
            except BaseException:
                file.truncate(end)
                raise

    def report(self) -> None:
        """Prints the table with its conditions, and which goals were missed."""
        print(table(self.rows))
        print("\n" + ", ".join(f"{key} {value}" for key, value in self.conditions.items() if value))
        missed = [
            f"{r.case}, {r.dtypes}: {r.provider} against {r.against}" for r in self.rows if r.reached == "no"
        ]
        count = sum(r.reached == "yes" for r in self.rows)
        print(f"{count} goals reached, {len(missed)} missed" + "".join(f"\n  {line}" for line in missed))
        if self.path is not None:
            print(f"appended to {os.path.relpath(self.path)}")


def _short(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else "" if value is None else str(value)


def read(path: Path) -> list[dict[str, str]]:
    """All rows of a results file, as text."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def newest(rows: Sequence[dict[str, str]], benchmark: str) -> list[dict[str, str]]:
    """The rows of a benchmark's last run."""
    own = [found for found in rows if found["benchmark"] == benchmark]
    return [found for found in own if found["date"] == own[-1]["date"]]


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text, one block per case."""
    lines: list[str] = []
    previous: Row | None = None
    for row in rows:
        what = (row.benchmark, row.case, row.mode, row.dtypes, row.metric)
        if previous is None or what != (
            previous.benchmark,
            previous.case,
            previous.mode,
            previous.dtypes,
            previous.metric,
        ):
            metric = row.metric if row.metric != "time" else ""
            title = ", ".join(filter(None, (f"{row.benchmark}: {row.case}", row.mode, row.dtypes, metric)))
            lines += ["", title, f"  {'':<42}{'median':>12}{'p20':>10}{'p80':>10}   GB/s % peak  calls"]
            previous = None
        if row.median is None:
            lines.append(f"  {row.provider:<42}  {row.note}")
        else:
            line = " " * 99
            if previous is None or previous.provider != row.provider:
                rate = f"{row.gb_per_s:>7.1f}" if row.gb_per_s else " " * 7
                share = f"{row.percent_of_peak:>7.0f}" if row.percent_of_peak else " " * 7
                calls = f"{row.launches:>7}" if row.launches is not None else " " * 7
                line = f"  {row.provider:<42}{f'{_figure(row.median)} {row.unit:<3}':>13}"
                line += f"{_figure(row.p20):>9}{_figure(row.p80):>10}{rate}{share}{calls}"
            if row.speedup is not None:
                line = f"{line:<99}  {row.speedup:.2f} x {row.against}"
            if row.reached:
                line += f"; goal {row.goal:.3g} {'reached' if row.reached == 'yes' else 'MISSED'}"
            if row.note:
                line += f"  ({row.note})"
            lines.append(line.rstrip())
        previous = row
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}" if abs(value) < 1e6 else f"{value:.3g}"


# The command line


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes: --quick, --full, --results, --device."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sweep = parser.add_mutually_exclusive_group()
    sweep.add_argument("--quick", action="store_true", help="tiny sizes, to try it: nothing is recorded")
    sweep.add_argument("--full", action="store_true", help="the whole sweep, not the one of seven minutes")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="the CSV that rows are appended to (%(default)s)"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def effort(options: argparse.Namespace) -> str:
    """How much to measure: "quick", "short" (make bench: seven minutes for all) or "full"."""
    return "quick" if options.quick else "full" if options.full else "short"


def results(options: argparse.Namespace) -> Results:
    return Results(None if options.quick else options.results, options.device)


def chosen(text: str | None, allowed: Sequence[str], what: str) -> list[str]:
    """The names in a comma-separated list; all where there is none.

    Raises SystemExit, with what is allowed, for any other name.
    """
    names = [name.strip() for name in text.split(",")] if text else list(allowed)
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise SystemExit(f"unknown {what} {', '.join(map(repr, unknown))}; allowed: {', '.join(allowed)}")
    return names


def count(elements: float) -> str:
    """A number of elements, short: 1 Ki, 64 Mi, 1 Gi."""
    for power, suffix in ((30, "Gi"), (20, "Mi"), (10, "Ki")):
        if elements >= 2**power:
            return f"{elements / 2**power:g} {suffix}"
    return f"{elements:g}" if math.isfinite(elements) else str(elements)
