"""A cell, one model in one precision on one machine: its rows, what they are held against, their table."""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fusedacc.commands.measuring.records import Line, markdown, read

from ..harness import ROOT
from .emulated import MACHINES
from .loops import KEPT, MODEL, PLAIN, PRECISIONS, ours
from .zoo import LAYERS

RESULTS = ROOT / "benchmarks" / "results" / "machines.csv"
STOCK = "stock"
#: Each loop's speed against its baseline, judged by the upper end of its interval.
LEAST = 0.98
#: That of `model=`, in the median over all cells.
LEAST_MEDIAN = 1.05
#: The peak may be above stock's by so many bytes or by this share of it.
ROOM, SHARE = 1_000_000, 0.01
#: Where others took more than this share of the CPUs' time, a cell is shown as it is, and a rerun measures it
#: again.
BUSY = 0.1
#: What a figure depends on beside the machine, and a rerun measures again when it has changed.
SOURCES = ("fusedacc/**/*.py", "csrc/**/*", "benchmarks/machines/**/*.py")
SOURCES += ("benchmarks/contestants/loops.py", "benchmarks/contestants/experts.py")
SOURCES += ("examples/demo/model.py",)

Key = tuple[str, str, str]


@dataclasses.dataclass(frozen=True)
class Row:
    """A loop's figures in a cell: a line of the CSV.

    `steps`: micro-batches of a window; `median`, `p20`, `p80`: microseconds of a window. `ratio`: the median
    over rounds of the baseline's time over this loop's in the same round, above 1 is faster; `low` and
    `high`: its 95 % interval. `way`: the baseline, which of stock's was fastest, or what `baseline` names.
    `peak`, and the baseline's as `stock_peak`: live bytes. `others`: the
    share of the CPUs' time that other processes took. `effects`: what the machine's settings came to.
    `sources`: a digest of what was measured. A cell, or a machine, that cannot be measured has one row with
    a note.
    """

    machine: str
    model: str = ""
    precision: str = ""
    loop: str = ""
    shapes: str = ""
    steps: int | None = None
    rounds: int | None = None
    median: float | None = None
    p20: float | None = None
    p80: float | None = None
    way: str = ""
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    peak: int | None = None
    stock_peak: int | None = None
    others: float | None = None
    effects: str = ""
    sources: str = ""
    note: str = ""

    @property
    def key(self) -> Key:
        return self.machine, self.model, self.precision


COLUMNS = tuple(field.name for field in dataclasses.fields(Row))
_KINDS = {"steps": int, "rounds": int, "peak": int, "stock_peak": int}
_KINDS |= dict.fromkeys(("median", "p20", "p80", "ratio", "low", "high", "others"), float)


def names(precision: str) -> tuple[str, ...]:
    """The loops of a cell."""
    return (STOCK, *(way.name for way in ours(precision)))


def baseline(loop: str) -> str:
    """What a loop is held against."""
    return MODEL if loop == KEPT else STOCK


def sources() -> str:
    """A digest of the files that SOURCES names: the same code gives the same, in any checkout."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern) if path.is_file()):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def parsed(line: Line) -> Row:
    """The row of a line of the CSV."""
    return Row(**{name: _KINDS.get(name, str)(line[name]) for name in COLUMNS if line[name]})


def latest(lines: Sequence[Line]) -> list[Line]:
    """The newest line of each loop in each cell that was measured, of those with the last one's sources,
    device and versions."""
    same, of = ("sources", "device", "torch", "python"), ("machine", "model", "precision", "loop")
    measured = [line for line in lines if line["ratio"]]
    own = [line for line in measured if all(line[name] == measured[-1][name] for name in same)]
    return list({tuple(line[name] for name in of): line for line in own}.values())


def by_device(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """The newest rows of each processor on which machines were measured or emulated, if it has any."""
    measured = dict.fromkeys(line["device"] for line in lines if line["ratio"])
    return {device: latest([line for line in lines if line["device"] == device]) for device in measured}


def finished(path: Path, conditions: Mapping[str, str], digest: str) -> dict[tuple[str, ...], Row]:
    """The rows of `path` by cell and loop that were measured on these versions and this device; of several
    the last. Only those of `digest`; with an empty one the last of any.
    """
    if not path.exists():
        return {}
    same = ("device", "torch", "python")
    lines = [line for line in read(path) if all(line[name] == conditions[name] for name in same)]
    rows = [parsed(line) for line in lines if digest in ("", line["sources"])]
    return {(*row.key, row.loop): row for row in rows}


# Goals


def short(row: Row) -> bool:
    """Whether a loop is slower than it may be."""
    return row.high is not None and row.loop != STOCK and row.high < LEAST


def disturbed(row: Row) -> bool:
    """Whether other processes had too large a share of the machine."""
    return row.others is not None and row.others > BUSY


def large(row: Row) -> bool:
    """Whether a loop's peak is higher than it may be."""
    return bool(row.peak and row.stock_peak and row.peak > row.stock_peak + max(ROOM, SHARE * row.stock_peak))


