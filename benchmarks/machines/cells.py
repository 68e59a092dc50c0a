"""A cell is one model in one precision on one machine: its rows, its goals, and the table of all cells."""

import dataclasses
import hashlib
import operator
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
#: Goal: the least speed of a loop relative to its baseline, judged by the upper end of its interval.
LEAST = 0.98
#: Goal: the least median speed of `model=` over all cells.
LEAST_MEDIAN = 1.05
#: Goal: a peak may exceed stock's by the larger of these bytes and this share.
ROOM, SHARE = 1_000_000, 0.01
#: If other processes took more than this share of the CPUs' time, a rerun measures the cell again.
BUSY = 0.1
#: Files that the figures depend on. A rerun measures again after any of them has changed.
SOURCES = (
    *("fusedacc/**/*.py", "csrc/**/*", "benchmarks/machines/**/*.py", "examples/demo/model.py"),
    *("benchmarks/contestants/loops.py", "benchmarks/contestants/experts.py"),
)

Key = tuple[str, str, str]


@dataclasses.dataclass(frozen=True)
class Row:
    """The figures of one loop in a cell, in microseconds per window: a line of the CSV.

    Attributes:
        way: the baseline: the fastest of stock's loops, or what `baseline` names.
        ratio: the median over rounds of the baseline's time divided by this loop's (above 1 is faster), with
            its 95 % interval from `low` to `high`.
        peak, stock_peak: live bytes of the loop and of the baseline.
        others: the share of the CPUs' time that other processes took.
        effects, sources: what the machine's settings came to; a digest of the measured code.
        note: why a cell or a machine could not be measured.
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
#: The type of each column, from its annotation, such as "int | None".
_TYPES = {f.name: {"int": int, "float": float}.get(str(f.type)[:-7], str) for f in dataclasses.fields(Row)}


def names(precision: str) -> tuple[str, ...]:
    return (STOCK, *(way.name for way in ours(precision)))


def baseline(loop: str) -> str:
    """Return the loop that this one is compared with."""
    return MODEL if loop == KEPT else STOCK


def sources() -> str:
    """Return a digest of the files that SOURCES names. It is the same in every checkout of the same code."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern) if path.is_file()):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def parsed(line: Line) -> Row:
    return Row(**{name: _TYPES[name](line[name]) for name in COLUMNS if line[name]})


