"""Counted bytes by kind of memory, and the figures as numbers, text and CSV."""

from __future__ import annotations

import csv
import functools
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..kernels.local_parts import is_distributed, local
from .rules import Operand, tensors_in

NOTE = "compulsory bytes: each operand of an operator once"
COLUMNS = ("phase", "op", "kind", "device", "calls", "read_bytes", "written_bytes")


class Cell(NamedTuple):
    """Bytes read and written."""

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
    """Bytes by place, calls by (phase, operator), and operators and threads that were not counted."""

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
        """Return the bytes by phase, operator, kind or device, the largest first."""
        found: dict[str, Cell] = {}
        for place, cell in self.cells.items():
            value = getattr(place, name)
            found[value] = found.get(value, Cell()).plus(cell)
        return dict(sorted(found.items(), key=lambda item: -item[1].total))

    def _only(self, **names: str) -> Counts:
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
            lines.append(f"NOT COUNTED, no rule: {names}")
        if self.threads:
            names = ", ".join(self.threads)
            lines.append(f"NOT COUNTED: anything that {len(self.threads)} other threads ran: {names}")
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
    return {"calls": calls, "read_bytes": cell.read, "written_bytes": cell.written, "total_bytes": cell.total}


def _totals(cells: Mapping[str, Cell]) -> dict[str, int]:
    return {name: cell.total for name, cell in cells.items()}


def _sum(cells: Iterable[Cell]) -> Cell:
    return functools.reduce(Cell.plus, cells, Cell())


def _share(part: int, total: int) -> str:
    return f"{part / total:.1%}" if total else "-"


def _line(name: str, calls: int, cell: Cell, total: int) -> str:
    megabytes = (f"{size / 1e6:>12.3f}" for size in (*cell, cell.total))
    return f"{name:<52}{calls:>8}{''.join(megabytes)}{_share(cell.total, total):>8}"


@dataclass
class Memory:
    """A storage: its kind, once known, and its bytes by phase, operator and device."""

    reference: weakref.ref[torch.UntypedStorage] | None = None
    kind: str | None = None
    cells: dict[tuple[str, str, str], Cell] = field(default_factory=dict)

    def add(self, phase: str, op: str, operand: Operand) -> None:
        where = phase, op, operand.device if operand.tensor is None else str(operand.tensor.device)
        self.cells[where] = self.cells.get(where, Cell()).plus(Cell(operand.read, operand.written))

    def book(self, counts: Counts) -> None:
        for (phase, op, device), cell in self.cells.items():
            counts.add(phase, op, self.kind or "other", device, cell)


class Ledger:
    """Bytes of storages. Their kind is read only when a storage is freed or the figures are requested."""

    def __init__(self) -> None:
        self.counts = Counts()
        self._leaves: dict[int, weakref.ref[Tensor]] = {}
        #: Storages by address, and the addresses of freed ones. Address 0: sums that no tensor refers to.
        self._memories = {0: Memory(kind="gradients")}
        self._freed: deque[int] = deque()

    def memory(self, tensor: Tensor | None) -> Memory:
        """Return the tensor's storage; for None, the one of all sums without a tensor."""
        self._close_freed()
        if tensor is None:
            return self._memories[0]
        storage = tensor.untyped_storage()
        key, freed = storage._cdata, self._freed
        if key not in self._memories:
            self._memories[key] = Memory(weakref.ref(storage, lambda _: freed.append(key)))
        return self._memories[key]

    def snapshot(self) -> Counts:
        """Return a copy of the counts. Each byte has the kind known so far."""
        self._close_freed()
        copy = self.counts.copy()
        for memory in self._memories.values():
            memory.book(copy)
        return copy

    def reset(self) -> None:
        """Set the counts to zero. What is known about tensors is kept."""
        self.counts = Counts()
        for memory in self._memories.values():
            memory.cells.clear()

    def _close_freed(self) -> None:
        while self._freed:
            self._memories.pop(self._freed.popleft()).book(self.counts)
            if len(self._leaves) > 2 * len(self._memories):
                self._leaves = {name: leaf for name, leaf in self._leaves.items() if leaf() is not None}

    # What tensors are

    def know(self, leaf: Tensor) -> None:
        """Record a leaf that requires a gradient: its memory holds weights."""
        if id(leaf) not in self._leaves or self._leaves[id(leaf)]() is not leaf:
            self._leaves[id(leaf)] = weakref.ref(leaf)
        for part in _plain_parts(leaf):
            self.memory(part).kind = "weights"

    def know_gradient(self, tensor: Tensor | None) -> None:
        """Record a leaf's `.grad`, unless it has a kind already."""
        for part in _plain_parts(tensor):
            memory = self.memory(part)
            memory.kind = memory.kind or "gradients"

    def know_gradients(self) -> None:
        for reference in list(self._leaves.values()):
            leaf = reference()
            self.know_gradient(leaf.grad if leaf is not None and leaf.is_leaf else None)

    def know_state(self, optimizer: Optimizer) -> None:
        for state in list(optimizer.state.values()):
            for tensor in tensors_in(state):
                for part in _plain_parts(tensor):
                    self.memory(part).kind = "optimizer"


def leaves_of(parameters: Any) -> list[Tensor]:
    """Return the tensors of a module, an optimizer or an iterable; raise TypeError for anything else."""
    if parameters is None:
        return []
    if isinstance(parameters, torch.nn.Module):
        return list(parameters.parameters())
    if isinstance(parameters, Optimizer):
        return [parameter for group in parameters.param_groups for parameter in group["params"]]
    allowed = "a torch.nn.Module, a torch.optim.Optimizer or an iterable of tensors"
    if isinstance(parameters, Tensor) or not isinstance(parameters, Iterable):
        raise TypeError(f"parameters must be {allowed}, got {type(parameters).__name__}")
    leaves = list(parameters)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise TypeError(f"parameters must be {allowed}; it holds {type(leaf).__name__}")
    return leaves


def _plain_parts(tensor: Any) -> Iterator[Tensor]:
    """Yield the tensors with their own memory: the tensor itself, or those that it wraps."""
    if tensor is None:
        return
    if is_distributed(tensor):  # its mesh is among the flattened parts
        yield from _plain_parts(local(tensor))
    elif is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _plain_parts(getattr(tensor, name))
    elif tensor.layout is torch.strided and not tensor.is_nested:
        yield tensor
