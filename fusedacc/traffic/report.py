"""Counted bytes, and how they are shown: as numbers, as text, as CSV."""

from __future__ import annotations

import csv
import functools
from collections import Counter
from collections.abc import Iterable, Mapping
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

    def copy(self) -> Counts:
        return Counts(dict(self.cells), Counter(self.calls), Counter(self.uncounted), list(self.threads))

    @property
    def total(self) -> int:
        return _sum(self.cells.values()).total

    def by(self, name: str) -> dict[str, Cell]:
        """Bytes by phase, operator, kind or device, the largest first."""
        found: dict[str, Cell] = {}
        for place, cell in self.cells.items():
            value = getattr(place, name)
            found[value] = found.get(value, Cell()).plus(cell)
        return dict(sorted(found.items(), key=lambda item: -item[1].total))

    def _only(self, **names: str) -> Counts:
        """Bytes of one phase, operator, kind or device; without calls."""
        return Counts({p: c for p, c in self.cells.items() if names.items() <= p._asdict().items()})

    def as_dict(self) -> dict[str, Any]:
        """See `TrafficMeter.as_dict`."""
        calls: Counter[str] = Counter()
        for (_, op), count in self.calls.items():
            calls[op] += count
        phases = {phase: self._only(phase=phase) for phase in self.by("phase")}
        return {
            **_figures(_sum(self.cells.values()), sum(self.calls.values())),
            **{f"by_{name}": _totals(self.by(name)) for name in ("phase", "kind", "device")},
            "by_phase_and_kind": {phase: _totals(within.by("kind")) for phase, within in phases.items()},
            "by_op": {op: _figures(cell, calls[op]) for op, cell in self.by("op").items()},
            "by_phase_and_op": {
                phase: {
                    op: {
                        **_figures(cell, self.calls[phase, op]),
                        "by_kind": _totals(within._only(op=op).by("kind")),
                    }
                    for op, cell in within.by("op").items()
                }
                for phase, within in phases.items()
            },
            "uncounted": dict(self.uncounted),
            "uncounted_threads": list(self.threads),
        }

    def table(self, rows: int) -> str:
        """See `TrafficMeter.table`."""
        if rows < 1:
            raise ValueError(f"rows must be at least 1; got {rows}")
        lines = [f"{'':<52}{'calls':>8}{'read MB':>12}{'written MB':>12}{'MB':>12}{'share':>8}"]
        total = self.total
        for phase, cell in self.by("phase").items():
            calls = sum(count for (name, _), count in self.calls.items() if name == phase)
            lines.append(_line(phase, calls, cell, total))
            ops = list(self._only(phase=phase).by("op").items())
            lines += [_line("  " + op, self.calls[phase, op], c, total) for op, c in ops[:rows]]
            rest = ops[rows:]
            if rest:
                calls = sum(self.calls[phase, op] for op, _ in rest)
                lines.append(_line(f"  {len(rest)} other operators", calls, _sum(c for _, c in rest), total))
        lines.append(_line("total", sum(self.calls.values()), _sum(self.cells.values()), total))
        kinds = [f"{kind} {_share(c.total, total)}" for kind, c in self.by("kind").items()]
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
    return functools.reduce(Cell.plus, cells, Cell())


def _share(part: int, total: int) -> str:
    return f"{part / total:.1%}" if total else "-"


def _line(name: str, calls: int, cell: Cell, total: int) -> str:
    megabytes = (f"{size / 1e6:>12.3f}" for size in (*cell, cell.total))
    return f"{name:<52}{calls:>8}{''.join(megabytes)}{_share(cell.total, total):>8}"
