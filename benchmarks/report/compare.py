"""What got slower or larger by more than noise, between the newest runs of each benchmark in two files.

A figure is worse if its median changed by more than the threshold and the ranges from p20 to p80 do not
overlap. Bytes per parameter are counted and have no noise, so every change counts. If both runs have a "copy"
in the figure's case, times are compared as multiples of that copy's, so that a slower machine is not blamed
on the code; --by-time compares times alone. Copy and triad are reported, but not judged.

Exit status: 0 if nothing got worse, 1 if something did, 2 for a file that cannot be compared.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from ..records import COLUMNS, CONDITIONS, PEAK, Line, newest, read

#: What identifies a figure. Rows that differ only in `against` repeat one figure.
KEY = ("benchmark", "case", "provider", "mode", "shapes", "dtypes", "metric", "unit")
MUST_AGREE = ("device", "threads", "allocator", "torch", "triton", "cuda", "python")
COUNTED = "B/param"
ROUNDING = 0.02  # per cent: the CSV keeps five digits

Key = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Figure:
    """One figure of a file: p20, median and p80, all equal if there are no quantiles."""

    row: Line
    low: float
    median: float
    high: float

    @property
    def case(self) -> Key:
        return tuple(self.row[name] for name in KEY if name != "provider")

    def __truediv__(self, by: float) -> Figure:
        return Figure(self.row, self.low / by, self.median / by, self.high / by)

    def __str__(self) -> str:
        row = self.row
        where = ", ".join(filter(None, (f"{row['benchmark']}: {row['case']}", row["mode"], row["dtypes"])))
        return f"{where}: {row['provider']}" + (f", {row['metric']}" if row["metric"] != "time" else "")


@dataclasses.dataclass(frozen=True)
class Change:
    """The relative change of a figure or, if `by_copy`, of its multiple of the copy."""

    old: Figure
    new: Figure
    moved: float
    by_copy: bool
    verdict: str  # "worse", "better" or "same"

    def __str__(self) -> str:
        medians = f"{self.old.median:.5g} -> {self.new.median:.5g} {self.new.row['unit']}"
        relative = " relative to the copy" if self.by_copy else ""
        return f"  {self.new}: {medians}, {100 * self.moved:+.1f} %{relative}"


def load(path: Path) -> list[Line]:
    """Return the rows of each benchmark's newest run. Raises ValueError for other files."""
    with path.open(newline="") as file:
        found = next(csv.reader(file), [])
    missing = [name for name in (*COLUMNS, *CONDITIONS) if name not in found]
    if missing:
        raise ValueError(f"{path} is no results file: it has no column {', '.join(missing)}")
    rows = read(path)
    if not rows:
        raise ValueError(f"{path} holds no rows")
    return [row for name in dict.fromkeys(row["benchmark"] for row in rows) for row in newest(rows, name)]


def figures(rows: Sequence[Line]) -> dict[Key, Figure]:
    """Return what was measured. Providers that could not run have no figure."""
    found = {}
    for row in (row for row in rows if row["median"]):
        low, median, high = (float(row[name] or row["median"]) for name in ("p20", "median", "p80"))
        found[tuple(row[name] for name in KEY)] = Figure(row, low, median, high)
    return found


def compare(
    old: dict[Key, Figure], new: dict[Key, Figure], threshold: float = 5.0, by_time: bool = False
) -> list[Change]:
    """Judge every figure that both have, except copy and triad. `threshold` is in per cent."""
    copies = [
        {f.case: f.median for f in found.values() if f.row["provider"] in PEAK[:1]} for found in (old, new)
    ]
    changes = []
    for key in (key for key, figure in old.items() if key in new and figure.row["provider"] not in PEAK):
        before = old[key]
        after = new[key]
        by_copy = not by_time and all(before.case in found for found in copies)
        scale = [found[before.case] if by_copy else 1.0 for found in copies]
        moved, verdict = judge(before / scale[0], after / scale[1], threshold)
        changes.append(Change(before, after, moved, by_copy, verdict))
    return changes


