"""Saves and loads a partly filled window of several ranks, on the same or another number of ranks.

Each rank has the sums and counters that a checkpoint of one process holds. `spread` stores them as one row
for each rank, and `of_rank` turns the rows that this rank has read back into what one process would have
saved. Sums that were already all-reduced are equal on all ranks, and are saved as by one process.

On another number of ranks, each rank continues at the window's micro-batch. A rank then has several rows,
which are added, or none. `carried` is the number of micro-batches in its sums beyond those that it counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..accumulators import Slot
from ..accumulators.reduction import reduction_of
from ..distributed import RankPlace
from ..distributed.rows import own_rows, spread
from . import checkpoint_checks as checks
from .window import FIELDS, RANKED_VERSION, Window

SUM = "fusedacc_sum"
RANK_SUM = "fusedacc_rank_sum"
RANK_COUNTERS = "fusedacc_rank_counters"
#: Bytes of a rank's counters. The size must be the same on all ranks.
WIDTH = 2048


def packed(counters: dict[str, Any], width: int = 0) -> Tensor:
    """Encode counters as a uint8 tensor of at least `width` bytes, which every format stores unchanged."""
    return torch.tensor(list(json.dumps(counters).ljust(width).encode()), dtype=torch.uint8)


def unpacked(saved: Any) -> Any:
    """Decode the result of `packed`, or its text. Raises ValueError if it is damaged."""
    try:
        return json.loads(saved if isinstance(saved, str) else bytes(saved.to(torch.uint8).tolist()))
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"the counters are damaged: {error}") from None


def rows_of(
    slots: Mapping[int, Slot], sums: Mapping[int, Tensor | None], reduced: bool
) -> dict[int, Tensor | None]:
    """Return the sums, with zeros where another rank may have one: all ranks save the same parameters."""
    return {
        index: torch.zeros_like(slot.param, dtype=slot.accumulate_dtype, requires_grad=False)
        if sums[index] is None and not reduced and (slot.in_bucket or slot.param.requires_grad)
        else sums[index]
        for index, slot in slots.items()
    }


def row(said: dict[str, Any], total: Tensor, reduced: bool, place: RankPlace) -> dict[str, Any]:
    """Return the entries for a parameter's state; `reduced` says that all ranks have the same sum."""
    record = packed(said | {"rank": place.rank}, WIDTH).to(total.device)  # so that the group can gather it
    kept = total.detach().clone(memory_format=torch.contiguous_format)
    counters = {RANK_COUNTERS: spread(record.unsqueeze(0), place)}
    return counters | ({SUM: kept} if reduced else {RANK_SUM: spread(kept.unsqueeze(0), place)})


def of_rank(
    own: dict[str, Any],
    sums: Mapping[Any, Tensor],
    rows: Mapping[Any, Any],
    counters: Mapping[Any, Any],
    place: RankPlace,
) -> tuple[dict[str, Any], dict[Any, Tensor], dict[Any, dict[str, Any]]]:
    """Return this rank's share of the window as one process would have saved it.

    Args:
        own: the counters of the parameter groups.
        sums: by saved parameter name, sums that are equal on all ranks.
        rows: by saved parameter name, the rows of each rank's sums.
        counters: by saved parameter name, the counters of these rows.
        place: this rank among all ranks.

    Returns:
        The counters, the sums, and the counters stored with each sum.

    Raises:
        ValueError: the checkpoint is damaged, or holds another rank's rows.
    """
    checks.check_over_ranks(own)
    reduced = own["window"]["reduced"]
    if counters.keys() != (sums if reduced else rows).keys() or (rows if reduced else sums):
        raise ValueError(
            "state_dict is damaged: sums without counters of the ranks, or counters without sums"
        )
    share = place.share_of(own["ranks"])
    records = {name: _records(name, saved, own, share, place) for name, saved in counters.items()}
    windows = [record["window"] for record in next(iter(records.values()), [])]
    same = own["ranks"] == place.count
    window = windows[0] if same and windows else _merged(windows, own, place)
    result = {key: value for key, value in own.items() if key != "ranks"} | {"window": window}
    additions = [each["addition"] for of_name in records.values() for each in of_name if "addition" in each]
    if additions and checks.NOISE in result:  # each rank counts its own
        result[checks.NOISE] = result[checks.NOISE] | {"addition": max(additions)}
    totals: dict[Any, Tensor] = {}
    said: dict[Any, dict[str, Any]] = {}
    for name, of_name in records.items():
        held = [record for record in of_name if record["held"]]
        said[name] = {"delivered": any(record["delivered"] for record in held), "owed": 1.0}
        if reduced:
            totals[name] = sums[name]
            said[name]["delivered"] |= not held
        elif same and held:
            totals[name] = _rows_of(name, rows[name], len(share), place)[0]
            said[name]["owed"] = held[0]["owed"]
        elif held:
            totals[name] = _added(_rows_of(name, rows[name], len(share), place), of_name, _unit(own, place))
    result["sums"] = len(totals)
    return result, totals, {name: result | said[name] for name in totals}