def ratio(row: Row) -> str:
    return f"{row.ratio:.2f} ({row.low:.2f} to {row.high:.2f})"


# The table


def report(rows: Iterable[Row]) -> str:
    """Each cell's ratios, by machine; the worst of each loop; what falls short."""
    rows = list(rows)
    measured = [row for row in rows if row.ratio is not None and row.loop != STOCK]
    lines = []
    for machine in MACHINES:
        own = [row for row in measured if row.machine == machine.name]
        lines += _machine(machine.about, own) if own else []
    lines += [
        f"{' '.join(row.key).strip()}: {row.note}" for row in rows if row.ratio is None and not row.loop
    ]
    busy = dict.fromkeys(", ".join(row.key) for row in measured if disturbed(row))
    lines += [f"others took more than {BUSY:.0%} of the CPUs: {'; '.join(busy)}"] if busy else []
    lines.append("")
    for loop in (PLAIN, MODEL, KEPT):
        own = [row for row in measured if row.loop == loop and row.model not in LAYERS]
        held_to = baseline(loop)
        if own:
            worst, best = min(own, key=_ratio), max(own, key=_ratio)
            median = statistics.median(map(_ratio, own))
            lines.append(
                f"{loop}: worst {ratio(worst)} of {held_to}'s speed ({', '.join(worst.key)}), "
                f"median {median:.2f}, best {best.ratio:.2f}; {len(own)} cells"
            )
            if loop == MODEL and median < LEAST_MEDIAN:
                lines.append(f"  the median is to be {LEAST_MEDIAN}: MISSED")
            for row in sorted(filter(short, own), key=_ratio):
                lines.append(f"  below {LEAST}: {', '.join(row.key)}: {ratio(row)}")
            for row in filter(large, own):
                above = f"{row.peak / 1e6:.1f} MB, {held_to} {row.stock_peak / 1e6:.1f}"
                lines.append(f"  peak above {held_to}'s: {', '.join(row.key)}: {above}")
    return "\n".join(lines)


def _machine(about: str, rows: Sequence[Row]) -> list[str]:
    """A block of the table: a line to a model, `plain / model=` in each precision, and where it was measured
    `/ keep_casts`, which is held against `model=`; `!` below the goal, `^` a peak above it."""
    of = {(row.model, row.precision, row.loop): row for row in rows}
    lines = ["", f"{about}; {rows[-1].effects}"]
    lines.append(f"  {'speed against stock, plain / model=':<36}" + "".join(f"{p:>22}" for p in PRECISIONS))
    for model in dict.fromkeys(row.model for row in rows):
        cells = []
        for precision in PRECISIONS:
            found = [of.get((model, precision, loop)) for loop in (PLAIN, MODEL)]
            kept = of.get((model, precision, KEPT))
            found += [kept] if kept else []
            told = [f"{r.ratio:.2f}{'!' * short(r)}{'^' * large(r)}" if r else "-" for r in found]
            cells.append(f"{' / '.join(told):>22}")
        lines.append(f"  {model:<36}{''.join(cells)}")
    return lines


def by_machine(rows: Sequence[Row]) -> str:
    """A table of Markdown with the range of each loop by machine, and over all of them. `keep_casts` has
    columns where it was measured."""
    measured = [row for row in rows if row.ratio is not None and row.loop != STOCK]
    measured = [row for row in measured if row.model not in LAYERS]
    titles = {PLAIN: PLAIN, MODEL: "`model=`", KEPT: "`keep_casts`, `model=` being 1"}
    titles = {loop: title for loop, title in titles.items() if any(row.loop == loop for row in measured)}
    lines = []
    named = [(machine.about, {machine.name}) for machine in MACHINES]
    for about, names in (*named, ("**all**", {machine.name for machine in MACHINES})):
        told = []
        for loop in titles:
            own = sorted((row for row in measured if row.machine in names and row.loop == loop), key=_ratio)
            middle = f"{statistics.median(map(_ratio, own)):.2f}" if own else ""
            told += [ratio(own[0]), middle, f"{own[-1].ratio:.2f}"] if own else 3 * [""]
        if any(told):
            cells = len({row.key for row in measured if row.machine in names})
            lines.append([about, str(cells), *told])
    head = [cell for title in titles.values() for cell in (f"{title}: worst", "median", "best")]
    return markdown(["machine", "cells", *head], lines)


def _ratio(row: Row) -> float:
    return row.ratio
