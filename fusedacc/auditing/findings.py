"""What is found in all updates, and the findings of one update after another."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .number_ranges import NumberRanges


@dataclass(eq=False)
class Problem:
    """Something wrong in one or more updates.

    Attributes:
        kind: one of `records.KINDS`.
        text: what is wrong.
        location: the line of the script; empty: only libraries are on the stack.
        factor: by which the gradient is wrong ("scale"), one token counts more than another ("uneven"), a
            micro-batch or the last update counts ("double", "stale"), parameters count ("parameters"); the
            share of the micro-batches that reach the optimizer ("lost"). None: there is no one number.
        updates: numbers of the updates.
        optimizers: places of their optimizers in the report.
    """

    kind: str
    text: str
    location: str
    factor: float | None
    updates: NumberRanges = field(default_factory=NumberRanges)
    optimizers: set[int] = field(default_factory=set)

    def __str__(self) -> str:
        updates = "updates" if len(self.updates) > 1 else "update"
        return f"{updates} {self.updates}: {self.text}" + (f" [{self.location}]" if self.location else "")


class Row(NamedTuple):
    """What the report's table says of an update. Updates with the same row share it."""

    micro_batches: int
    weights: str
    total: str
    verdict: str


@dataclass
class Findings:
    """What the verdicts have found so far.

    Attributes:
        problems: by kind, location and cause.
        rows: by the optimizer's place in the report: the rows of the table, and their updates.
        places: places whose backward passes reach an update.
        unchecked: numbers of updates that could not be checked.
        checked, updates, micro_batches: how many.
        excused: by reason: passes that need not count.
        rest: by dtype: the largest part of a gradient that is no sum of those of micro-batches.
        has_unknown_loss: whether a loss did not show by what it is divided.
    """

    problems: dict[tuple[str, str, str], Problem] = field(default_factory=dict)
    rows: dict[int, dict[Row, NumberRanges]] = field(default_factory=dict)
    places: set[int] = field(default_factory=set)
    unchecked: NumberRanges = field(default_factory=NumberRanges)
    checked: int = 0
    updates: int = 0
    micro_batches: int = 0
    excused: Counter[str] = field(default_factory=Counter)
    rest: dict[torch.dtype, float] = field(default_factory=dict)
    has_unknown_loss: bool = False
