"""Checks that a checkpoint is complete and fits, before anything changes. All raise ValueError."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..accumulators import Slot
from ..accumulators.noise import MAX_ALL_REDUCES
from ..accumulators.reduction import NAMES
from ..kernels.rounding import MOST_ADDITIONS, MOST_SEEDS
from .window import (
    A_BOOL,
    A_COUNT,
    A_NUMBER,
    FIELDS,
    RANKED_VERSION,
    VERSION,
    Check,
    Ranks,
    Window,
    field_rules,
    fresh_window,
    is_bool,
    is_count,
    is_number,
)

OWN = "fusedacc"
#: Keys under `OWN`: autotuning results with their CPU (see `tuning`), and the state of stochastic rounding.
CHOICES, NOISE = "choices", "noise"
#: The versions that can be loaded. Version 1 has no deferred scales.
READABLE = (1, VERSION, RANKED_VERSION)


def has_torch_form(state_dict: Any) -> bool:
    """Whether it is a dict with the two entries of a torch state_dict."""
    return isinstance(state_dict, dict) and {"state", "param_groups"} <= state_dict.keys()


def check_apart(state_dict: Any, key: str) -> None:
    """Check the wrapper's entries under `key`. The inner optimizer checks the rest."""
    if not isinstance(state_dict, dict):
        raise ValueError(
            f"state_dict must be a dict, as state_dict() returns, got {type(state_dict).__name__}"
        )
    entries = state_dict.get(key, {})
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise ValueError(f"state_dict[{key!r}] must be a dict of dicts, by the parameters' positions")


def check_structure(state_dict: Any) -> None:
    """Check that it has the structure of a torch state_dict."""
    if not has_torch_form(state_dict):
        raise ValueError("state_dict must be a dict with 'state' and 'param_groups', as state_dict() returns")
    if not isinstance(state_dict["state"], dict):
        raise ValueError(f"state_dict['state'] must be a dict, got {type(state_dict['state']).__name__}")
    groups = state_dict["param_groups"]
    whole = isinstance(groups, list) and all(
        isinstance(group, dict) and isinstance(group.get("params"), list | tuple) for group in groups
    )
    if not whole:
        raise ValueError("state_dict['param_groups'] must be a list of dicts that have 'params'")
    names = [name for group in groups for name in group["params"]]
    if not all(isinstance(name, int | str) for name in names) or len(set(names)) != len(names):
        raise ValueError("state_dict['param_groups'] must name each parameter once, by a number or a string")
    for name in names:
        entry = state_dict["state"].get(name, {})
        if not isinstance(entry, dict):
            raise ValueError(f"the state of parameter {name!r} must be a dict, got {type(entry).__name__}")


_OWN: Mapping[str, tuple[Check, str]] = {
    "counted": A_BOOL,
    "reduction": (lambda v: v in NAMES, ", ".join(NAMES)),
    "window": (lambda v: isinstance(v, dict), "a dict"),
}
_OF_RANK = {"held": A_BOOL, "delivered": A_BOOL, "owed": A_NUMBER, "rank": A_COUNT}
#: The fields of a window's state that differ between ranks.
_PER_RANK = {field.name for field in FIELDS if field.ranks is not Ranks.SAME}
#: The upper bounds of the counters of stochastic rounding.
_NOISE = {"seed": MOST_SEEDS, "addition": MOST_ADDITIONS, "reduction": MAX_ALL_REDUCES}
_NOISE["written"] = MOST_ADDITIONS


def _are_choices(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("processor"), str):
        return False
    ways = value.get("ways")
    return isinstance(ways, dict) and all(isinstance(name, str) for pair in ways.items() for name in pair)


def _is_noise(value: Any) -> bool:
    if not isinstance(value, dict) or not is_bool(value.get("reduced")):
        return False
    return all(is_count(value.get(name)) and value[name] < end for name, end in _NOISE.items())


def _check_entries(values: dict[str, Any], rules: Mapping[str, tuple[Check, str]]) -> None:
    missing = rules.keys() - values.keys()
    if missing:
        raise ValueError(f"state_dict[{OWN!r}] is damaged: it lacks {', '.join(sorted(missing))}")
    for name, (holds, allowed) in rules.items():
        if not holds(values[name]):
            raise ValueError(
                f"state_dict[{OWN!r}] is damaged: {name} is {values[name]!r}; allowed: {allowed}"
            )


def _check_window_state(saved: dict[str, Any]) -> None:
    left_out = {field.name: 0 for field in FIELDS if field.optional}
    _check_entries(left_out | saved, field_rules())
    least = -(saved["micro_step"] + saved["ran"])
    _check_entries(left_out | saved, {"carried": (lambda v: v >= least, f"an int >= {least}")})


