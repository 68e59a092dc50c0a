"""Checks of the inner optimizer's part of a checkpoint, which torch does not make. All raise ValueError."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .checks import describe, has_values
from .window_fields import is_bool, is_number

#: State of torch's optimizers with the parameter's shape. Adafactor's factors and L-BFGS's state differ.
SHAPED = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg"}
SHAPED |= {"acc_delta", "sum", "prev", "step_size", "ax", "variance"}


def check_inner_state(inner: Optimizer, names: dict[int, Any]) -> None:
    """Check that the state of torch's optimizers fits; `names` by the parameters' ids."""
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


def _check_value(kind: type, key: str, value: Any, name: Any, param: Tensor) -> None:
    if key in SHAPED:
        allowed = f"a tensor of its shape, {tuple(param.shape)}"
        fits = has_values(value, param) and value.shape == param.shape
        fits = fits or (value is None and key == "momentum_buffer")
    elif kind is torch.optim.Adafactor:
        allowed = "a tensor of numbers, or a number"
        fits = has_values(value, param) or is_number(value)
    else:
        allowed = "one number"
        fits = is_number(value) or (has_values(value, param) and value.numel() == 1)
    if not fits:
        raise ValueError(f"the state {key!r} of parameter {name!r} is {describe(value)}; allowed: {allowed}")


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
        is_sequence = isinstance(loaded, tuple | list) and len(loaded) == len(present)
        return is_sequence and all(map(_is_alike, loaded, present))
    if is_number(present) or isinstance(present, Tensor):
        return loaded is None or is_number(loaded) or (isinstance(loaded, Tensor) and loaded.numel() == 1)
    return loaded is None or is_bool(loaded) or not is_bool(present)
