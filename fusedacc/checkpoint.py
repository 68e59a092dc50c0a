"""What a state_dict carries beside the inner optimizer's own, and back.

The sum of a part-filled window stands with its parameter's state, under `SUM`. Counters stand at the top
level, under `OWN`, and once more beside each sum, under `COUNTERS`: distributed checkpoint drops top-level
keys that it does not know. float32 masters stand with their parameters' state too, under `MASTER`. All are
taken out before the inner optimizer sees a checkpoint, because it would cast them to the parameters' dtype.
"""

from __future__ import annotations

import json
import warnings
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .arena import Arena
from .masters import Masters
from .slot import Slot
from .window import Window, fresh_window

OWN = "fusedacc"
SUM = "fusedacc_sum"
COUNTERS = "fusedacc_counters"
MASTER = "fusedacc_master"
VERSION = 2
#: Those that can be read; before 2, sums owed nothing (see `debts`).
READABLE = (1, VERSION)


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


def save(
    optimizer: Optimizer, window: Window, arena: Arena, masters: Masters | None, include_partial: bool
) -> dict[str, Any]:
    """The inner state_dict, the counters, masters and, of a part-filled window, copies of the sums."""
    result = dict(optimizer.state_dict())
    partial = include_partial and not window.empty
    own: dict[str, Any] = {"version": VERSION, "counted": window.counted, "reduction": window.reduction}
    own["window"] = window.state() if partial else fresh_window(window.state())
    result[OWN] = own
    slots = _slots_by_index(optimizer, arena)
    if masters is not None:
        result["state"] = dict(result["state"])
        for index, slot in slots.items():
            master = masters.of(slot)
            if master is not None:
                kept = {MASTER: master.clone()}
                result["state"][index] = {**result["state"].get(index, {}), **kept}
    if partial:
        sums = {index: arena.current(slot) for index, slot in slots.items()}
        own["sums"] = sum(total is not None for total in sums.values())
        result["state"] = dict(result["state"])
        for index, total in sums.items():
            if total is not None:
                owed = arena.owed(slots[index])
                counters = _packed(own | {"delivered": slots[index].delivered, "owed": owed})
                kept = {SUM: total.detach().clone(), COUNTERS: counters}
                result["state"][index] = {**result["state"].get(index, {}), **kept}
    return result


def load(
    optimizer: Optimizer, window: Window, arena: Arena, masters: Masters | None, state_dict: dict[str, Any]
) -> None:
    """Load a checkpoint of the wrapper or of the bare inner optimizer.

    Raises:
        TypeError, ValueError: it is damaged or does not fit; nothing has changed then.
    """
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError("state_dict must be a dict with 'state' and 'param_groups', as state_dict() returns")
    inner = {name: value for name, value in state_dict.items() if name != OWN}
    own = state_dict.get(OWN)
    sums: dict[Any, tuple[Any, bool, float]] = {}
    saved: dict[Any, Any] = {}
    inner["state"] = {}
    for index, entry in state_dict["state"].items():
        if isinstance(entry, dict) and MASTER in entry:
            saved[index] = entry[MASTER]
            entry = {name: value for name, value in entry.items() if name != MASTER}
            if not entry:
                continue
        if isinstance(entry, dict) and SUM in entry:
            counters = _unpacked(entry.get(COUNTERS))
            own = own or counters
            sums[index] = entry[SUM], counters.get("delivered") is True, counters.get("owed", 1.0)
            entry = {name: value for name, value in entry.items() if name not in (SUM, COUNTERS)}
            if not entry:
                continue
        inner["state"][index] = entry
    # As torch does: the saved names of parameters, whatever they are, stand for the present ones by position.
    names = [name for group in state_dict["param_groups"] for name in group["params"]]
    present = _slots_by_index(optimizer, arena)
    slots = {name: present[index] for index, name in enumerate(names) if index in present}
    if own is not None:
        _check(own, {name: total for name, (total, *_) in sums.items()}, slots, window)
    _check_masters(saved, slots)

    groups, state = optimizer.param_groups, optimizer.state
    # torch casts state to the parameters' dtype, which has to be the masters' then.
    wide = nullcontext() if masters is None else masters.swapped(arena.slots, write_back=False)
    try:
        with wide:
            optimizer.load_state_dict(inner)
    except BaseException:
        optimizer.param_groups, optimizer.state = groups, state
        raise
    if window.counted or sums:
        arena.clear()
    window.restore(Window(None, None).state() if own is None else own["window"])
    for name, saved_sum in sums.items():
        arena.restore(slots[name], *saved_sum)
    if masters is not None:
        for name, master in saved.items():
            masters.put(slots[name], master)
    elif saved:
        warnings.warn(
            "state_dict holds float32 masters, and this wrapper keeps none: they and the precision of the "
            "state are lost; pass master_weights=True to take them over",
            stacklevel=3,
        )