def of_one(
    own: dict[str, Any], sums: Mapping[Any, Tensor], counters: Mapping[Any, Any], place: RankPlace
) -> tuple[dict[str, Any], dict[Any, Tensor], dict[Any, dict[str, Any]]]:
    """Do the same as `of_rank` for a window that one process has saved; rank 0 gets its sums."""
    fresh = Window(None, None).state(over_ranks=True)
    alone = {field.name: fresh[field.name] for field in FIELDS if field.over_ranks}
    whole = own | {"ranks": 1, "window": own["window"] | alone}
    mine = place.rank == 0
    window = _merged([whole["window"]] if mine else [], whole, place)
    kept = sums if mine else {}
    result = own | {"version": RANKED_VERSION, "window": window, "sums": len(kept)}
    totals = {}
    for name, total in kept.items():
        record = {"owed": counters[name].get("owed", 1.0), "window": own["window"]}
        totals[name] = _added([total], [record], _unit(whole, place))
    said = {name: {"delivered": counters[name]["delivered"], "owed": 1.0} for name in kept}
    return result, totals, {name: result | said[name] for name in kept}


def _records(
    name: Any, saved: Any, own: dict[str, Any], share: range, place: RankPlace
) -> list[dict[str, Any]]:
    """Return the counters in each of this rank's rows of a parameter."""
    found = [unpacked(row) for row in _rows_of(name, saved, len(share), place)]
    for rank, record in zip(share, found, strict=True):
        checks.check_record(record, own, name, rank)
    return found


def _rows_of(name: Any, saved: Any, count: int, place: RankPlace) -> Tensor:
    """Return this rank's `count` rows of a saved parameter."""
    try:
        found = own_rows(saved, place)
    except ValueError as error:
        raise ValueError(f"the sum of parameter {name!r} cannot be loaded: {error}") from None
    if found.shape[0] != count:
        raise ValueError(f"state_dict is damaged: parameter {name!r} has {found.shape[0]} rows, not {count}")
    return found


def _merged(windows: Sequence[dict[str, Any]], own: dict[str, Any], place: RankPlace) -> dict[str, Any]:
    """Merge the states of some ranks' windows into one; without any, start at the same micro-batch."""
    merged = own["window"] | {field.name: field.merged(windows, own["window"]) for field in FIELDS}
    done = sum(window["micro_step"] + window["ran"] + window.get("carried", 0) for window in windows)
    merged["carried"] = done - merged["micro_step"] - merged["ran"]
    if not merged["reduced"]:
        merged["factor"] = 1.0
    elif own["counted"]:
        merged["factor"] *= reduction_of(own["reduction"]).scale_for_ranks(True, place.count, own["ranks"])
    return merged


def _unit(own: dict[str, Any], place: RankPlace) -> float:
    """Return the factor that converts sums of the saved number of ranks to the present number."""
    return reduction_of(own["reduction"]).scale_for_ranks(own["counted"], own["ranks"], place.count)


def _added(rows: Sequence[Tensor] | Tensor, records: Sequence[dict[str, Any]], unit: float) -> Tensor:
    """Add some ranks' sums, rounding once."""
    scales = [unit * record["owed"] / record["window"]["factor"] for record in records]
    terms = [row.double() * scale for row, scale in zip(rows, scales, strict=True)]
    return sum(terms[1:], terms[0]).to(rows[0].dtype)
