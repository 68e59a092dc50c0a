"""Checks that a checkpoint is complete and fits, before anything changes. All raise ValueError."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...accumulators import Slot
from ...accumulators.noise import MAX_ALL_REDUCES
from ...accumulators.reduction import NAMES
from ...kernels.rounding import MOST_ADDITIONS, MOST_SEEDS
from ..window import Window
from .format import DEFERRED_SCALE, NOISE, PUBLISHED, TOP_LEVEL, VERSION, has_torch_form
from .window_fields import (
    A_BOOL,
    A_COUNT,
    A_NUMBER,
    FIELDS,
    Rule,
    emptied,
    is_bool,
    is_count,
    is_partial,
    is_positive_int,
)

# The structure


def check_torch_form(state_dict: Any) -> None:
    """Check that it has the structure of a torch state_dict."""
    if not has_torch_form(state_dict):
        raise ValueError("state_dict must be a dict with 'state' and 'param_groups', as state_dict() returns")
    if not isinstance(state_dict["state"], dict):
        raise ValueError(f"state_dict['state'] must be a dict, got {type(state_dict['state']).__name__}")
    groups = state_dict["param_groups"]
    is_whole = isinstance(groups, list) and all(
        isinstance(group, dict) and isinstance(group.get("params"), list | tuple) for group in groups
    )
    if not is_whole:
        raise ValueError("state_dict['param_groups'] must be a list of dicts that have 'params'")
    names = [name for group in groups for name in group["params"]]
    if not all(isinstance(name, int | str) for name in names) or len(set(names)) != len(names):
        raise ValueError("state_dict['param_groups'] must name each parameter once, by a number or a string")
    for name in names:
        entry = state_dict["state"].get(name, {})
        if not isinstance(entry, dict):
            raise ValueError(f"the state of parameter {name!r} must be a dict, got {type(entry).__name__}")


def check_other_form(state_dict: Any, key: str) -> None:
    """Check the wrapper's entries under `key`. The inner optimizer checks the rest."""
    if not isinstance(state_dict, dict):
        raise ValueError(
            f"state_dict must be a dict, as state_dict() returns, got {type(state_dict).__name__}"
        )
    entries = state_dict.get(key, {})
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise ValueError(f"state_dict[{key!r}] must be a dict of dicts, by the parameters' positions")


# The counters

#: The upper bounds of the counters of stochastic rounding.
_NOISE_LIMITS = {
    "seed": MOST_SEEDS,
    "addition": MOST_ADDITIONS,
    "reduction": MAX_ALL_REDUCES,
    "written": MOST_ADDITIONS,
}


def _is_noise(value: Any) -> bool:
    if not isinstance(value, dict) or not is_bool(value.get("reduced")):
        return False
    return all(is_count(value.get(name)) and value[name] < limit for name, limit in _NOISE_LIMITS.items())


_RULES = {
    "counted": A_BOOL,
    "reduction": Rule(lambda value: value in NAMES, ", ".join(NAMES)),
    "window": Rule(lambda value: isinstance(value, dict), "a dict"),
}
_RULE_OF_NOISE = Rule(_is_noise, f"a dict of 'reduced', a bool, and ints from 0 to below {_NOISE_LIMITS}")
_RULES_OF_WINDOW = {field.name: field.rule for field in FIELDS}
_RULES_OF_PARTIAL = {
    "ranks": Rule(is_positive_int, "an int >= 1"),
    "ranks_of": Rule(lambda value: isinstance(value, str), "a string"),
    "sums": A_COUNT,
}
_RULES_OF_SUM = {PUBLISHED: A_BOOL, DEFERRED_SCALE: A_NUMBER}


def check_entries(values: dict[str, Any], rules: Mapping[str, Rule]) -> None:
    """Check that each rule has a value which is allowed."""
    missing = rules.keys() - values.keys()
    if missing:
        raise ValueError(f"state_dict[{TOP_LEVEL!r}] is damaged: it lacks {', '.join(sorted(missing))}")
    for name, rule in rules.items():
        if not rule.holds(values[name]):
            raise ValueError(
                f"state_dict[{TOP_LEVEL!r}] is damaged: {name} is {values[name]!r}; allowed: {rule.allowed}"
            )


