"""Figures as rows: compared with goals, appended to a CSV file, and printed as a table."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import os
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from fusedacc.commands import machine
from fusedacc.commands.timing import Run, Timer, cpu_timer, ratio, spread, take_turns
from fusedacc.traffic import TrafficMeter

#: Variants that measure the machine: the peak is the faster of them.
PEAK = ("copy", "triad")
#: A line of a results file, by column.
Line = dict[str, str]
T = TypeVar("T")


#: The columns of a figure's conditions.
CONDITIONS = ("device", "threads", "allocator", "torch", "triton", "cuda", "python", "commit", "date")


def conditions_of(device: torch.device) -> dict[str, str]:
    """Return what a figure depends on, by `CONDITIONS`."""
    found = machine.collect(device)
    variables = [f"{name}={value}" for name, value in found["environment"].items()]
    malloc = [text for text in variables if text.startswith(("MALLOC_", "LD_PRELOAD="))]
    threads = [text for text in variables if text.startswith(("OMP_", "GOMP_", "KMP_"))]
    return {
        "device": found["name"],
        "threads": " ".join([str(found["threads"]), *threads]),
        "allocator": " ".join(malloc) or "libc, defaults",
        **{name: found[name] or "" for name in ("torch", "triton", "cuda", "python")},
        "commit": commit(),
        "date": found["date"],
    }


def commit() -> str:
    """Return the measured commit, with "+" if files differ from it; "unknown" outside a git checkout.

    For a copy that is not a checkout, set the environment variable FUSEDACC_COMMIT.
    """
    if given := os.environ.get("FUSEDACC_COMMIT"):
        return given
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=10", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:  # no git
        return "unknown"
    return found.stdout.strip() or "unknown"


@dataclasses.dataclass(frozen=True)
class Case:
    """What is measured. mode: what one call does ("accumulate", "window", ...). shapes, dtypes: in words."""

    benchmark: str
    case: str
    mode: str = ""
    shapes: str = ""
    dtypes: str = ""


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure with at most one goal: a line of the CSV.

    `median`, `p20` and `p80` are in `unit`; they are empty if the provider could not run, and `note` says
    why. `speedup` is the median over rounds of the ratio within a round. `percent_of_peak` refers to the
    faster of a copy and a triad in the same rounds. `host_us` is the time to issue one call on a GPU.
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
    return Row(**dataclasses.asdict(case), provider=provider, **columns)  # type: ignore[arg-type]


def cannot_run(case: Case, provider: str, why: str) -> Row:
    """Return the row of a provider that cannot run here."""
    return row(case, provider, note=f"not run: {why}")


def first_line(error: BaseException) -> str:
    """Return an error in one line: its type and its first sentence, shortened."""
    lines = str(error).strip().splitlines() or [""]
    text = lines[0].partition(". ")[0]
    return f"{type(error).__name__}: {textwrap.shorten(text, 120, placeholder=' ...')}"


def reached(value: float | None, goal: float) -> str:
    if value is None or not goal:
        return ""
    return "yes" if value >= goal else "no"


def at_most(
    limit: float, found: float, against: str = "limit", tolerance: float = 0.0
) -> dict[str, str | float]:
    """Return the columns of a figure that may exceed `limit` by at most a share of `tolerance`. A difference
    may be 0 or negative.
    """
    room = limit / found if found > 0 else math.inf
    return {"against": against, "speedup": room, "goal": 1.0, "reached": reached(room, 1.0 - tolerance)}


@dataclasses.dataclass(frozen=True)
class Goal:
    """To be `at_least` so many times as fast as the variant `against`; 0: no goal, only the ratio.

    by_bandwidth: compare bytes per second instead of calls per second.
    """

    against: str
    at_least: float = 0.0
    by_bandwidth: bool = False


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to do the work. `launches`: operators (CPU) or kernels (CUDA) of one call.

    `bytes`: read and written by one call, each operand counted once; 0: show no bandwidth.
    """

    name: str
    run: Run = lambda: None
    bytes: int = 0
    goals: tuple[Goal, ...] = ()
    launches: int | None = None
    host_us: float | None = None
    note: str = ""


