"""What got slower, or larger, than noise between two results files: the newest run of each benchmark in each.

    python -m benchmarks.report.compare OLD.csv NEW.csv [--threshold 5] [--by-time]

A figure got worse if its median moved by more than the threshold and the ranges from p20 to p80 do not
overlap. Bytes per parameter are counted and have no noise: there any change tells. Where both runs hold a
"copy" in the figure's own case, times are judged as multiples of that copy's, so that a machine that was
slower all over is not blamed on the code; --by-time judges by time alone. Copy and triad are the machine:
reported, not judged.

Exit status: 0 where nothing got worse, 1 where something did, 2 for a file that cannot be compared.
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

from fusedacc.commands.measuring.machine import CONDITIONS
from fusedacc.commands.measuring.records import COLUMNS, PEAK, newest

#: What makes a figure the same figure. Not `against`: rows that differ in it alone repeat one figure.
KEY = ("benchmark", "case", "provider", "mode", "shapes", "dtypes", "metric", "unit")
#: The figures of one case.
CASE = tuple(name for name in KEY if name != "provider")
MUST_AGREE = ("device", "threads", "allocator", "torch", "triton", "cuda", "python")
COUNTED = "B/param"
ROUNDING = 0.02  # per cent: the CSV keeps five digits

Key = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Figure:
    """One figure of a file: p20, median and p80 in the key's unit, all equal where no quantiles are given."""

    key: Key
    low: float
    median: float
    high: float

    @property
    def provider(self) -> str:
        return self.key[KEY.index("provider")]

    @property
    def unit(self) -> str:
        return self.key[KEY.index("unit")]

    @property
    def case(self) -> Key:
        return tuple(value for name, value in zip(KEY, self.key, strict=True) if name != "provider")

    def __truediv__(self, by: float) -> Figure:
        return Figure(self.key, self.low / by, self.median / by, self.high / by)

    def __str__(self) -> str:
        benchmark, case, provider, mode, _, dtypes, metric, _ = self.key
        where = ", ".join(filter(None, (f"{benchmark}: {case}", mode, dtypes)))
        return f"{where}: {provider}" + (f", {metric}" if metric != "time" else "")


@dataclasses.dataclass(frozen=True)
class Change:
    """`moved`: by how much of the old value, of the figure or, if `by_copy`, of its multiple of the copy."""

    old: Figure
    new: Figure
    moved: float
    by_copy: bool
    verdict: str  # "worse", "better" or "same"

    def __str__(self) -> str:
        told = f"{self.old.median:.5g} -> {self.new.median:.5g} {self.new.unit}, {100 * self.moved:+.1f} %"
        return f"  {self.new}: {told}{' relative to the copy' if self.by_copy else ''}"


