"""The only list of the fields of a window's state in a checkpoint.

Saving, loading, checking and merging all use this list. To add a field, add an entry with the version of the
format that introduces it. Older files lack the field, so it must be optional.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from operator import attrgetter
from typing import Any

from torch import Tensor

#: Versions of the format: the first with deferred scales, and the first with windows of several ranks.
VERSION, RANKED_VERSION = 2, 3

Check = Callable[[Any], bool]


class Ranks(enum.Enum):
    """How the values of a field on several ranks are merged into one."""

    #: All ranks have the same value.
    SAME = enum.auto()
    #: Take the maximum.
    MAX = enum.auto()
    #: Take the sum.
    SUM = enum.auto()
    #: The result depends on other fields (see `ranked_checkpoint`).
    OWN = enum.auto()


@dataclass(frozen=True)
class Field:
    """One field of a window's state.

    Attributes:
        name: its key in the checkpoint.
        path: the attribute of the window, with dots for nested ones.
        holds: whether a value is valid.
        allowed: the valid values in words.
        ranks: how the values of several ranks are merged.
        since: the first version of the format that has it.
        optional: whether it is left out when it is 0.
        over_ranks: whether only windows of several ranks save it.
        holds_over_ranks: stricter `holds` and `allowed` for windows of several ranks.
    """

    name: str
    path: str
    holds: Check
    allowed: str
    ranks: Ranks = Ranks.SAME
    since: int = 1
    optional: bool = False
    over_ranks: bool = False
    holds_over_ranks: tuple[Check, str] | None = None

    def of(self, window: Any) -> Any:
        """Return the window's value as a plain number. Synchronises if it is on a GPU."""
        value = attrgetter(self.path)(window)
        return value.item() if isinstance(value, Tensor) else value

    def put(self, window: Any, value: Any) -> None:
        owner, _, name = self.path.rpartition(".")
        setattr(attrgetter(owner)(window) if owner else window, name, value)

    def merged(self, windows: Sequence[Mapping[str, Any]], own: Mapping[str, Any]) -> Any:
        """Merge the values of some ranks' windows; `own` is the value for a rank without a saved window."""
        if self.ranks is Ranks.MAX:
            return max(window[self.name] for window in windows or [own])
        if self.ranks is Ranks.SUM:
            values = [window[self.name] for window in windows]
            return None if None in values or own[self.name] is None else sum(values, 0.0)
        return own.get(self.name)


def is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_factor(value: Any) -> bool:
    return is_number(value) and math.isfinite(value) and value != 0


def _is_weight(value: Any) -> bool:
    return value is None or (is_number(value) and math.isfinite(value) and value >= 0)


def _are_totals(value: Any) -> bool:
    return value is None or (isinstance(value, list) and len(value) == 3 and all(map(is_number, value)))


A_COUNT, A_BOOL, A_NUMBER = (is_count, "an int >= 0"), (is_bool, "a bool"), (is_number, "a number")
_OF_RANKS: Any = {"since": RANKED_VERSION, "over_ranks": True}
FIELDS = (
    Field("num_updates", "num_updates", *A_COUNT),
    Field("num_skipped", "num_skipped", *A_COUNT),
    Field("has_updated", "has_updated", *A_BOOL),
    Field("micro_step", "micro_step", *A_COUNT, Ranks.MAX),
    Field("weight_total", "weight_total", *A_NUMBER, Ranks.SUM),
    Field(
        "factor",
        "sum_scale",
        *A_NUMBER,
        Ranks.OWN,
        holds_over_ranks=(_is_factor, "a finite number that is not 0"),
    ),
    Field("steps", "_steps", lambda v: v is None or (type(v) is int and v >= 1), "an int >= 1 or None"),
    Field("tainted", "tainted", lambda v: v is None, "None"),
    Field("ran", "micro.ran", *A_BOOL, Ranks.MAX),
    Field("weight", "micro._weight", _is_weight, "None or a finite number >= 0", Ranks.SUM),
    # Negative after ranks were added: their share of the sums has fewer micro-batches than they count.
    Field(
        "carried",
        "extra_micro_batches",
        lambda v: type(v) is int,
        "an int",
        Ranks.OWN,
        since=RANKED_VERSION,
        optional=True,
    ),
    Field("reduced", "reduced", *A_BOOL, **_OF_RANKS),
    Field("totals", "saved_totals", _are_totals, "None or three numbers", **_OF_RANKS),
    Field("usual_backwards", "usual_backwards", *A_COUNT, Ranks.MAX, **_OF_RANKS),
    Field("num_backwards", "micro.num_backwards", *A_COUNT, Ranks.MAX, **_OF_RANKS),
)


def state_of(window: Any, over_ranks: bool = False) -> dict[str, Any]:
    """Return a window's state for a checkpoint, with `over_ranks` including the fields of several ranks."""
    values = [(field, field.of(window)) for field in FIELDS if over_ranks or not field.over_ranks]
    return {field.name: value for field, value in values if value or not field.optional}


def version_of(state: Mapping[str, Any]) -> int:
    """Return the version of the format that this state needs."""
    return max(VERSION, *(field.since for field in FIELDS if field.name in state))


def rules(over_ranks: bool = False) -> dict[str, tuple[Check, str]]:
    """Return, for each field, a check of its value and the valid values in words."""
    if not over_ranks:
        return {field.name: (field.holds, field.allowed) for field in FIELDS if not field.over_ranks}
    stricter = {field.name: field.holds_over_ranks for field in FIELDS if field.holds_over_ranks}
    return {field.name: (field.holds, field.allowed) for field in FIELDS if field.over_ranks} | stricter