def counted(run: Callable[[], object], parameters: Any = None) -> TrafficMeter:
    """Return a meter that has seen one call. Raises RuntimeError if an operator has no rule."""
    with TrafficMeter(parameters) as meter:
        run()
    if meter.uncounted:
        raise RuntimeError(f"uncounted: {', '.join(meter.uncounted)}")
    return meter


def counted_variant(name: str, run: Run, goals: tuple[Goal, ...] = (), parameters: Any = None) -> Variant:
    """Return a variant with the bytes and operators of one call, which this makes."""
    meter = counted(run, parameters)
    return Variant(name, run, meter.total_bytes, goals, meter.calls)


def measure(
    case: Case, variants: Sequence[Variant], rounds: Iterable[int], calls: int = 1, timer: Timer = cpu_timer
) -> list[Row]:
    """Time the variants in turns and return their rows."""
    times = take_turns({variant.name: variant.run for variant in variants}, rounds, timer, calls)
    return rows_of(case, variants, times)


def value_rows(
    case: Case,
    metric: str,
    unit: str,
    values: Mapping[str, float],
    limits: Mapping[str, tuple] | None = None,
    **columns: Any,
) -> list[Row]:
    """Return a row per provider. `limits`: the goals of some: `(limit, against, ...)` of `at_most`."""
    rows = []
    for name, value in values.items():
        limit, *more = (limits or {}).get(name, (None,))
        held = {} if limit is None else at_most(limit, value, *more)
        rows.append(row(case, name, metric=metric, unit=unit, median=value, **held, **columns))
    return rows


def rows_of(case: Case, variants: Sequence[Variant], times: Mapping[str, Sequence[float]]) -> list[Row]:
    """Return rows of the seconds that each variant took in each round; one for each goal."""
    moved = {variant.name: variant.bytes for variant in variants}
    peaks = [moved[name] / statistics.median(times[name]) for name in PEAK if name in moved]
    rows = []
    for variant in variants:
        columns = {name: getattr(variant, name) for name in ("launches", "host_us", "note")}
        if variant.bytes:
            bandwidth = variant.bytes / statistics.median(times[variant.name])
            columns |= {"bytes": variant.bytes, "gb_per_s": bandwidth / 1e9}
            columns["percent_of_peak"] = 100 * bandwidth / max(peaks) if peaks else None
        figure = row(case, variant.name, **spread(times[variant.name], 1e6), **columns)
        rows += [_against(figure, goal, times, moved) for goal in variant.goals] or [figure]
    return rows


def timed_rows(
    case: Case, times: Mapping[str, Sequence[float]], goals: Mapping[str, Sequence[Goal]], note: str = ""
) -> list[Row]:
    """Return rows of the seconds that each way took in each round. `goals`: by the ways' names."""
    variants = [Variant(name, goals=tuple(goals.get(name, ())), note=note) for name in times]
    return rows_of(case, variants, times)


def _against(figure: Row, goal: Goal, times: Mapping[str, Sequence[float]], moved: Mapping[str, int]) -> Row:
    speedup, *_ = ratio(times[goal.against], times[figure.provider])
    if goal.by_bandwidth:
        speedup *= moved[figure.provider] / moved[goal.against]
    against = goal.against + (" (bytes/s)" if goal.by_bandwidth else "")
    held = reached(speedup, goal.at_least)
    return dataclasses.replace(
        figure, against=against, speedup=speedup, goal=goal.at_least or None, reached=held
    )


