"""Counted bytes, and how they are shown: as numbers, as text, as CSV."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

NOTE = "compulsory bytes: each operand of an operator once"
COLUMNS = ("phase", "op", "kind", "device", "calls", "read_bytes", "written_bytes")


class Cell(NamedTuple):
    """Bytes."""

    read: int = 0
    written: int = 0

    @property
    def total(self) -> int:
        return self.read + self.written

    def plus(self, other: Cell) -> Cell:
        return Cell(self.read + other.read, self.written + other.written)


class Place(NamedTuple):
    """What bytes are counted by."""

    phase: str
    op: str
    kind: str
    device: str


@dataclass
class Counts:
    """Bytes by place, calls by (phase, operator), and the operators and threads that could not be counted."""

    cells: dict[Place, Cell] = field(default_factory=dict)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    uncounted: Counter[str] = field(default_factory=Counter)
    threads: list[str] = field(default_factory=list)

    def add(self, phase: str, op: str, kind: str, device: str, cell: Cell) -> None:
        place = Place(phase, op, kind, device)
        self.cells[place] = self.cells.get(place, Cell()).plus(cell)

    def book(self, cells: Mapping[tuple[str, str, str], Sequence[int]], kind: str) -> None:
        """Adds what one tensor's memory moved, by phase, operator and device."""
        for (phase, op, device), (read, written) in cells.items():
            self.add(phase, op, kind, device, Cell(read, written))

    def copy(self) -> Counts:
        return Counts(dict(self.cells), Counter(self.calls), Counter(self.uncounted), list(self.threads))

    @property
    def total(self) -> int:
        return sum(cell.total for cell in self.cells.values())

    def by(self, name: Callable[[Place], Any]) -> dict[Any, Cell]:
        """Bytes by what `name` makes of a place, the largest first."""
        found: dict[Any, Cell] = {}
        for place, cell in self.cells.items():
            found[name(place)] = found.get(name(place), Cell()).plus(cell)
        return dict(sorted(found.items(), key=lambda item: -item[1].total))

    def as_dict(self) -> dict[str, Any]:
        """See `TrafficMeter.as_dict`."""
        calls: Counter[str] = Counter()
        for (_, op), count in self.calls.items():
            calls[op] += count
        by_op = {op: _figures(cell, calls[op]) for op, cell in self.by(lambda p: p.op).items()}
        by_phase_and_op: dict[str, dict[str, Any]] = {}
        for (phase, op), cell in self.by(lambda p: (p.phase, p.op)).items():
            kinds = self._only(phase, op).by(lambda p: p.kind)
            by_phase_and_op.setdefault(phase, {})[op] = {
                **_figures(cell, self.calls[phase, op]),
                "by_kind": _totals(kinds),
            }
        by_phase_and_kind: dict[str, dict[str, int]] = {}
        for (phase, kind), cell in self.by(lambda p: (p.phase, p.kind)).items():
            by_phase_and_kind.setdefault(phase, {})[kind] = cell.total
        return {
            "total_bytes": self.total,
            "read_bytes": sum(cell.read for cell in self.cells.values()),
            "written_bytes": sum(cell.written for cell in self.cells.values()),
            "calls": sum(self.calls.values()),
            "by_phase": _totals(self.by(lambda p: p.phase)),
            "by_kind": _totals(self.by(lambda p: p.kind)),
            "by_device": _totals(self.by(lambda p: p.device)),
            "by_phase_and_kind": by_phase_and_kind,
            "by_op": by_op,
            "by_phase_and_op": by_phase_and_op,
            "uncounted": dict(self.uncounted),
            "uncounted_threads": list(self.threads),
        }

    def _only(self, phase: str, op: str) -> Counts:
        return Counts({p: c for p, c in self.cells.items() if (p.phase, p.op) == (phase, op)})

    def table(self, rows: int) -> str:
        """See `TrafficMeter.table`."""
        if rows < 1:
            raise ValueError(f"rows must be at least 1; got {rows}")
        lines = [f"{'':<52}{'calls':>8}{'read MB':>12}{'written MB':>12}{'MB':>12}{'share':>8}"]
        total = self.total
        for phase, cell in self.by(lambda p: p.phase).items():
            calls = sum(count for (name, _), count in self.calls.items() if name == phase)
            lines.append(_line(phase, calls, cell, total))
            within = Counts({p: c for p, c in self.cells.items() if p.phase == phase})
            ops = list(within.by(lambda p: p.op).items())
            lines += [_line("  " + op, self.calls[phase, op], c, total) for op, c in ops[:rows]]
            rest = ops[rows:]
            if rest:
                calls = sum(self.calls[phase, op] for op, _ in rest)
                lines.append(_line(f"  {len(rest)} other operators", calls, _sum(c for _, c in rest), total))
        lines.append(_line("total", sum(self.calls.values()), _sum(self.cells.values()), total))
        kinds = [f"{kind} {_share(c.total, total)}" for kind, c in self.by(lambda p: p.kind).items()]
        lines.append(f"{NOTE}" + (f"; {', '.join(kinds)}" if kinds else ""))
        if self.uncounted:
            names = ", ".join(f"{op} ({count} calls)" for op, count in self.uncounted.most_common())
            lines.append(f"NOT COUNTED, for want of a rule: {names}")
        if self.threads:
            names = ", ".join(self.threads)
            lines.append(f"NOT COUNTED: what {len(self.threads)} other threads ran, if anything: {names}")
        return "\n".join(lines)

    def to_csv(self, path: Path) -> None:
        """See `TrafficMeter.to_csv`."""
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            for place, cell in sorted(self.cells.items()):
                writer.writerow([*place, self.calls[place.phase, place.op], *cell])
            for op, count in sorted(self.uncounted.items()):
                writer.writerow(["uncounted", op, "", "", count, "", ""])
            for thread in self.threads:
                writer.writerow(["uncounted", f"thread {thread}", "", "", "", "", ""])


def _figures(cell: Cell, calls: int) -> dict[str, int]:
    return {
        "calls": calls,
        "read_bytes": cell.read,
        "written_bytes": cell.written,
        "total_bytes": cell.total,
    }


def _totals(cells: Mapping[str, Cell]) -> dict[str, int]:
    return {name: cell.total for name, cell in cells.items()}


def _sum(cells: Iterable[Cell]) -> Cell:
    found = Cell()
    for cell in cells:
        found = found.plus(cell)
    return found


def _share(part: int, total: int) -> str:
    return f"{part / total:.1%}" if total else "-"


def _line(name: str, calls: int, cell: Cell, total: int) -> str:
    megabytes = (f"{size / 1e6:>12.3f}" for size in (*cell, cell.total))
    return f"{name:<52}{calls:>8}{''.join(megabytes)}{_share(cell.total, total):>8}"