def by_device(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """Return the newest line of each loop in each cell, by processor.

    Lines with other sources or versions than the processor's last line are left out.
    """
    same, of = ("sources", "torch", "python"), ("machine", "model", "precision", "loop")
    found = {}
    for device in dict.fromkeys(line["device"] for line in lines if line["ratio"]):
        own = [line for line in lines if line["device"] == device and line["ratio"]]
        own = [line for line in own if all(line[name] == own[-1][name] for name in same)]
        found[device] = list({tuple(line[name] for name in of): line for line in own}.values())
    return found


def finished(path: Path, conditions: Mapping[str, str], digest: str) -> dict[tuple[str, ...], Row]:
    """Return the last row of each cell and loop in `path`, measured here with these versions and sources."""
    if not path.exists():
        return {}
    same = ("device", "torch", "python")
    lines = [line for line in read(path) if all(line[name] == conditions[name] for name in same)]
    rows = [parsed(line) for line in lines if line["sources"] == digest]
    return {(*row.key, row.loop): row for row in rows}


def short(row: Row) -> bool:
    """Return whether a loop is slower than its goal."""
    return row.high is not None and row.loop != STOCK and row.high < LEAST


def disturbed(row: Row) -> bool:
    """Return whether other processes took too large a share of the machine."""
    return row.others is not None and row.others > BUSY


def large(row: Row) -> bool:
    """Return whether a loop's peak is above its goal."""
    return bool(row.peak and row.stock_peak and row.peak > row.stock_peak + max(ROOM, SHARE * row.stock_peak))


def ratio(row: Row) -> str:
    return f"{row.ratio:.2f} ({row.low:.2f} to {row.high:.2f})"


_ratio = operator.attrgetter("ratio")


def ranked(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of our loops that were measured, the slowest first."""
    return sorted((row for row in rows if row.ratio is not None and row.loop != STOCK), key=_ratio)


def report(rows: Iterable[Row]) -> str:
    """Return each cell's ratios by machine, the worst of each loop, and every missed goal."""
    rows, lines = list(rows), []
    measured = [row for row in rows if row.ratio is not None and row.loop != STOCK]
    for machine in MACHINES:
        own = [row for row in measured if row.machine == machine.name]
        lines += _machine(machine.about, own) if own else []
    lines += [f"{' '.join(row.key).strip()}: {row.note}" for row in rows if not row.ratio and not row.loop]
    busy = dict.fromkeys(", ".join(row.key) for row in measured if disturbed(row))
    lines += [f"others took more than {BUSY:.0%} of the CPUs: {'; '.join(busy)}"] if busy else []
    lines.append("")
    for loop in (PLAIN, MODEL, KEPT):
        own = ranked(row for row in measured if row.loop == loop and row.model not in LAYERS)
        if not own:
            continue
        held_to, worst, median = baseline(loop), own[0], statistics.median(map(_ratio, own))
        lines.append(
            f"{loop}: worst {ratio(worst)} of {held_to}'s speed ({', '.join(worst.key)}), "
            f"median {median:.2f}, best {own[-1].ratio:.2f}; {len(own)} cells"
        )
        if loop == MODEL and median < LEAST_MEDIAN:
            lines.append(f"  the goal for the median is {LEAST_MEDIAN}: MISSED")
        lines += [f"  below {LEAST}: {', '.join(row.key)}: {ratio(row)}" for row in filter(short, own)]
        for row in filter(large, own):
            above = f"{row.peak / 1e6:.1f} MB, {held_to} {row.stock_peak / 1e6:.1f}"
            lines.append(f"  peak above {held_to}'s: {', '.join(row.key)}: {above}")
    return "\n".join(lines)


def _machine(about: str, rows: Sequence[Row]) -> list[str]:
    """Return the block of one machine: a line per model, with `plain / model=` in each precision.

    `/ keep_casts` follows where it was measured. "!" marks a speed and "^" a peak that misses its goal.
    """
    of = {(row.model, row.precision, row.loop): row for row in rows}
    lines = ["", f"{about}; {rows[-1].effects}"]
    lines.append(f"  {'speed against stock, plain / model=':<36}" + "".join(f"{p:>22}" for p in PRECISIONS))
    for model in dict.fromkeys(row.model for row in rows):
        text = f"  {model:<36}"
        for precision in PRECISIONS:
            found = [of.get((model, precision, loop)) for loop in (PLAIN, MODEL, KEPT)]
            found = found if found[-1] else found[:-1]
            shown = [f"{r.ratio:.2f}{'!' * short(r)}{'^' * large(r)}" if r else "-" for r in found]
            text += f"{' / '.join(shown):>22}"
        lines.append(text)
    return lines


def by_machine(rows: Sequence[Row]) -> str:
    """Return a Markdown table: the range of each loop that was measured, by machine and over all machines."""
    measured = ranked(row for row in rows if row.model not in LAYERS)
    titles = {PLAIN: PLAIN, MODEL: "`model=`", KEPT: "`keep_casts`, `model=` being 1"}
    titles = {loop: title for loop, title in titles.items() if any(row.loop == loop for row in measured)}
    lines = []
    named = [(machine.about, {machine.name}) for machine in MACHINES]
    for about, machines in (*named, ("**all**", {machine.name for machine in MACHINES})):
        here = [row for row in measured if row.machine in machines]
        shown = []
        for loop in titles:
            own = [row for row in here if row.loop == loop]
            middle = f"{statistics.median(map(_ratio, own)):.2f}" if own else ""
            shown += [ratio(own[0]), middle, f"{own[-1].ratio:.2f}"] if own else 3 * [""]
        lines += [[about, str(len({row.key for row in here})), *shown]] if here else []
    head = [cell for title in titles.values() for cell in (f"{title}: worst", "median", "best")]
    return markdown(["machine", "cells", *head], lines)
