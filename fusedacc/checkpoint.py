"""What a state_dict carries beside the inner optimizer's own, and back.

Sums stand with their parameter's state, under `SUM`; counters at the top level, under `OWN`. Both are taken
out before the inner optimizer sees a checkpoint: it would cast the sums to the parameters' dtype.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .arena import Arena
from .slot import Slot
from .window import Window, fresh_window

OWN = "fusedacc"
SUM = "fusedacc_sum"
VERSION = 1


def _slots_by_index(optimizer: Optimizer, arena: Arena) -> dict[int, Slot]:
    """The slots by the index that torch gives their parameters in a state_dict."""
    indices: dict[int, int] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            indices.setdefault(id(param), len(indices))
    return {indices[id(slot.param)]: slot for slot in arena.slots if id(slot.param) in indices}


def save(optimizer: Optimizer, window: Window, arena: Arena, include_partial: bool) -> dict[str, Any]:
    """The inner state_dict, the counters and, of a part-filled window, compact copies of the sums."""
    result = dict(optimizer.state_dict())
    partial = include_partial and not window.empty
    kept: dict[str, Any] = {"version": VERSION, "counted": window.counted, "reduction": window.reduction}
    if partial:
        state = dict(result["state"])
        delivered = []
        for index, slot in _slots_by_index(optimizer, arena).items():
            total = arena.current(slot)
            if total is not None:
                state[index] = {**state.get(index, {}), SUM: total.detach().clone()}
                delivered += [index] * slot.delivered
        result["state"] = state
        kept["sums"] = sorted(index for index, entry in state.items() if SUM in entry)
        kept["delivered"] = delivered
    kept["window"] = window.state() if partial else fresh_window(window.state())
    result[OWN] = kept
    return result


def load(optimizer: Optimizer, window: Window, arena: Arena, state_dict: dict[str, Any]) -> None:
    """Load a checkpoint of the wrapper or of the bare inner optimizer.

    Raises:
        TypeError, ValueError: it is damaged or does not fit; nothing has changed then.
    """
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError("state_dict must be a dict with 'state' and 'param_groups', as state_dict() returns")
    inner = {name: value for name, value in state_dict.items() if name != OWN}
    sums: dict[int, Tensor] = {}
    inner["state"] = {}
    for index, entry in state_dict["state"].items():
        if isinstance(entry, dict) and SUM in entry:
            sums[index] = entry[SUM]
            entry = {name: value for name, value in entry.items() if name != SUM}
            if not entry:
                continue
        inner["state"][index] = entry
    slots = _slots_by_index(optimizer, arena)
    kept = state_dict.get(OWN)
    counters = Window(None, None).state()
    if kept is not None:
        _check(kept, sums, slots, window)
        counters = kept["window"]
    elif sums:
        raise ValueError(f"state_dict holds sums of a part-filled window, but not its counters ({OWN!r})")

    groups, state = optimizer.param_groups, optimizer.state
    try:
        optimizer.load_state_dict(inner)
    except BaseException:
        optimizer.param_groups, optimizer.state = groups, state
        raise
    if window.counted or sums:
        arena.clear()
    window.restore(counters)
    for index, total in sums.items():
        arena.restore(slots[index], total, index in kept["delivered"])  # type: ignore[index]


def _check(kept: Any, sums: dict[int, Tensor], slots: dict[int, Slot], window: Window) -> None:
    """Raise ValueError unless the counters and sums fit each other, the parameters and the window."""
    required = {"version", "counted", "reduction", "window"} | ({"sums", "delivered"} if sums else set())
    if not isinstance(kept, dict) or not required <= kept.keys():
        raise ValueError(f"state_dict[{OWN!r}] is damaged: it needs {', '.join(sorted(required))}")
    if kept["version"] != VERSION:
        raise ValueError(f"state_dict[{OWN!r}] is of version {kept['version']!r}; allowed: {VERSION}")
    missing = window.state().keys() - kept["window"].keys()
    if missing:
        raise ValueError(f"state_dict[{OWN!r}]['window'] is damaged: it lacks {', '.join(sorted(missing))}")
    if sorted(sums) != kept.get("sums", []):
        raise ValueError(
            f"state_dict[{OWN!r}] speaks of sums of parameters {kept.get('sums', [])}, but holds those of "
            f"{sorted(sums)}"
        )
    if sums and (kept["counted"], kept["reduction"]) != (window.counted, window.reduction):
        loops = {True: "counted", False: "manual"}
        raise ValueError(
            f"state_dict holds a part-filled window of a {loops[bool(kept['counted'])]} loop with "
            f"reduction={kept['reduction']!r}, this is a {loops[window.counted]} loop with "
            f"reduction={window.reduction!r}; save with include_partial=False to change between them"
        )
    for index, total in sums.items():
        if index not in slots:
            raise ValueError(f"state_dict holds a sum of parameter {index}, of {len(slots)} parameters")
        param = slots[index].param
        if (
            not isinstance(total, Tensor)
            or total.shape != param.shape
            or total.dtype.is_complex != param.is_complex()
        ):
            got = tuple(total.shape) if isinstance(total, Tensor) else type(total).__name__
            raise ValueError(
                f"the sum of parameter {index} is {got}, the parameter has shape {tuple(param.shape)}"
            )
        if not (total.is_floating_point() or total.is_complex()):
            raise ValueError(
                f"the sum of parameter {index} has dtype {total.dtype}; allowed: floating dtypes"
            )