def _check_masters(saved: dict[Any, Any], slots: dict[Any, Slot]) -> None:
    """Raise ValueError unless the masters are float32 tensors of the parameters' shapes."""
    for name, master in saved.items():
        if name not in slots:
            raise ValueError(f"state_dict holds a master of parameter {name!r}, of {len(slots)} parameters")
        shape = slots[name].param.shape
        if not isinstance(master, Tensor) or master.shape != shape or master.dtype != torch.float32:
            got = f"{tuple(master.shape)} {master.dtype}" if isinstance(master, Tensor) else type(master)
            raise ValueError(f"the master of parameter {name!r} is {got}; allowed: float32 {tuple(shape)}")


def _check(own: Any, sums: dict[Any, Any], slots: dict[Any, Slot], window: Window) -> None:
    """Raise ValueError unless the counters and sums fit each other, the parameters and the window."""
    required = {"version", "counted", "reduction", "window"} | ({"sums"} if sums else set())
    if not isinstance(own, dict) or not required <= own.keys() or not isinstance(own["window"], dict):
        raise ValueError(f"state_dict[{OWN!r}] is damaged: it needs {', '.join(sorted(required))}")
    if own["version"] not in READABLE:
        allowed = ", ".join(map(str, READABLE))
        raise ValueError(f"state_dict[{OWN!r}] is of version {own['version']!r}; allowed: {allowed}")
    missing = window.state().keys() - own["window"].keys()
    if missing:
        raise ValueError(f"state_dict[{OWN!r}]['window'] is damaged: it lacks {', '.join(sorted(missing))}")
    if len(sums) != own.get("sums", 0):
        raise ValueError(
            f"state_dict is damaged: its window has the sums of {own.get('sums', 0)} parameters, it holds "
            f"those of {len(sums)}"
        )
    if sums and (own["counted"], own["reduction"]) != (window.counted, window.reduction):
        loops = {True: "counted", False: "manual"}
        raise ValueError(
            f"state_dict holds a part-filled window of a {loops[bool(own['counted'])]} loop with "
            f"reduction={own['reduction']!r}, this is a {loops[window.counted]} loop with "
            f"reduction={window.reduction!r}; save with include_partial=False to change between them"
        )
    for name, total in sums.items():
        if name not in slots:
            raise ValueError(f"state_dict holds a sum of parameter {name!r}, of {len(slots)} parameters")
        param = slots[name].param
        if not isinstance(total, Tensor) or total.shape != param.shape:
            got = tuple(total.shape) if isinstance(total, Tensor) else type(total).__name__
            raise ValueError(f"the sum of parameter {name!r} is {got}; its shape is {tuple(param.shape)}")
        kinds = (total.is_floating_point(), total.is_complex())
        if kinds != (param.is_floating_point(), param.is_complex()):
            raise ValueError(f"the sum of parameter {name!r} is {total.dtype}, the parameter {param.dtype}")