def load(path: Path) -> list[dict[str, str]]:
    """The rows of each benchmark's newest run. ValueError for a file that is no results file."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in (*COLUMNS, *CONDITIONS) if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path} is no results file: it has no column {', '.join(missing)}")
        rows = list(reader)
    if not rows:
        raise ValueError(f"{path} holds no rows")
    return [row for name in dict.fromkeys(row["benchmark"] for row in rows) for row in newest(rows, name)]


def figures(rows: Sequence[dict[str, str]]) -> dict[Key, Figure]:
    """What was measured, by what it is. Rows of providers that could not run hold no figure."""
    found = {}
    for row in filter(lambda row: row["median"], rows):
        low, median, high = (float(row[name] or row["median"]) for name in ("p20", "median", "p80"))
        key = tuple(row[name] for name in KEY)
        found[key] = Figure(key, low, median, high)
    return found


def compare(
    old: dict[Key, Figure], new: dict[Key, Figure], threshold: float = 5.0, by_time: bool = False
) -> list[Change]:
    """A verdict on every figure that both hold, but copy and triad. `threshold` in per cent."""
    copies = [{f.case: f.median for f in found.values() if f.provider == "copy"} for found in (old, new)]
    changes = []
    for key in (key for key, figure in old.items() if key in new and figure.provider not in PEAK):
        before, after = old[key], new[key]
        by_copy = not by_time and all(before.case in found for found in copies)
        scale = [found[before.case] if by_copy else 1.0 for found in copies]
        moved, verdict = judge(before / scale[0], after / scale[1], threshold)
        changes.append(Change(before, after, moved, by_copy, verdict))
    return changes


def judge(old: Figure, new: Figure, threshold: float) -> tuple[float, str]:
    """How far the median moved, as a share of the old, and "worse", "better" or "same".

    Times that are differences of times may be negative.
    """
    difference = new.median - old.median
    moved = difference / abs(old.median) if old.median else math.copysign(math.inf, difference or 1.0)
    least = ROUNDING if new.unit == COUNTED else threshold
    larger, smaller = new.low > old.high, new.high < old.low
    if 100 * abs(moved) <= least or not (larger or smaller):
        return moved, "same"
    more_is_better = new.unit.endswith("/s")
    return moved, "better" if larger == more_is_better else "worse"


def conditions(old: Sequence[dict[str, str]], new: Sequence[dict[str, str]]) -> list[str]:
    """Which runs these are, and loudly what differs between them besides the code."""
    lines = []
    for name, rows in (("old", old), ("new", new)):
        runs = dict.fromkeys(f"{row['date']} at {row['commit']}" for row in rows)
        lines.append(f"{name}: {'; '.join(runs)}")
    for column in MUST_AGREE:
        before, after = (dict.fromkeys(row[column] or "none" for row in rows) for rows in (old, new))
        if before.keys() != after.keys():
            lines.append(
                f"*** THE RUNS DIFFER IN {column.upper()}: {' | '.join(before)} -> {' | '.join(after)}"
            )
    return lines


def machine(old: dict[Key, Figure], new: dict[Key, Figure]) -> list[str]:
    """How the copies moved, which are the machine and not the code."""
    moved = [new[key].median / old[key].median for key in old if key in new and old[key].provider == "copy"]
    if not moved:
        return ["no copy in both runs: every figure is judged by its own value, whatever the machine did"]
    middle = statistics.median(moved)
    text = f"the machine: a copy took {middle:.2f} times as long"
    return [text + (f" (from {min(moved):.2f} to {max(moved):.2f}, {len(moved)} cases)" if moved[1:] else "")]


def one_sided(these: Sequence[dict[str, str]], those: Sequence[dict[str, str]]) -> list[str]:
    """What only the first have: whole benchmarks in one line, else figures, with why those have none."""
    benchmarks = {row["benchmark"] for row in those}
    lines = [
        f"  all of {name}" for name in dict.fromkeys(r["benchmark"] for r in these) if name not in benchmarks
    ]
    have = figures(those)
    why = {
        (row["benchmark"], row["case"], row["provider"]): row["note"] for row in those if not row["median"]
    }
    for key, figure in figures(these).items():
        if key not in have and key[0] in benchmarks:
            note = why.get(key[:3])
            lines.append(f"  {figure}" + (f" ({note})" if note else ""))
    return lines


def report(
    old: Sequence[dict[str, str]], new: Sequence[dict[str, str]], threshold: float, by_time: bool
) -> tuple[str, bool]:
    """The text, and whether anything got worse."""
    before, after = figures(old), figures(new)
    changes = compare(before, after, threshold, by_time)
    count = sum(change.by_copy for change in changes)
    lines = [*conditions(old, new), *machine(before, after)]
    lines.append(
        f"{len(changes)} figures in both: {count} judged relative to their case's copy, "
        f"{len(changes) - count} by their own value; noise is up to {threshold:g} %, or ranges that overlap"
    )
    blocks = {
        "WORSE": sorted((c for c in changes if c.verdict == "worse"), key=lambda c: -abs(c.moved)),
        "better": sorted((c for c in changes if c.verdict == "better"), key=lambda c: -abs(c.moved)),
        "disappeared": one_sided(old, new),
        "appeared": one_sided(new, old),
    }
    for name, found in blocks.items():
        lines += ["", f"{name}: {len(found) or 'nothing'}", *map(str, found)]
    return "\n".join(lines), bool(blocks["WORSE"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--threshold", type=float, default=5.0, help="per cent that is noise (%(default)s)")
    parser.add_argument("--by-time", action="store_true", help="judge no figure relative to its copy")
    options = parser.parse_args()
    if not options.threshold >= 0:
        parser.error(f"--threshold must be at least 0 per cent; got {options.threshold:g}")
    try:
        old, new = load(options.old), load(options.new)
        text, worse = report(old, new, options.threshold, options.by_time)
    except (OSError, ValueError, csv.Error) as error:
        print(f"cannot compare: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(text)
    raise SystemExit(1 if worse else 0)


if __name__ == "__main__":
    main()