def check_window(own: Any, sums: int, window: Window) -> None:
    """Check that the counters are complete, and fit the number of sums and the loop."""
    if not isinstance(own, dict):
        raise ValueError(f"state_dict[{OWN!r}] must be a dict, got {type(own).__name__}")
    version = own.get("version")
    if type(version) is not int or version not in READABLE:
        allowed = ", ".join(map(str, READABLE))
        raise ValueError(f"state_dict[{OWN!r}] is of version {version!r}; allowed: {allowed}")
    _check_entries(own, _OWN)
    if CHOICES in own and not _are_choices(own[CHOICES]):
        raise ValueError(
            f"state_dict[{OWN!r}] is damaged: {CHOICES} is {own[CHOICES]!r}; allowed: a dict of 'processor', "
            "a string, and 'ways', a dict of strings"
        )
    if NOISE in own and not _is_noise(own[NOISE]):
        raise ValueError(
            f"state_dict[{OWN!r}] is damaged: {NOISE} is {own[NOISE]!r}; allowed: a dict of 'reduced', a "
            f"bool, and ints from 0 to below {_NOISE}"
        )
    saved = own["window"]
    _check_window_state(saved)
    partial = saved["micro_step"] > 0 or saved["ran"]
    expected = own.get("sums") if partial else 0
    if not is_count(expected) or sums != expected:
        raise ValueError(
            f"state_dict is damaged: its window has the sums of {expected!r} parameters, it holds those of "
            f"{sums}. Distributed checkpoint loads only what it is given room for: see "
            "fusedacc.integrations.distributed_checkpoint.make_room"
        )
    if not partial:
        if saved.get("carried", 0) or any(
            saved[name] != value for name, value in fresh_window(saved).items()
        ):
            raise ValueError(f"state_dict[{OWN!r}]['window'] is damaged: it is neither empty nor part-filled")
        return
    if (own["counted"], own["reduction"]) != (window.counted, window.reduction.name):
        loops = {True: "counted", False: "manual"}
        raise ValueError(
            f"state_dict holds a part-filled window of a {loops[own['counted']]} loop with "
            f"reduction={own['reduction']!r}, this is a {loops[window.counted]} loop with "
            f"reduction={window.reduction.name!r}; save with include_partial=False to change between them"
        )
    if saved["weight"] is not None and not window.reduction.weighs:
        raise ValueError(
            f"state_dict[{OWN!r}]['window'] is damaged: reduction={window.reduction.name!r} has no weights"
        )


def check_over_ranks(own: Any) -> None:
    """Check that the counters of a window that several ranks have saved are complete."""
    if not isinstance(own, dict) or own.get("version") != RANKED_VERSION or not is_count(own.get("ranks")):
        raise ValueError(f"state_dict[{OWN!r}] is damaged: it has sums of ranks, but not how many")
    _check_entries(own, _OWN)
    _check_window_state(own["window"])
    _check_entries(own["window"], field_rules(over_ranks=True))


def shared_by_ranks(own: dict[str, Any]) -> dict[str, Any]:
    """Return the counters that are the same on all ranks."""
    window = {key: value for key, value in own["window"].items() if key not in _PER_RANK}
    names = "counted", "reduction", "ranks", "sums", "inner_steps"
    return {name: own.get(name) for name in names} | {"window": window, "version": RANKED_VERSION}


def check_record(record: Any, own: dict[str, Any], name: Any, rank: int) -> None:
    """Check that a rank's row belongs to this window and this rank."""
    where = f"the counters of a rank beside the sum of parameter {name!r}"
    check_over_ranks(record)
    _check_entries(record, _OF_RANK)
    check_copy(shared_by_ranks(record), shared_by_ranks(own), where)
    if record["rank"] != rank:
        raise ValueError(
            f"state_dict holds the sums of rank {record['rank']}, not of rank {rank}: state_dict() returns "
            "the sums of one rank only. Allowed: a file for each rank, or torch.distributed.checkpoint"
        )


def check_copy(counters: Any, own: dict[str, Any], where: str) -> None:
    """Check that two copies of the counters describe the same window."""
    if not isinstance(counters, dict):
        raise ValueError(f"{where} are damaged")
    compared = own.keys() - {"version", CHOICES, NOISE}
    of_window, its = ({key: each.get(key) for key in compared} for each in (own, counters))
    if json.dumps(of_window, sort_keys=True) != json.dumps(its, sort_keys=True):
        raise ValueError(f"{where} are of another window")


def check_counters(counters: Any, own: dict[str, Any], name: Any) -> None:
    """Check the counters stored with a sum: same window, whether it was in p.grad, and its deferred scale."""
    where = f"the counters beside the sum of parameter {name!r}"
    check_copy(counters, own, where)
    if not is_bool(counters.get("delivered")) or not is_number(counters.get("owed", 1.0)):
        raise ValueError(f"{where} are damaged")