def judge(old: Figure, new: Figure, threshold: float) -> tuple[float, str]:
    """Return the relative change of the median, and "worse", "better" or "same".

    Times that are differences of times may be negative.
    """
    difference = new.median - old.median
    unit = new.row["unit"]
    moved = difference / abs(old.median) if old.median else math.copysign(math.inf, difference or 1.0)
    larger = new.low > old.high
    smaller = new.high < old.low
    if 100 * abs(moved) <= (ROUNDING if unit == COUNTED else threshold) or not (larger or smaller):
        return moved, "same"
    more_is_better = unit.endswith("/s")
    return moved, "better" if larger == more_is_better else "worse"


def conditions(old: Sequence[Line], new: Sequence[Line]) -> list[str]:
    """Return which runs these are, and every condition that differs."""
    lines = []
    for name, rows in (("old", old), ("new", new)):
        runs = dict.fromkeys(f"{row['date']} at {row['commit']}" for row in rows)
        lines.append(f"{name}: {'; '.join(runs)}")
    for column in MUST_AGREE:
        before, after = (dict.fromkeys(row[column] or "none" for row in rows) for rows in (old, new))
        if before.keys() != after.keys():
            change = f"{' | '.join(before)} -> {' | '.join(after)}"
            lines.append(f"*** THE RUNS DIFFER IN {column.upper()}: {change}")
    return lines


def machine(old: dict[Key, Figure], new: dict[Key, Figure]) -> str:
    """Return the change of the copies, which depend on the machine and not on the code."""
    both = [key for key in old if key in new and old[key].row["provider"] == PEAK[0]]
    moved = [new[key].median / old[key].median for key in both]
    if not moved:
        return "no copy in both runs: every figure is judged by its own value"
    text = f"the machine: a copy took {statistics.median(moved):.2f} times as long"
    return text + (f" (from {min(moved):.2f} to {max(moved):.2f}, {len(moved)} cases)" if moved[1:] else "")


def one_sided(these: Sequence[Line], those: Sequence[Line]) -> list[str]:
    """Return what only the first have: whole benchmarks, or figures with the reason if there is one."""
    benchmarks = {row["benchmark"] for row in those}
    names = dict.fromkeys(row["benchmark"] for row in these)
    lines = [f"  all of {name}" for name in names if name not in benchmarks]
    why = {tuple(row[name] for name in KEY[:3]): row["note"] for row in those if not row["median"]}
    have = figures(those)
    for key, figure in figures(these).items():
        if key not in have and key[0] in benchmarks:
            lines.append(f"  {figure}" + (f" ({why[key[:3]]})" if why.get(key[:3]) else ""))
    return lines


def report(old: Sequence[Line], new: Sequence[Line], threshold: float, by_time: bool) -> tuple[str, bool]:
    before = figures(old)
    after = figures(new)
    changes = compare(before, after, threshold, by_time)
    changes.sort(key=lambda change: -abs(change.moved))
    count = sum(change.by_copy for change in changes)
    lines = [*conditions(old, new), machine(before, after)]
    lines.append(
        f"{len(changes)} figures in both: {count} judged relative to their case's copy, "
        f"{len(changes) - count} by their own value; noise is up to {threshold:g} %, or ranges that overlap"
    )
    worse = [change for change in changes if change.verdict == "worse"]
    better = [change for change in changes if change.verdict == "better"]
    blocks = {"WORSE": worse, "better": better, "disappeared": one_sided(old, new)}
    blocks["appeared"] = one_sided(new, old)
    for name, found in blocks.items():
        lines += ["", f"{name}: {len(found) or 'nothing'}", *map(str, found)]
    return "\n".join(lines), bool(worse)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--threshold", type=float, default=5.0, help="per cent that is noise (%(default)s)")
    parser.add_argument("--by-time", action="store_true", help="do not judge relative to the copy")
    options = parser.parse_args()
    if not options.threshold >= 0:
        parser.error(f"--threshold must be at least 0 per cent; got {options.threshold:g}")
    try:
        old = load(options.old)
        new = load(options.new)
        text, worse = report(old, new, options.threshold, options.by_time)
    except (OSError, ValueError, csv.Error) as error:
        print(f"cannot compare: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(text)
    raise SystemExit(1 if worse else 0)


if __name__ == "__main__":
    main()