class Results:
    """The rows of one run. Each is appended to the CSV as soon as it is measured.

    The CSV at `path` (None: record nothing) is created with its header if it does not exist. `columns`:
    attributes of the rows, written before the conditions, of which the device's name is one. Raises
    ValueError if `path` holds a table with other columns.
    """

    def __init__(
        self, path: Path | None, device: torch.device | str = "cpu", columns: Sequence[str] = COLUMNS
    ) -> None:
        self.path = path
        self.device = torch.device(device)
        self.columns = columns
        self.conditions = conditions_of(self.device)
        self.rows: list[Row] = []
        header = [*columns, *CONDITIONS]
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
        """Keep the rows and append them to the file; they are on the disk when this returns.

        If the disk is full, the file is cut back to its last whole row, the rows are printed as CSV, and
        OSError is raised.
        """
        self.rows += rows
        if self.path is None:
            return
        conditions = [self.conditions[name] for name in CONDITIONS]
        lines = [[*(_short(getattr(row, name, None)) for name in self.columns), *conditions] for row in rows]
        try:
            self._append(lines)
        except OSError:
            csv.writer(sys.stdout, lineterminator="\n").writerows(lines)
            raise

    def attempt(self, case: Case, names: Iterable[str], measure: Callable[..., T], *given: Any) -> T | None:
        """Return what `measure(*given)` returns. If it fails, add a row with the reason for each name."""
        try:
            return measure(*given)
        except Exception as error:  # such as out of memory: go on with the other cases
            self.add([cannot_run(case, name, first_line(error)) for name in names])
            return None

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

    def drop_older_runs(self, benchmarks: Collection[str]) -> None:
        """Remove this device's older runs of these benchmarks, once this run is complete.

        The file is replaced as a whole, so an interruption leaves the old one.
        """
        if self.path is None:
            return
        of_this_device = {(name, self.conditions["device"]) for name in benchmarks}
        lines = read(self.path)
        kept = newest_runs(lines, of_this_device)
        if len(kept) == len(lines):
            return
        beside = self.path.with_suffix(".new")
        with beside.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(kept)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.path)

    def report(self) -> None:
        """Print the table, its conditions, and the missed goals."""
        print(table(self.rows))
        print("\n" + ", ".join(f"{key} {value}" for key, value in self.conditions.items() if value))
        missed = [row for row in self.rows if row.reached == "no"]
        print(f"{sum(row.reached == 'yes' for row in self.rows)} goals reached, {len(missed)} missed")
        for row in missed:
            print(f"  {row.case}, {row.dtypes}: {row.provider} against {row.against}")
        if self.path is not None:
            print(f"appended to {os.path.relpath(self.path)}")


def _short(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def read(path: Path) -> list[Line]:
    """Return all rows of a results file, as text."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def newest(rows: Sequence[Line], benchmark: str) -> list[Line]:
    """Return the rows of a benchmark's last run."""
    of_benchmark = [found for found in rows if found["benchmark"] == benchmark]
    return [found for found in of_benchmark if found["date"] == of_benchmark[-1]["date"]]


def newest_runs(rows: Sequence[Line], of: Collection[tuple[str, str]] | None = None) -> list[Line]:
    """Return the rows without older runs on the same device. of: limits this to (benchmark, device) pairs."""

    def run(found: Line) -> tuple[str, str]:
        return found["benchmark"], found["device"]

    last = {run(found): found["date"] for found in rows}
    chosen = last if of is None else of
    return [found for found in rows if run(found) not in chosen or found["date"] == last[run(found)]]


def table(rows: Sequence[Row]) -> str:
    """Return the rows as aligned text, one block per case."""

    def key(row: Row) -> tuple[str, ...]:
        return row.benchmark, row.case, row.mode, row.dtypes, row.metric

    lines: list[str] = []
    previous: Row | None = None
    for row in rows:
        if previous is None or key(row) != key(previous):
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
                median, low, high = (_figure(each, row.unit) for each in (row.median, row.p20, row.p80))
                line = f"  {row.provider:<42}{f'{median} {row.unit:<3}':>13}"
                line += f"{low:>9}{high:>10}{rate}{share}{calls}"
            if row.speedup is not None:
                line = f"{line:<99}  {row.speedup:.2f} x {row.against}"
            if row.reached:
                line += f"; goal {row.goal:.3g} {'reached' if row.reached == 'yes' else 'MISSED'}"
            lines.append((line + (f"  ({row.note})" if row.note else "")).rstrip())
        previous = row
    return "\n".join(lines)


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    body = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *body])


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" if unit and abs(value) < 1e6 else f"{value:.3g}"


def count(elements: float) -> str:
    """Return a number of elements as text: 1 Ki, 64 Mi, 1 Gi."""
    for power, suffix in ((30, "Gi"), (20, "Mi"), (10, "Ki")):
        if elements >= 2**power:
            return f"{elements / 2**power:g} {suffix}"
    return f"{elements:g}" if math.isfinite(elements) else str(elements)
