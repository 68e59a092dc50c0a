"""What is found in all updates, and the findings of one update after another."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .amounts import Amount
from .number_ranges import NumberRanges
from .records import ListedOptimizer, ProblemOfUpdate

#: Different sentences of a problem that are kept. Updates with yet others share `OTHERS`.
MAX_SENTENCES = 3
OTHERS = "the same with other numbers (see the table)"


@dataclass(eq=False)
class Sentence:
    """A sentence of a problem, which is true of all updates that it names.

    Attributes:
        text: with "{name}" for each amount, and for the names of parameters.
        amounts: their smallest and largest values in these updates.
        parameters: the names of those that it is about.
        updates: by the optimizer's place in the report: numbers of the updates.
    """

    text: str
    amounts: dict[str, Amount]
    parameters: str
    updates: dict[int, NumberRanges] = field(default_factory=dict)

    def include(self, problem: ProblemOfUpdate, optimizer: int, update: int) -> None:
        """Add an update with this sentence."""
        for name, amount in self.amounts.items():
            amount.include(problem.amounts[name])
        self.updates.setdefault(optimizer, NumberRanges()).add(update)

    def describe_updates(self, with_optimizers: bool = False) -> str:
        """Write "updates 1-6", or "updates 1-6 of optimizer 2"."""
        optimizers: dict[str, list[str]] = {}
        for place, numbers in sorted(self.updates.items()):
            word = "updates" if len(numbers) > 1 else "update"
            optimizers.setdefault(f"{word} {numbers}", []).append(str(place + 1))
        if not with_optimizers:
            return ", ".join(optimizers)
        return ", ".join(
            f"{updates} of optimizer{'s' * (len(places) > 1)} {', '.join(places)}"
            for updates, places in optimizers.items()
        )

    def __str__(self) -> str:
        return self.text.format(parameters=self.parameters, **self.amounts)


@dataclass(eq=False)
class Problem:
    """Something wrong in one or more updates.

    Attributes:
        kind: one of `records.KINDS`.
        location: the line of the script; empty: only libraries are on the stack.
        call: what the line calls, such as "step() at train.py:139".
        advice: what to do about it, with "{zero_grad}" for that of its optimizers.
        factor: that of the update in which it is furthest from 1: by which the gradient is wrong ("scale"),
            one token counts more than another ("uneven"), a micro-batch or the last update counts ("double",
            "stale"), parameters count ("parameters"); the share of the micro-batches that reach the optimizer
            ("lost"). None: there is no one number.
        sentences: what is wrong, by their texts, which differ if updates have different facts.
        listed: its optimizers, by their place in the report.
    """

    kind: str
    location: str
    call: str
    advice: str
    factor: float | None
    sentences: dict[str, Sentence] = field(default_factory=dict)
    listed: dict[int, ListedOptimizer] = field(default_factory=dict)

    def include(self, problem: ProblemOfUpdate, optimizer: ListedOptimizer, update: int) -> None:
        """Add an update that has the problem."""
        self.listed[optimizer.place] = optimizer
        text, amounts = problem.text, problem.amounts
        self.factor = max((self.factor, problem.factor), key=_distance_from_1)
        if text not in self.sentences and len(self.sentences) >= MAX_SENTENCES:
            text, amounts = OTHERS, {}
        sentence = self.sentences.setdefault(text, Sentence(text, dict(amounts), problem.parameters))
        sentence.include(problem, optimizer.place, update)

    @property
    def text(self) -> str:
        """What is wrong. If updates have different facts, it names the updates of all but the first."""
        first, *others = self.sentences.values()
        return str(first) + "".join(f" ({each.describe_updates()}: {each})" for each in others)

    @property
    def updates(self) -> list[int]:
        """The numbers of all updates that have the problem."""
        return sorted({number for each in self._ranges() for number in each})

    @property
    def optimizers(self) -> list[int]:
        """The places of their optimizers in the report."""
        return sorted(self.listed)

    def _ranges(self) -> list[NumberRanges]:
        return [numbers for each in self.sentences.values() for numbers in each.updates.values()]

    def describe(self, with_optimizers: bool = False) -> str:
        """Write the problem as lines: what is wrong in which updates, where, and what to do."""
        first, *others = (
            f"{each.describe_updates(with_optimizers)}: {each}" for each in self.sentences.values()
        )
        lines = [f"PROBLEM {self.kind}: {first}", *others]
        lines += [f"Where: {self.call}"] if self.location else []
        lines.append(self.advice.format(zero_grad=self._zero_grad() if with_optimizers else "zero_grad()"))
        return "\n    ".join(lines)

    def _zero_grad(self) -> str:
        """Name the optimizers whose `zero_grad()` should be called."""
        if len(self.listed) > 1:
            return f"the zero_grad() of optimizers {', '.join(str(place + 1) for place in self.optimizers)}"
        ((place, listed),) = self.listed.items()
        return f"the zero_grad() of optimizer {place + 1} ({listed})"

    def __str__(self) -> str:
        return self.describe()


def _distance_from_1(factor: float | None) -> float:
    """Return how far a factor is from 1. 1/4 is as far as 4."""
    if factor is None:
        return -1.0
    return abs(math.log(abs(factor))) if factor else math.inf


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
        problems: by kind, cause, location and parameters.
        rows: by the optimizer's place in the report: the rows of the table, and their updates.
        places: places whose backward passes reach an update.
        first_places: by the optimizer's place in the report: places of the passes of its first update.
        unchecked: numbers of updates that could not be checked.
        checked, updates, micro_batches: how many.
        excused: by reason: passes that need not count.
        rest: by dtype: the largest part of a gradient that is no sum of those of micro-batches.
        unmade: checks that were not made in updates with problems.
        has_unknown_loss: whether a loss did not show by what it is divided.
        has_undivided_sum: whether a loss was a sum that nothing divides.
    """

    problems: dict[tuple[str, ...], Problem] = field(default_factory=dict)
    rows: dict[int, dict[Row, NumberRanges]] = field(default_factory=dict)
    places: set[int] = field(default_factory=set)
    first_places: dict[int, frozenset[int]] = field(default_factory=dict)
    unchecked: NumberRanges = field(default_factory=NumberRanges)
    checked: int = 0
    updates: int = 0
    micro_batches: int = 0
    excused: Counter[str] = field(default_factory=Counter)
    rest: dict[torch.dtype, float] = field(default_factory=dict)
    unmade: set[str] = field(default_factory=set)
    has_unknown_loss: bool = False
    has_undivided_sum: bool = False
