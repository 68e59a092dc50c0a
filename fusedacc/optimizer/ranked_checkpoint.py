"""A part-filled window of many ranks in a checkpoint, and back, on as many ranks or on another number.

A rank's sums and counters are what a checkpoint of one process holds; `spread` gives them rows of their own
among those of all ranks, and `of_rank` makes of the rows that this rank has read what one process would have
saved. Sums that were reduced already are equal on all ranks, and stand as in a checkpoint of one.

On another number of ranks each goes on at the micro-batch that the window had come to. A rank may have
several rows then, which are added, or none: `carried` is how many micro-batches are in its sums beside those
that it counts.
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
from .window import Window
from .window_fields import FIELDS, RANKED_VERSION

SUM = "fusedacc_sum"
RANK_SUM = "fusedacc_rank_sum"
RANK_COUNTERS = "fusedacc_rank_counters"
#: Bytes of a rank's counters, which have to be as many on all ranks.
WIDTH = 2048


def packed(counters: dict[str, Any], width: int = 0) -> Tensor:
    """Counters as a tensor of bytes, at least so many, which every checkpoint format keeps as it is."""
    return torch.tensor(list(json.dumps(counters).ljust(width).encode()), dtype=torch.uint8)


def unpacked(saved: Any) -> Any:
    """What `packed` was given, or the text of it; ValueError where it is damaged."""
    try:
        return json.loads(saved if isinstance(saved, str) else bytes(saved.to(torch.uint8).tolist()))
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"the counters are damaged: {error}") from None


def rows_of(
    slots: Mapping[int, Slot], sums: Mapping[int, Tensor | None], reduced: bool
) -> dict[int, Tensor | None]:
    """The sums, with zeros where another rank may have one: all ranks have to save the same parameters."""
    return {
        index: torch.zeros_like(slot.param, dtype=slot.accumulate_dtype, requires_grad=False)
        if sums[index] is None and not reduced and (slot.in_bucket or slot.param.requires_grad)
        else sums[index]
        for index, slot in slots.items()
    }


def row(said: dict[str, Any], total: Tensor, reduced: bool, place: RankPlace) -> dict[str, Any]:
    """What stands with a parameter's state of this rank's sum; `reduced`: it is the same on all ranks."""
    record = packed(said | {"rank": place.rank}, WIDTH).to(total.device)  # where the group can gather it
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
    """A ranked window's share for this rank, as a checkpoint of one process would hold it.

    Takes the counters of the groups, and by the parameters' saved names the sums that are equal on all ranks,
    the rows of each rank's sums, and their counters. Returns the counters, the sums, and the counters beside
    each sum. Raises ValueError where it is damaged, or holds another rank's rows.
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
    """As `of_rank`, of a window that one process has saved: the first rank goes on with its sums."""
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
    """What this rank's rows say of a parameter, one after the other."""
    found = [unpacked(row) for row in _rows_of(name, saved, len(share), place)]
    for rank, record in zip(share, found, strict=True):
        checks.check_record(record, own, name, rank)
    return found


def _rows_of(name: Any, saved: Any, count: int, place: RankPlace) -> Tensor:
    """This rank's rows of what was saved of a parameter; `count` of them."""
    try:
        found = own_rows(saved, place)
    except ValueError as error:
        raise ValueError(f"the sum of parameter {name!r} cannot be loaded: {error}") from None
    if found.shape[0] != count:
        raise ValueError(f"state_dict is damaged: parameter {name!r} has {found.shape[0]} rows, not {count}")
    return found


def _merged(windows: Sequence[dict[str, Any]], own: dict[str, Any], place: RankPlace) -> dict[str, Any]:
    """The state of one window in which those of some ranks go on; of none: at the same micro-batch."""
    merged = own["window"] | {field.name: field.merged(windows, own["window"]) for field in FIELDS}
    done = sum(window["micro_step"] + window["ran"] + window.get("carried", 0) for window in windows)
    merged["carried"] = done - merged["micro_step"] - merged["ran"]
    if not merged["reduced"]:
        merged["factor"] = 1.0
    elif own["counted"]:
        merged["factor"] *= reduction_of(own["reduction"]).scale_for_ranks(True, place.count, own["ranks"])
    return merged


def _unit(own: dict[str, Any], place: RankPlace) -> float:
    """By what the sums of the ranks that there were are multiplied to be sums of those that there are."""
    return reduction_of(own["reduction"]).scale_for_ranks(own["counted"], own["ranks"], place.count)


def _added(rows: Sequence[Tensor] | Tensor, records: Sequence[dict[str, Any]], unit: float) -> Tensor:
    """The sum of some ranks' sums, rounded once."""
    scales = [unit * record["owed"] / record["window"]["factor"] for record in records]
    terms = [row.double() * scale for row, scale in zip(rows, scales, strict=True)]
    return sum(terms[1:], terms[0]).to(rows[0].dtype)