def _described(value: Any) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def check_sum(total: Any, name: Any, slot: Slot | None) -> None:
    """Check that a sum has its parameter's shape, and a dtype that converts exactly."""
    if slot is None:
        raise ValueError(f"state_dict holds a sum of parameter {name!r}, which is in none of its groups")
    shape, wanted = slot.param.shape, slot.accumulate_dtype
    fits = isinstance(total, Tensor) and total.shape == shape and total.is_meta == slot.param.is_meta
    if not fits or torch.promote_types(total.dtype, wanted) != wanted:
        raise ValueError(
            f"the sum of parameter {name!r} is {_described(total)}; allowed: its shape, {tuple(shape)}, and "
            f"{wanted} or what that holds exactly"
        )


def check_masters(saved: dict[Any, Any], slots: dict[Any, Slot], wanted: set[Any]) -> None:
    """Check that masters are float32 tensors of their parameters' shapes, and complete if there are any."""
    for name, master in saved.items():
        if name not in slots:
            raise ValueError(f"state_dict holds a master of parameter {name!r}, of {len(slots)} parameters")
        param = slots[name].param
        fits = _has_values(master, param) and master.shape == param.shape
        if not fits or master.dtype != torch.float32:
            raise ValueError(
                f"the master of parameter {name!r} is {_described(master)}; allowed: float32 "
                f"{tuple(param.shape)}"
            )
    missing = wanted - saved.keys()
    if saved and missing:
        raise ValueError(f"state_dict is damaged: it lacks the masters of {len(missing)} parameters")


#: State of torch's optimizers with the parameter's shape. Adafactor's factors and L-BFGS's state differ.
SHAPED = frozenset(
    [
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "exp_inf",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "sum",
        "prev",
        "step_size",
        "ax",
        "variance",
    ]
)


def check_inner_state(inner: Optimizer, names: dict[int, Any]) -> None:
    """Check that the state of torch's optimizers fits the parameters. torch does not check this.

    `names` has the names in the checkpoint, by the parameters' ids.
    """
    kind = type(inner)
    if not kind.__module__.startswith("torch.optim") or kind is torch.optim.LBFGS:
        return
    for group in inner.param_groups:
        entries = [(param, inner.state[param]) for param in group["params"] if inner.state.get(param)]
        keys: set[str] = set().union(*(entry for _, entry in entries))
        for param, entry in entries:
            name = names.get(id(param), "of no name")
            missing = keys - entry.keys()
            if missing and kind is not torch.optim.Adafactor:
                lacks = ", ".join(sorted(map(str, missing)))
                raise ValueError(f"the state of parameter {name!r} lacks {lacks}")
            for key, value in entry.items():
                _check_value(kind, key, value, name, param)


def _has_values(value: Any, param: Tensor) -> bool:
    """Whether it is a dense tensor, and on the meta device only if the parameter is."""
    whole = isinstance(value, Tensor) and value.layout is torch.strided
    return whole and value.is_meta == param.is_meta


def _check_value(kind: type, key: str, value: Any, name: Any, param: Tensor) -> None:
    if key in SHAPED:
        allowed = f"a tensor of its shape, {tuple(param.shape)}"
        fits = _has_values(value, param) and value.shape == param.shape
        fits = fits or (value is None and key == "momentum_buffer")
    else:
        allowed, fits = "a tensor of numbers, or a number", _has_values(value, param) or is_number(value)
        if kind is not torch.optim.Adafactor:
            allowed, fits = "one number", fits and (not isinstance(value, Tensor) or value.numel() == 1)
    if not fits:
        raise ValueError(
            f"the state {key!r} of parameter {name!r} is {_described(value)}; allowed: {allowed}"
        )


def check_groups(
    loaded: list[dict[str, Any]], present: list[dict[str, Any]], defaults: dict[str, Any]
) -> None:
    """Check that the loaded groups have all options, each of the same kind as before."""
    for index, (group, former) in enumerate(zip(loaded, present, strict=True)):
        for key in defaults.keys() & former.keys():
            if key not in group:
                raise ValueError(f"group {index} of the state_dict lacks {key!r}")
            if not _is_alike(group[key], former[key]):
                raise ValueError(
                    f"{key!r} of group {index} of the state_dict is {group[key]!r}, and {former[key]!r} here"
                )


def _is_alike(loaded: Any, present: Any) -> bool:
    """Whether two values of an option are of the same kind: number, sequence of numbers, bool, or other."""
    if isinstance(present, tuple | list):
        several = isinstance(loaded, tuple | list) and len(loaded) == len(present)
        return several and all(map(_is_alike, loaded, present))
    if is_number(present) or isinstance(present, Tensor):
        return loaded is None or is_number(loaded) or (isinstance(loaded, Tensor) and loaded.numel() == 1)
    return loaded is None or is_bool(loaded) or not is_bool(present)
