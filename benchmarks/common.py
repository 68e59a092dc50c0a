"""What every benchmark shares: variants timed in turns, the environment they ran in, a CSV, a table."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@dataclasses.dataclass(frozen=True)
class Goal:
    """To be `at_least` so many times as fast as the variant `against` (0: no goal, only the ratio),
    in bytes per second if `by_bandwidth`, else in calls per second."""

    against: str
    at_least: float = 0.0
    by_bandwidth: bool = False


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to do the work. `bytes`: read and written by one call, each operand counted once
    (0: do not show a bandwidth)."""

    name: str
    run: Callable[[], object]
    bytes: int = 0
    goals: tuple[Goal, ...] = ()


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure against at most one goal. `speedup` is the median over rounds of the ratio within a
    round, so that a busy machine, which slows neighbours alike, moves it little. `unit` is that of
    `median`, `p20` and `p80`."""

    case: str
    variant: str
    unit: str
    median: float
    p20: float
    p80: float
    gb_per_s: float | None = None
    percent_of_copy: float | None = None
    against: str = ""
    speedup: float | None = None
    goal: float | None = None
    reached: str = ""


def cpu_timer(run: Callable[[], object], calls: int) -> float:
    """Seconds per call."""
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def measure(
    case: str,
    variants: Sequence[Variant],
    rounds: int,
    calls: int = 1,
    timer: Callable[[Callable[[], object], int], float] = cpu_timer,
    copy_bandwidth: float | None = None,
) -> list[Row]:
    """Times every variant once per round, in an order that turns with each round, after one untimed round.

    `copy_bandwidth`: bytes per second of the reference copy; by default that of the variant named "copy" in
    the same rounds, if there is one.
    """
    times: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for index in tqdm(range(-1, rounds), desc=case, unit="round", dynamic_ncols=True, leave=False):
        for turn in range(len(variants)):
            variant = variants[(index + turn) % len(variants)]
            seconds = timer(variant.run, calls)
            if index >= 0:
                times[variant.name].append(seconds)
    moved = {variant.name: variant.bytes for variant in variants}
    if copy_bandwidth is None and "copy" in moved:
        copy_bandwidth = moved["copy"] / statistics.median(times["copy"])
    rows = []
    for variant in variants:
        own = times[variant.name]
        median = statistics.median(own)
        figure = Row(
            case, variant.name, "us", 1e6 * median, 1e6 * quantile(own, 0.2), 1e6 * quantile(own, 0.8)
        )
        if variant.bytes:
            bandwidth = variant.bytes / median
            share = 100 * bandwidth / copy_bandwidth if copy_bandwidth else None
            figure = dataclasses.replace(figure, gb_per_s=bandwidth / 1e9, percent_of_copy=share)
        rows += [_against(figure, goal, times, moved) for goal in variant.goals] or [figure]
    return rows


def _against(figure: Row, goal: Goal, times: dict[str, list[float]], moved: dict[str, int]) -> Row:
    pairs = zip(times[goal.against], times[figure.variant], strict=True)
    speedup = statistics.median(base / own for base, own in pairs)
    if goal.by_bandwidth:
        speedup *= moved[figure.variant] / moved[goal.against]
    return dataclasses.replace(
        figure,
        against=goal.against + (" (bytes/s)" if goal.by_bandwidth else ""),
        speedup=speedup,
        goal=goal.at_least or None,
        reached=reached(speedup, goal.at_least),
    )


def reached(value: float | None, goal: float) -> str:
    return "" if value is None or not goal else "yes" if value >= goal else "no"


def quantile(values: Sequence[float], share: float) -> float:
    """The nearest-rank quantile."""
    return sorted(values)[round(share * (len(values) - 1))]


def environment(device: torch.device | str = "cpu") -> dict[str, str]:
    """What a figure depends on, as columns."""
    device = torch.device(device)
    set_here = [f"{name}={value}" for name, value in sorted(os.environ.items())]
    malloc = [text for text in set_here if text.startswith(("MALLOC_", "LD_PRELOAD="))]
    threads = [text for text in set_here if text.startswith(("OMP_", "GOMP_", "KMP_"))]
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "threads": " ".join([str(torch.get_num_threads()), *threads]),
        "allocator": " ".join(malloc) or "libc, defaults",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(names) or os.cpu_count()} cores"


def commit() -> str:
    """The commit measured, with "+" if files differ from it; "unknown" outside a git checkout."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--abbrev=10"], cwd=ROOT, capture_output=True, text=True
    )
    return found.stdout.strip() or "unknown"


def append_csv(path: Path, rows: Sequence[Row], device: torch.device | str = "cpu") -> None:
    """Appends the rows to `path`, each with the environment's columns, and a header if the file is new."""
    about = environment(device)
    names = [field.name for field in dataclasses.fields(Row)]
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow([*names, *about])
        for row in rows:
            writer.writerow([*(_short(getattr(row, name)) for name in names), *about.values()])


def _short(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else "" if value is None else str(value)


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text, one block per case."""
    lines, previous = [], None
    for row in rows:
        if previous is None or row.case != previous.case:
            lines += ["", row.case, f"  {'':<40}{'median':>12}{'p20':>10}{'p80':>10}   GB/s % copy"]
        elif row.variant != previous.variant or not row.against:
            previous = None
        if previous is not None and row.case == previous.case:
            line = " " * 92
        else:
            rate = f"{row.gb_per_s:>7.1f}" if row.gb_per_s else " " * 7
            share = f"{row.percent_of_copy:>6.0f}" if row.percent_of_copy else " " * 6
            line = f"  {row.variant:<40}{row.median:>9.1f} {row.unit}{row.p20:>10.1f}{row.p80:>10.1f}"
            line += rate + share
        if row.speedup is not None:
            line = f"{line:<88}  {row.speedup:.2f} x {row.against}"
        if row.reached:
            line += f"; goal {row.goal:.3g} {'reached' if row.reached == 'yes' else 'MISSED'}"
        lines.append(line.rstrip())
        previous = row
    return "\n".join(lines)


def report(name: str, rows: Sequence[Row], results: Path | None, device: torch.device | str = "cpu") -> None:
    """Prints the table with its conditions; appends to `results`/`name`.csv unless `results` is None."""
    print(table(rows))
    print("\n" + ", ".join(f"{key} {value}" for key, value in environment(device).items()), file=sys.stdout)
    if results is not None:
        append_csv(results / f"{name}.csv", rows, device)
        print(f"appended to {os.path.relpath(results / name)}.csv")