def check_counters(counters: Any) -> None:
    """Check that the counters of a window are complete."""
    if not isinstance(counters, dict):
        raise ValueError(f"state_dict[{TOP_LEVEL!r}] must be a dict, got {type(counters).__name__}")
    version = counters.get("version")
    if type(version) is not int or version != VERSION:
        raise ValueError(f"state_dict[{TOP_LEVEL!r}] is of version {version!r}; allowed: {VERSION}")
    check_entries(counters, _RULES)
    if NOISE in counters:
        check_entries(counters, {NOISE: _RULE_OF_NOISE})
    check_entries(counters["window"], _RULES_OF_WINDOW)
    if is_partial(counters["window"]):
        check_entries(counters, _RULES_OF_PARTIAL)


def check_window(counters: dict[str, Any], num_sums: int, window: Window) -> None:
    """Check that the counters fit the number of sums and the loop."""
    saved = counters["window"]
    partial = is_partial(saved)
    expected = counters["sums"] if partial else 0
    if num_sums != expected:
        raise ValueError(
            f"state_dict is damaged: its window has the sums of {expected!r} parameters, it holds those of "
            f"{num_sums}. Distributed checkpoint loads only what it is given room for: see "
            "fusedacc.integrations.distributed_checkpoint.make_room"
        )
    if not partial:
        if saved != emptied(saved):
            raise ValueError(
                f"state_dict[{TOP_LEVEL!r}]['window'] is damaged: it is neither empty nor partly filled"
            )
        return
    if (counters["counted"], counters["reduction"]) != (window.counted, window.reduction.name):
        loops = {True: "counted", False: "manual"}
        raise ValueError(
            f"state_dict holds a partly filled window of a {loops[counters['counted']]} loop with "
            f"reduction={counters['reduction']!r}, this is a {loops[window.counted]} loop with "
            f"reduction={window.reduction.name!r}; save with include_partial=False to change between them"
        )
    if saved["weight"] is not None and not window.reduction.weighs:
        raise ValueError(
            f"state_dict[{TOP_LEVEL!r}]['window'] is damaged: reduction={window.reduction.name!r} has no "
            "weights"
        )


def check_copy(copy: Any, counters: dict[str, Any], where: str) -> None:
    """Check that a copy of the counters describes the same window; `where` it is begins the message."""
    if not isinstance(copy, dict):
        raise ValueError(f"{where} are damaged")
    names = counters.keys() - {NOISE}
    expected = {name: counters[name] for name in names}
    of_copy = {name: copy.get(name) for name in names}
    if json.dumps(expected, sort_keys=True) != json.dumps(of_copy, sort_keys=True):
        raise ValueError(f"{where} are of another window")


def check_sum_counters(copy: Any, counters: dict[str, Any], name: Any) -> None:
    """Check the counters that are saved with the sum of a parameter."""
    where = f"the counters beside the sum of parameter {name!r}"
    check_copy(copy, counters, where)
    if not all(key in copy and rule.holds(copy[key]) for key, rule in _RULES_OF_SUM.items()):
        raise ValueError(f"{where} are damaged")


# Tensors


def describe(value: Any) -> str:
    """Return the shape and dtype of a tensor, or the type of another value."""
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def has_values(value: Any, param: Tensor) -> bool:
    """Whether it is a dense tensor, and on the meta device only if the parameter is."""
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided
    return is_dense and value.is_meta == param.is_meta


def check_sum(total: Any, name: Any, slot: Slot | None) -> None:
    """Check that a sum has its parameter's shape, and a dtype that converts exactly."""
    if slot is None:
        raise ValueError(f"state_dict holds a sum of parameter {name!r}, which is in none of its groups")
    shape = slot.param.shape
    wanted = slot.accumulate_dtype
    fits = isinstance(total, Tensor) and total.shape == shape and total.is_meta == slot.param.is_meta
    if not fits or torch.promote_types(total.dtype, wanted) != wanted:
        raise ValueError(
            f"the sum of parameter {name!r} is {describe(total)}; allowed: its shape, {tuple(shape)}, and "
            f"{wanted} or what that holds exactly"
        )


def check_masters(saved: dict[Any, Any], slots: dict[Any, Slot], wanted: set[Any]) -> None:
    """Check that masters are float32 tensors of their parameters' shapes, and complete if there are any."""
    for name, master in saved.items():
        if name not in slots:
            raise ValueError(f"state_dict holds a master of parameter {name!r}, of {len(slots)} parameters")
        param = slots[name].param
        fits = has_values(master, param) and master.shape == param.shape
        if not fits or master.dtype != torch.float32:
            raise ValueError(
                f"the master of parameter {name!r} is {describe(master)}; allowed: float32 "
                f"{tuple(param.shape)}"
            )
    missing = wanted - saved.keys()
    if saved and missing:
        raise ValueError(f"state_dict is damaged: it lacks the masters of {len(missing)} parameters")
