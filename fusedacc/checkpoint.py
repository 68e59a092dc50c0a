"""What a state_dict carries beside the inner optimizer's own, and back.

The sum of a part-filled window stands with its parameter's state, under `SUM`. Counters stand at the top
level, under `OWN`, and once more beside each sum, under `COUNTERS`: distributed checkpoint drops top-level
keys that it does not know. All are taken out before the inner optimizer sees a checkpoint, because it would
cast the sums to the parameters' dtype.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .arena import Arena
from .slot import Slot
from .window import Window, fresh_window

OWN = "fusedacc"
SUM = "fusedacc_sum"
COUNTERS = "fusedacc_counters"
VERSION = 1


def _slots_by_index(optimizer: Optimizer, arena: Arena) -> dict[int, Slot]:
    """The slots by the index that torch gives their parameters in a state_dict."""
    indices: dict[int, int] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            indices.setdefault(id(param), len(indices))
    return {indices[id(slot.param)]: slot for slot in arena.slots if id(slot.param) in indices}


def _packed(counters: dict[str, Any]) -> Tensor:
    """Counters as a tensor of bytes, which every checkpoint format keeps as it is."""
    return torch.tensor(list(json.dumps(counters).encode()), dtype=torch.uint8)


def _unpacked(packed: Any) -> Any:
    try:
        return json.loads(bytes(packed.tolist()))
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"the counters of a part-filled window ({COUNTERS!r}) are damaged: {error}"
        ) from None


def save(optimizer: Optimizer, window: Window, arena: Arena, include_partial: bool) -> dict[str, Any]:
    """The inner state_dict, the counters and, of a part-filled window, compact copies of the sums."""
    result = dict(optimizer.state_dict())
    partial = include_partial and not window.empty
    own: dict[str, Any] = {"version": VERSION, "counted": window.counted, "reduction": window.reduction}
    own["window"] = window.state() if partial else fresh_window(window.state())
    result[OWN] = own
    if partial:
        slots = _slots_by_index(optimizer, arena)
        sums = {index: arena.current(slot) for index, slot in slots.items()}
        own["sums"] = [index for index, total in sums.items() if total is not None]
        own["delivered"] = [index for index, slot in slots.items() if slot.delivered]
        counters = _packed(own)
        result["state"] = dict(result["state"])
        for index in own["sums"]:
            kept = {SUM: sums[index].detach().clone(), COUNTERS: counters.clone()}  # type: ignore[union-attr]
            result["state"][index] = {**result["state"].get(index, {}), **kept}
    return result


def load(optimizer: Optimizer, window: Window, arena: Arena, state_dict: dict[str, Any]) -> None:
    """Load a checkpoint of the wrapper or of the bare inner optimizer.

    Raises:
        TypeError, ValueError: it is damaged or does not fit; nothing has changed then.
    """
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError("state_dict must be a dict with 'state' and 'param_groups', as state_dict() returns")
    inner = {name: value for name, value in state_dict.items() if name != OWN}
    own = state_dict.get(OWN)
    sums: dict[int, Any] = {}
    inner["state"] = {}
    for index, entry in state_dict["state"].items():
        if isinstance(entry, dict) and SUM in entry:
            sums[index] = entry[SUM]
            own = own or _unpacked(entry.get(COUNTERS))
            entry = {name: value for name, value in entry.items() if name not in (SUM, COUNTERS)}
            if not entry:
                continue
        inner["state"][index] = entry
    slots = _slots_by_index(optimizer, arena)
    if own is not None:
        _check(own, sums, slots, window)

    groups, state = optimizer.param_groups, optimizer.state
    try:
        optimizer.load_state_dict(inner)
    except BaseException:
        optimizer.param_groups, optimizer.state = groups, state
        raise
    if window.counted or sums:
        arena.clear()
    window.restore(Window(None, None).state() if own is None else own["window"])
    for index, total in sums.items():
        arena.restore(slots[index], total, index in own["delivered"])  # type: ignore[index]


def _check(own: Any, sums: dict[int, Any], slots: dict[int, Slot], window: Window) -> None:
    """Raise ValueError unless the counters and sums fit each other, the parameters and the window."""
    required = {"version", "counted", "reduction", "window"} | ({"sums", "delivered"} if sums else set())
    if not isinstance(own, dict) or not required <= own.keys() or not isinstance(own["window"], dict):
        raise ValueError(f"state_dict[{OWN!r}] is damaged: it needs {', '.join(sorted(required))}")
    if own["version"] != VERSION:
        raise ValueError(f"state_dict[{OWN!r}] is of version {own['version']!r}; allowed: {VERSION}")
    missing = window.state().keys() - own["window"].keys()
    if missing:
        raise ValueError(f"state_dict[{OWN!r}]['window'] is damaged: it lacks {', '.join(sorted(missing))}")
    if sorted(sums) != sorted(own.get("sums", [])):
        raise ValueError(
            f"state_dict[{OWN!r}] speaks of sums of parameters {own.get('sums', [])}, but holds those of "
            f"{sorted(sums)}"
        )
    if sums and (own["counted"], own["reduction"]) != (window.counted, window.reduction):
        loops = {True: "counted", False: "manual"}
        raise ValueError(
            f"state_dict holds a part-filled window of a {loops[bool(own['counted'])]} loop with "
            f"reduction={own['reduction']!r}, this is a {loops[window.counted]} loop with "
            f"reduction={window.reduction!r}; save with include_partial=False to change between them"
        )
    for index, total in sums.items():
        if index not in slots:
            raise ValueError(f"state_dict holds a sum of parameter {index}, of {len(slots)} parameters")
        param = slots[index].param
        if not isinstance(total, Tensor) or total.shape != param.shape:
            got = tuple(total.shape) if isinstance(total, Tensor) else type(total).__name__
            raise ValueError(f"the sum of parameter {index} is {got}; its shape is {tuple(param.shape)}")
        kinds = (total.is_floating_point(), total.is_complex())
        if kinds != (param.is_floating_point(), param.is_complex()):
            raise ValueError(f"the sum of parameter {index} is {total.dtype}, the parameter {param.dtype}")
