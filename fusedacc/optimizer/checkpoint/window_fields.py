"""The counters of a window in a checkpoint: which there are, and which values they may have."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor

from ...distributed import Totals
from ..window import Window


class Rule(NamedTuple):
    """What a saved value must be.

    Attributes:
        holds: tells whether a value is allowed.
        allowed: the allowed values in words.
    """

    holds: Callable[[Any], bool]
    allowed: str


def is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def is_positive_int(value: Any) -> bool:
    return type(value) is int and value >= 1


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_weight_or_none(value: Any) -> bool:
    return value is None or (is_number(value) and math.isfinite(value) and value >= 0)


def _are_totals_or_none(value: Any) -> bool:
    return value is None or (isinstance(value, list) and len(value) == 3 and all(map(is_number, value)))


A_BOOL = Rule(is_bool, "a bool")
A_COUNT = Rule(is_count, "an int >= 0")
A_NUMBER = Rule(is_number, "a number")


@dataclass(frozen=True)
class Field:
    """One counter of a window.

    Attributes:
        name: its key in the checkpoint.
        path: the attribute of the window, with dots for nested ones.
        rule: the values that it may have.
        per_rank: whether it may differ between the ranks of one window.
    """

    name: str
    path: str
    rule: Rule
    per_rank: bool = False

    def read(self, window: Window) -> Any:
        """Return the window's value as a plain number. Synchronises if it is on a GPU."""
        value = attrgetter(self.path)(window)
        return value.item() if isinstance(value, Tensor) else value

    def write(self, window: Window, value: Any) -> None:
        owner, _, name = self.path.rpartition(".")
        setattr(attrgetter(owner)(window) if owner else window, name, value)


class TotalsField(Field):
    """The totals of all ranks, saved as a list of numbers."""

    def read(self, window: Window) -> Any:
        totals = window.totals
        if totals is None:
            return None
        return [float(number) for number in (totals.micro_batches, totals.weight, totals.num_flushing)]

    def write(self, window: Window, value: Any) -> None:
        if value is not None:
            micro_batches, weight, num_flushing = value
            window.set_totals(Totals(micro_batches, weight, num_flushing, None))


FIELDS = (
    Field("num_updates", "num_updates", A_COUNT),
    Field("num_skipped", "num_skipped", A_COUNT),
    Field("has_updated", "has_updated", A_BOOL),
    Field("micro_step", "micro_step", A_COUNT, per_rank=True),
    Field("weight_total", "weight_total", A_NUMBER, per_rank=True),
    Field("sum_scale", "sum_scale", A_NUMBER, per_rank=True),
    Field("steps", "_steps", Rule(lambda v: v is None or is_positive_int(v), "an int >= 1 or None")),
    # Only copies and pickles have one: a tainted window is not saved.
    Field("tainted", "tainted", Rule(lambda v: v is None, "None")),
    Field("ran", "ran", A_BOOL, per_rank=True),
    Field(
        "weight",
        "micro._weight",
        Rule(_is_weight_or_none, "None or a finite number >= 0"),
        per_rank=True,
    ),
    TotalsField("totals", "totals", Rule(_are_totals_or_none, "None or three numbers")),
    Field("usual_backwards", "usual_backwards", A_COUNT, per_rank=True),
    Field("num_backwards", "num_backwards", A_COUNT, per_rank=True),
)
#: The counters that an empty window has too.
_OF_UPDATES = ("num_updates", "num_skipped", "has_updated")


def read_window(window: Window) -> dict[str, Any]:
    """Return the window's counters as plain numbers. Synchronises if weights are on a GPU."""
    return {field.name: field.read(window) for field in FIELDS}


def restore_window(window: Window, saved: Mapping[str, Any]) -> None:
    """Load the result of `read_window`."""
    window.reset()
    for field in FIELDS:
        field.write(window, saved[field.name])


def new_window() -> dict[str, Any]:
    """Return the counters of a new window."""
    return read_window(Window(None, None))


def emptied(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counters of an empty window after the same updates."""
    return new_window() | {name: saved[name] for name in _OF_UPDATES}


def is_partial(saved: Mapping[str, Any]) -> bool:
    """Whether these are the counters of a partly filled window."""
    return saved["micro_step"] > 0 or saved["ran"]
