"""Partly filled windows of several ranks. They continue on the ranks that have saved them.

With `data_parallel=` each rank has its own sums and counters. A sum is saved as a tensor with a row for each
rank, and the rank's counters as another one. With FSDP2 the sums are DTensors, which need no rows, and the
counters are the same on all ranks except for the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...distributed import RankPlace
from ...distributed.fsdp import Shards
from ...distributed.rows import row_of_rank, with_rows_of_ranks
from ..window import Window
from .checks import check_copy, check_counters, check_entries
from .format import (
    DEFERRED_SCALE,
    NOISE,
    PUBLISHED,
    RANK_COUNTERS,
    RANK_SUM,
    Checkpoint,
    SavedSum,
    pack,
    unpack,
)
from .window_fields import A_BOOL, A_COUNT, A_NUMBER, FIELDS

#: How to continue on other ranks: the end of error messages.
ALLOWED_RANKS = (
    "Allowed: the same ranks, or a checkpoint saved between windows: after an update or flush(), or with "
    "state_dict(include_partial=False)"
)
#: Bytes of a rank's counters. The size must be the same on all ranks.
_WIDTH = 2048
#: Counters of a rank in addition to those of its window: which rank it is, whether it has a sum of this
#: parameter, and the number of its next addition with stochastic rounding.
_RANK = "rank"
_HAS_SUM = "has_sum"
_ADDITION = "addition"
_RULES_OF_ROW = {
    PUBLISHED: A_BOOL,
    DEFERRED_SCALE: A_NUMBER,
    _RANK: A_COUNT,
    _HAS_SUM: A_BOOL,
    _ADDITION: A_COUNT,
}


@dataclass(frozen=True)
class WindowRanks:
    """The ranks that fill a window together.

    Attributes:
        count: how many there are.
        by: what combines their gradients: "data_parallel=" or "FSDP2"; "" for a single process.
    """

    count: int
    by: str

    @classmethod
    def of(cls, window: Window, place: RankPlace) -> WindowRanks:
        """Return the ranks of a live window."""
        if place.count > 1:
            return cls(place.count, "data_parallel=")
        count = window.shards.ranks if window.shards else 1
        return cls(count, "FSDP2" if count > 1 else "")

    def __str__(self) -> str:
        return f"{self.count} ranks of {self.by}" if self.count > 1 else "one process"

    def counters(self) -> dict[str, Any]:
        """Return their counters for a checkpoint."""
        return {"ranks": self.count, "ranks_of": self.by}


def check_ranks(counters: dict[str, Any], present: WindowRanks) -> None:
    """Raise ValueError unless the present ranks have saved the partly filled window with these counters."""
    saved = WindowRanks(counters["ranks"], counters["ranks_of"])
    if saved != present:
        raise ValueError(
            f"state_dict holds a partly filled window of {saved}, and this run has {present}. {ALLOWED_RANKS}"
        )


# The sums of data_parallel=


def row_entries(
    total: Tensor, counters: dict[str, Any], place: RankPlace, *, has_sum: bool, addition: int
) -> dict[str, Tensor]:
    """Return the entries that save this rank's sum of a parameter with its counters."""
    of_row = counters | {_RANK: place.rank, _HAS_SUM: has_sum, _ADDITION: addition}
    row = total.detach().clone(memory_format=torch.contiguous_format)
    packed = pack(of_row, _WIDTH).to(total.device)  # so that the group can gather it
    return {RANK_SUM: with_rows_of_ranks(row, place), RANK_COUNTERS: with_rows_of_ranks(packed, place)}


def select_rank(
    checkpoint: Checkpoint, counters: dict[str, Any], place: RankPlace
) -> tuple[dict[str, Any], dict[Any, SavedSum]]:
    """Return the counters of this rank's window, and its sums by the parameters' saved names.

    Raises:
        ValueError: the checkpoint is damaged, or holds another rank's rows.
    """
    shared = _shared_by_ranks(counters)
    for copy in checkpoint.group_counters:
        check_counters(copy)
        check_copy(_shared_by_ranks(copy), shared, "the counters in a group")
    of_rows: dict[Any, dict[str, Any]] = {}
    for name, saved in checkpoint.rank_counters.items():
        of_rows[name] = unpack(_row(saved, name, place))
        _check_row(of_rows[name], shared, name, place.rank)
    totals = {name: _row(saved, name, place) for name, saved in checkpoint.rank_sums.items()}
    sums = {
        name: SavedSum.with_counters(totals[name], of_row)
        for name, of_row in of_rows.items()
        if of_row[_HAS_SUM]
    }
    first = next(iter(of_rows.values()))
    own_counters = counters | {"window": first["window"], "sums": len(sums)}
    if NOISE in counters:  # each rank counts its own additions
        own_counters[NOISE] = counters[NOISE] | {"addition": first[_ADDITION]}
    return own_counters, sums


def _shared_by_ranks(counters: dict[str, Any]) -> dict[str, Any]:
    """Return the counters that are the same on all ranks."""
    names = ("version", "counted", "reduction", "ranks", "ranks_of", "sums", "inner_steps")
    window = {field.name: counters["window"][field.name] for field in FIELDS if not field.per_rank}
    return {name: counters.get(name) for name in names} | {"window": window}


def _row(saved: Any, name: Any, place: RankPlace) -> Tensor:
    """Return this rank's row of what is saved for a parameter."""
    try:
        return row_of_rank(saved, place)
    except ValueError as error:
        raise ValueError(f"the sum of parameter {name!r} is damaged: {error}") from None


def _check_row(of_row: Any, shared: dict[str, Any], name: Any, rank: int) -> None:
    """Check that the counters of a row belong to this window and this rank."""
    check_counters(of_row)
    check_entries(of_row, _RULES_OF_ROW)
    where = f"the counters of a rank beside the sum of parameter {name!r}"
    check_copy(_shared_by_ranks(of_row), shared, where)
    if of_row[_RANK] != rank:
        raise ValueError(
            f"state_dict holds the sums of rank {of_row[_RANK]}, not of rank {rank}: state_dict() returns "
            "the sums of one rank only. Allowed: a file for each rank, or torch.distributed.checkpoint"
        )


# The weights of FSDP2's ranks. torch.distributed.checkpoint saves the counters of one rank, so these hold the
# weights of all ranks.


def with_weights_of_ranks(window: Mapping[str, Any], shards: Shards) -> dict[str, Any]:
    """Return the counters of a window with the ranks' weights added up. All ranks call it."""
    weight_total, weight = shards.summed([window["weight_total"], window["weight"] or 0.0])
    return {
        **window,
        "weight_total": weight_total,
        "weight": None if window["weight"] is None else weight,
    }


def with_weights_of_rank(window: Mapping[str, Any], shards: Shards) -> dict[str, Any]:
    """Return them with an equal share of the weights, because only the sum over the ranks matters."""
    weight = window["weight"]
    return {
        **window,
        "weight_total": window["weight_total"] / shards.ranks,
        "weight": None if weight is None else weight / shards.ranks,
    }
