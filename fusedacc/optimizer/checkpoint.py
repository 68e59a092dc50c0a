"""Saves the wrapper's state inside the inner optimizer's state_dict, and loads it.

A state_dict gets these additional entries:

- in each parameter's state, the sum of a partly filled window under `SUM` and the float32 master under
  `MASTER`;
- the counters at the top level under `OWN`, in each group as text and with each sum as bytes under
  `COUNTERS`. Distributed checkpoint drops unknown top-level keys and loads only the entries that a new
  optimizer has too. A group's counters then show that sums were lost.

`load` removes all of them before the inner optimizer loads the rest, because torch would cast them to the
parameters' dtype. A bare optimizer that loads such a checkpoint keeps the entries in groups and state, and
saves them again after any number of updates. Such a stale checkpoint is recognised: the top level is missing,
the entries were cast, or the optimizer's own count of updates is higher.

Some inner optimizers have a state_dict of another form, for example pytorch_optimizer's Lookahead. It stays
as it is, and the entries for the parameters' state are saved under `APART`, by the parameters' positions.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..accumulators import Accumulators, GradState, Slot
from ..accumulators.noise import MAX_ALL_REDUCES
from ..accumulators.reduction import NAMES
from ..distributed import RankPlace
from ..distributed.rows import row_of_rank, with_rows_of_ranks
from ..kernels.rounding import MOST_ADDITIONS, MOST_SEEDS
from .master_weights import LOW, MasterWeights
from .window import (
    A_BOOL,
    A_COUNT,
    A_NUMBER,
    FIELDS,
    Rule,
    Window,
    fresh_window,
    is_bool,
    is_count,
    is_number,
)

OWN = "fusedacc"
#: Key under `OWN`: the state of stochastic rounding.
NOISE = "noise"
SUM = "fusedacc_sum"
RANK_SUM = "fusedacc_rank_sum"
RANK_COUNTERS = "fusedacc_rank_counters"
COUNTERS = "fusedacc_counters"
MASTER = "fusedacc_master"
APART = "fusedacc_state"
#: The version of the format.
VERSION = 1
#: How to continue on other ranks: the end of error messages.
ALLOWED_RANKS = (
    "Allowed: the same ranks, or a checkpoint saved between windows: after an update or flush(), or with "
    "state_dict(include_partial=False)"
)
#: The keys that a parameter's state may have in addition.
OURS = (SUM, COUNTERS, MASTER, RANK_SUM, RANK_COUNTERS)


def forget_stale(inner: Optimizer) -> None:
    """Remove the wrapper's entries from the groups and state of an optimizer that has loaded a checkpoint."""
    for group in inner.param_groups:
        group.pop(COUNTERS, None)
    for entry in inner.state.values():
        if isinstance(entry, dict):
            for key in OURS:
                entry.pop(key, None)


def _inner_steps(state: Any) -> float | None:
    """Return the largest update count in the inner optimizer's state; None if it has none."""
    steps = [entry["step"] for entry in state.values() if isinstance(entry, dict) and "step" in entry]
    counts = [float(step) for step in steps if isinstance(step, Real)]
    by_device: dict[torch.device, list[Tensor]] = {}
    for step in steps:
        if type(step) is Tensor and step.numel() == 1 and not step.is_meta:
            by_device.setdefault(step.device, []).append(step.reshape(()).double())
    counts += [torch.stack(tensors).amax().item() for tensors in by_device.values()]
    return max(counts, default=None)


def _slots_by_index(optimizer: Optimizer, accumulators: Accumulators) -> dict[int, Slot]:
    """Return the slots by the index of their parameters in a torch state_dict."""
    indices: dict[int, int] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            indices.setdefault(id(param), len(indices))
    return {indices[id(slot.param)]: slot for slot in accumulators.slots if id(slot.param) in indices}


def save(
    optimizer: Optimizer,
    window: Window,
    accumulators: Accumulators,
    masters: MasterWeights | None,
    include_partial: bool,
    place: RankPlace,
) -> dict[str, Any]:
    """Return the inner state_dict, and copies of the masters and of the sums of a partly filled window."""
    result = dict(optimizer.state_dict())
    partial = include_partial and not window.empty
    own: dict[str, Any] = {"version": VERSION, "counted": window.counted, "reduction": window.reduction.name}
    own["window"] = window.state() if partial else fresh_window(window.state())
    own |= {NOISE: noise} if (noise := accumulators.noise.state()) else {}
    if has_torch_form(result):
        own["inner_steps"] = _inner_steps(result["state"])
    slots = _slots_by_index(optimizer, accumulators)
    ours: dict[int, dict[str, Tensor]] = {}
    if masters is not None:
        copies = {index: masters.of(slot) for index, slot in slots.items()}
        ours = {index: {MASTER: copy.clone()} for index, copy in copies.items() if copy is not None}
    if partial:
        for index, entries in _sums(own, slots, window, accumulators, place).items():
            ours[index] = {**ours.get(index, {}), **entries}
    result[OWN] = own
    if not has_torch_form(result):
        return result | ({APART: ours} if ours else {})
    if ours:
        state = dict(result["state"])
        result["state"] = state | {index: {**state.get(index, {}), **kept} for index, kept in ours.items()}
    result["param_groups"] = [group | {COUNTERS: json.dumps(own)} for group in result["param_groups"]]
    return result


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


def _sums(
    own: dict[str, Any], slots: dict[int, Slot], window: Window, accumulators: Accumulators, place: RankPlace
) -> dict[int, dict[str, Tensor]]:
    """Return the sums of a partly filled window with their counters, and add their number to `own`."""
    sums = {index: accumulators.grads.current(slot) for index, slot in slots.items()}
    has_rows = place.count > 1
    if has_rows:
        # Zeros where another rank may have a sum, because all ranks must save the same parameters.
        for index, slot in slots.items():
            if sums[index] is None and (slot.in_bucket or slot.param.requires_grad):
                sums[index] = torch.zeros_like(slot.param, dtype=slot.accumulate_dtype, requires_grad=False)
    if window.shards and window.reduction.weighs:
        # torch.distributed.checkpoint saves one rank's counters, so save the weights of all ranks.
        weights = {name: own["window"][name] for name in ("weight_total", "weight")}
        summed = window.shards.summed([weight or 0.0 for weight in weights.values()])
        pairs = zip(weights.items(), summed, strict=True)
        own["window"] |= {name: None if weight is None else total for (name, weight), total in pairs}
    ranks = WindowRanks.of(window, place)
    own |= {"ranks": ranks.count, "ranks_of": ranks.by}
    own["sums"] = sum(total is not None for total in sums.values())
    of_window = {key: value for key, value in own.items() if key != NOISE}
    result: dict[int, dict[str, Tensor]] = {}
    for index, total in sums.items():
        if total is None:
            continue
        slot = slots[index]
        counters = of_window | {
            "delivered": slot.grad_state is GradState.PUBLISHED,
            "owed": float(accumulators.deferred[slot]),
        }
        if has_rows:
            counters |= {
                "rank": place.rank,
                "held": accumulators.grads.current(slot) is not None,
                "addition": accumulators.noise.next_addition,
            }
            record = packed(counters, WIDTH).to(total.device)  # so that the group can gather it
            row = total.detach().clone(memory_format=torch.contiguous_format)
            result[index] = {
                RANK_SUM: with_rows_of_ranks(row, place),
                RANK_COUNTERS: with_rows_of_ranks(record, place),
            }
        else:
            result[index] = {SUM: total.detach().clone(), COUNTERS: packed(counters)}
    return result


class _Parts:
    """A checkpoint separated into the inner optimizer's entries and the wrapper's; ValueError if it is
    damaged. count: the number of the inner optimizer's parameters if ours are under `APART`, else None.
    """

    def __init__(self, state_dict: dict[str, Any], count: int | None) -> None:
        #: The wrapper's entries in each parameter's state, by saved name: `OURS` in this order.
        self._ours: list[dict[Any, Any]] = [{} for _ in OURS]
        self.sums, self.counters, self.masters, self.rank_sums, self.rank_counters = self._ours
        #: Whether torch has cast these entries, as a bare optimizer does when it loads them.
        self._was_cast = False
        #: The saved names in the order of the parameters, and the counters in the groups.
        self.names: list[Any] = list(range(count or 0))
        self.copies: list[Any] = []
        others = {name: value for name, value in state_dict.items() if name != OWN}
        if count is None:
            self.inner = others | self._of_torch_form(state_dict)
        else:
            for name, entry in others.pop(APART, {}).items():
                self._inner_entry(name, entry)
            self.inner = others
        if (
            self.sums.keys() != self.counters.keys()
            or self.rank_sums.keys() != self.rank_counters.keys()
            or (self.sums and self.rank_sums)
        ):
            raise ValueError("state_dict is damaged: sums without counters, or counters without sums")
        own = state_dict.get(OWN)
        if own is None and (self.copies or self.counters):
            own = [*self.copies, *self.counters.values()][0]
            if not isinstance(own, dict):
                raise ValueError(f"the counters ({COUNTERS!r}) are damaged")
            own = {key: value for key, value in own.items() if key not in ("delivered", "owed")}
            own = None if self._is_stale(own) else own
            if own is None:
                self._forget_ours()
        self.own = own

    def _is_stale(self, own: dict[str, Any]) -> bool:
        """Whether a bare optimizer has made updates since it loaded these counters."""
        if self._was_cast:
            return True
        if "inner_steps" not in own:  # the inner optimizer's state_dict has another form than torch's
            return False
        saved, present = own["inner_steps"], _inner_steps(self.inner.get("state", {}))
        if present is not None:
            return saved is None or (isinstance(saved, Real) and present > saved)
        # The optimizer counts no updates. Distributed checkpoint drops the top level too, but uses names.
        return not (self.sums or self.rank_sums) and not any(isinstance(name, str) for name in self.names)

    def _forget_ours(self) -> None:
        if self.sums or self.rank_sums:
            warnings.warn(
                "state_dict holds the sums of a partly filled window, but a bare optimizer has made updates "
                "since it loaded them; they are ignored",
                stacklevel=5,
            )
        self.copies = []
        for entries in self._ours:
            entries.clear()

    def _of_torch_form(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        state, groups = state_dict["state"], state_dict["param_groups"]
        inner = {name: self._inner_entry(name, entry) for name, entry in state.items()}
        inner = {name: entry for name, entry in inner.items() if entry or not state[name]}
        self.names = [name for group in groups for name in group["params"]]
        self.copies = [unpacked(group[COUNTERS]) for group in groups if COUNTERS in group]
        kept = [{key: value for key, value in group.items() if key != COUNTERS} for group in groups]
        return {"state": inner, "param_groups": kept}

    def _inner_entry(self, name: Any, entry: Any) -> Any:
        if not isinstance(entry, dict) or entry.keys().isdisjoint(OURS):
            return entry
        for key, entries in zip(OURS, self._ours, strict=True):
            if key in entry:
                entries[name] = unpacked(entry[key]) if key == COUNTERS else entry[key]
                if key in (COUNTERS, RANK_COUNTERS):
                    self._was_cast |= entry[key].is_floating_point()
        return {key: value for key, value in entry.items() if key not in OURS}

    def check(self, slots: dict[Any, Slot], window: Window, masters: bool, place: RankPlace) -> None:
        """Raise ValueError unless the checkpoint fits, and select this rank's sums; `slots` by saved name."""
        if self.own is not None:
            check_own(self.own)
            if is_partial(self.own["window"]):
                check_ranks(self.own, WindowRanks.of(window, place))
            if self.rank_sums:
                self._take_row(self.own, place)
            check_window(self.own, len(self.sums), window)
            for copy in self.copies:
                check_copy(copy, self.own, "the counters in a group")
            for name, total in self.sums.items():
                check_counters(self.counters[name], self.own, name)
                check_sum(total, name, slots.get(name))
            if window.shards and window.reduction.weighs and self.sums:
                self._share_weights(window.shards.ranks)
        with_masters = slots.items() if masters else ()
        # Distributed checkpoint leaves out the masters of frozen parameters.
        low = {name for name, slot in with_masters if slot.param.dtype in LOW and slot.param.requires_grad}
        check_masters(self.masters, slots, low)

    def _share_weights(self, ranks: int) -> None:
        """Give this rank an equal share of the weights of all ranks, of which only the sum matters."""
        assert self.own is not None
        window = dict(self.own["window"])
        for name in ("weight_total", "weight"):
            window[name] = None if window[name] is None else window[name] / ranks
        self.own = self.own | {"window": window}

    def _take_row(self, own: dict[str, Any], place: RankPlace) -> None:
        """Replace the rows of all ranks by the sums and counters of this rank. Raises ValueError if the
        checkpoint is damaged or holds another rank's rows.
        """
        shared = shared_by_ranks(own)
        for copy in self.copies:
            check_own(copy)
            check_copy(shared_by_ranks(copy), shared, "the counters in a group")
        self.copies = []
        records = {name: _record(name, saved, own, place) for name, saved in self.rank_counters.items()}
        rows = {name: _row(name, saved, place) for name, saved in self.rank_sums.items()}
        self.sums = {name: rows[name] for name, record in records.items() if record["held"]}
        first = next(iter(records.values()))
        result = own | {"window": first["window"], "sums": len(self.sums)}
        if NOISE in result:  # each rank counts its own additions
            result[NOISE] = result[NOISE] | {"addition": first["addition"]}
        self.own = result
        self.counters = {
            name: result | {"delivered": records[name]["delivered"], "owed": records[name]["owed"]}
            for name in self.sums
        }


class _Former:
    """A backup of an optimizer's attributes, of the dicts and lists in them, and of the attributes of objects
    in them that have a `load_state_dict`: another optimizer, a scheduler.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        found: list[Any] = [vars(optimizer)]
        known = {id(found[0])}
        for each in found:
            for value in each.values() if isinstance(each, dict) else each:
                loads = hasattr(type(value), "load_state_dict") and hasattr(value, "__dict__")
                inside = vars(value) if loads and not isinstance(value, torch.nn.Module) else value
                if isinstance(inside, dict | list) and id(inside) not in known:
                    known.add(id(inside))
                    found.append(inside)
        self._contents = [(each, each.copy()) for each in found]

    def restore(self) -> None:
        for each, former in self._contents:
            each.clear()
            each.update(former) if isinstance(each, dict) else each.extend(former)


def load(
    optimizer: Optimizer,
    window: Window,
    accumulators: Accumulators,
    masters: MasterWeights | None,
    state_dict: dict[str, Any],
    place: RankPlace,
) -> None:
    """Load a checkpoint of the wrapper or of the bare inner optimizer; errors as the wrapper's method."""
    present = _slots_by_index(optimizer, accumulators)
    # Without the form of torch's, the wrapper's entries are under `APART`.
    stock = getattr(optimizer.state_dict, "__func__", None) is Optimizer.state_dict
    apart = not (stock or has_torch_form(state_dict) or has_torch_form(optimizer.state_dict()))
    if apart:
        check_apart(state_dict, APART)
    else:
        check_structure(state_dict)
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    parts = _Parts(state_dict, count if apart else None)
    # As in torch, saved names are matched to the present parameters by position.
    slots = {name: present[index] for index, name in enumerate(parts.names) if index in present}
    parts.check(slots, window, masters is not None, place)

    groups = optimizer.param_groups
    former = _Former(optimizer)
    # torch casts state to the parameters' dtype. With masters swapped in, this is float32.
    wide = nullcontext() if masters is None else masters.swapped(accumulators.slots, write_back=False)
    try:
        with wide:
            optimizer.load_state_dict(parts.inner)
        # Check now, because the user's hooks may change what is loaded.
        check_groups(optimizer.param_groups, groups, optimizer.defaults)
        check_inner_state(optimizer, {id(slot.param): name for name, slot in slots.items()})
    except BaseException as error:
        former.restore()
        relied_on = LookupError, AttributeError, RuntimeError  # a missing key, or another structure
        if isinstance(error, relied_on) and not isinstance(error, torch.OutOfMemoryError):
            raise ValueError(f"state_dict does not fit {type(optimizer).__name__}: {error!r}") from error
        raise
    if window.counted or parts.sums:
        accumulators.clear()
    if window.shards:
        window.shards.drop_withheld()
    saved = Window(None, None).state() if parts.own is None else parts.own["window"]
    window.restore(saved)
    accumulators.noise.restore((parts.own or {}).get(NOISE), accumulators.slots)
    for name, total in parts.sums.items():
        counters = parts.counters[name]
        accumulators.restore(slots[name], total, counters["delivered"], counters["owed"])
    if masters is not None:
        for name, master in parts.masters.items():
            masters.put(slots[name], master)
    elif parts.masters:
        warnings.warn(
            "state_dict holds float32 masters, but this wrapper has none, so they and the precision of the "
            "state are lost; pass master_weights=True to keep them",
            stacklevel=3,
        )


# Pickles and deep copies: the copied inner optimizer gets new hooks, slots and accumulators, which then take
# over the values, counters and masters.

#: The entries of a pickle in addition to the wrapper's attributes.
SNAPSHOT = (
    *("schedule", "reduction", "private", "window", "backend"),
    *("masters", "sums", "spent", "noise"),
)


def snapshot(window: Window, accumulators: Accumulators, masters: MasterWeights | None) -> dict[str, Any]:
    """Return the window, sums and masters, with the keys of `SNAPSHOT`."""
    # The sums of a manual loop are p.grad, which torch does not copy either.
    grads = accumulators.grads
    private = not (grads.visible or window.empty)
    return {
        "schedule": window.schedule,
        "reduction": window.reduction.name,
        "private": window.private,
        "window": window.state(),
        "backend": accumulators.backend,
        "masters": None if masters is None else [masters.of(slot) for slot in accumulators.slots],
        "sums": [
            (grads.current(slot), slot.grad_state is GradState.PUBLISHED, float(accumulators.deferred[slot]))
            if private
            else None
            for slot in accumulators.slots
        ],
        "spent": grads.consumed,
        "noise": accumulators.noise.state(),
    }


def restore_snapshot(
    kept: dict[str, Any], window: Window, accumulators: Accumulators, masters: MasterWeights | None
) -> None:
    """Restore a result of `snapshot` into new components."""
    window.restore(kept["window"] if window.counted else fresh_window(kept["window"]))
    for slot, held in zip(accumulators.slots, kept["sums"], strict=True):
        if held is not None and held[0] is not None:
            accumulators.restore(slot, *held)
    accumulators.noise.restore(kept["noise"], accumulators.slots)
    if kept["spent"]:
        accumulators.grads.mark_consumed()
    for slot, master in zip(accumulators.slots, kept["masters"] or (), strict=False):
        if master is not None and masters is not None:
            masters.put(slot, master)


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


def _record(name: Any, saved: Any, own: dict[str, Any], place: RankPlace) -> dict[str, Any]:
    """Return the counters in this rank's row of a parameter."""
    record = unpacked(_row(name, saved, place))
    check_record(record, own, name, place.rank)
    return record


def _row(name: Any, saved: Any, place: RankPlace) -> Tensor:
    """Return this rank's row of a saved parameter."""
    try:
        return row_of_rank(saved, place)
    except ValueError as error:
        raise ValueError(f"the sum of parameter {name!r} is damaged: {error}") from None


# Checks that a checkpoint is complete and fits, before anything changes. All raise ValueError.


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


#: What a rank's row holds in addition to the counters of its window.
_OF_RANK = {"held": A_BOOL, "delivered": A_BOOL, "owed": A_NUMBER, "rank": A_COUNT, "addition": A_COUNT}
#: The upper bounds of the counters of stochastic rounding.
_NOISE = {"seed": MOST_SEEDS, "addition": MOST_ADDITIONS, "reduction": MAX_ALL_REDUCES}
_NOISE["written"] = MOST_ADDITIONS


def _is_noise(value: Any) -> bool:
    if not isinstance(value, dict) or not is_bool(value.get("reduced")):
        return False
    return all(is_count(value.get(name)) and value[name] < end for name, end in _NOISE.items())


_OWN: dict[str, Rule] = {
    "counted": A_BOOL,
    "reduction": (lambda v: v in NAMES, ", ".join(NAMES)),
    "window": (lambda v: isinstance(v, dict), "a dict"),
}
_OF_PARTIAL: dict[str, Rule] = {
    "ranks": (lambda v: is_count(v) and v > 0, "an int >= 1"),
    "ranks_of": (lambda v: isinstance(v, str), "a string"),
    "sums": A_COUNT,
}
_OPTIONAL: dict[str, Rule] = {
    NOISE: (_is_noise, f"a dict of 'reduced', a bool, and ints from 0 to below {_NOISE}"),
}


def _check_entries(values: dict[str, Any], rules: Mapping[str, Rule]) -> None:
    missing = rules.keys() - values.keys()
    if missing:
        raise ValueError(f"state_dict[{OWN!r}] is damaged: it lacks {', '.join(sorted(missing))}")
    for name, (holds, allowed) in rules.items():
        if not holds(values[name]):
            raise ValueError(
                f"state_dict[{OWN!r}] is damaged: {name} is {values[name]!r}; allowed: {allowed}"
            )


def is_partial(saved: dict[str, Any]) -> bool:
    """Whether a window's state is that of a partly filled window."""
    return saved["micro_step"] > 0 or saved["ran"]


def check_own(own: Any) -> None:
    """Check that the counters are complete."""
    if not isinstance(own, dict):
        raise ValueError(f"state_dict[{OWN!r}] must be a dict, got {type(own).__name__}")
    version = own.get("version")
    if type(version) is not int or version != VERSION:
        raise ValueError(f"state_dict[{OWN!r}] is of version {version!r}; allowed: {VERSION}")
    _check_entries(own, _OWN | {name: rule for name, rule in _OPTIONAL.items() if name in own})
    _check_entries(own["window"], {field.name: field.rule for field in FIELDS})
    if is_partial(own["window"]):
        _check_entries(own, _OF_PARTIAL)


def check_ranks(own: dict[str, Any], present: WindowRanks) -> None:
    """Check that the ranks which saved a partly filled window are those of this run."""
    saved = WindowRanks(own["ranks"], own["ranks_of"])
    if saved != present:
        raise ValueError(
            f"state_dict holds a partly filled window of {saved}, and this run has {present}. {ALLOWED_RANKS}"
        )


def check_window(own: dict[str, Any], sums: int, window: Window) -> None:
    """Check that the counters fit the number of sums and the loop."""
    saved = own["window"]
    partial = is_partial(saved)
    expected = own["sums"] if partial else 0
    if sums != expected:
        raise ValueError(
            f"state_dict is damaged: its window has the sums of {expected!r} parameters, it holds those of "
            f"{sums}. Distributed checkpoint loads only what it is given room for: see "
            "fusedacc.integrations.distributed_checkpoint.make_room"
        )
    if not partial:
        if saved != fresh_window(saved):
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


def shared_by_ranks(own: dict[str, Any]) -> dict[str, Any]:
    """Return the counters that are the same on all ranks."""
    names = "version", "counted", "reduction", "ranks", "ranks_of", "sums", "inner_steps"
    window = {field.name: own["window"][field.name] for field in FIELDS if not field.per_rank}
    return {name: own.get(name) for name in names} | {"window": window}


def check_record(record: Any, own: dict[str, Any], name: Any, rank: int) -> None:
    """Check that a rank's row belongs to this window and this rank."""
    where = f"the counters of a rank beside the sum of parameter {name!r}"
    check_own(record)
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
    compared = own.keys() - {NOISE}
    of_window, its = ({key: each.get(key) for key in compared} for each in (own, counters))
    if json.dumps(of_window, sort_keys=True) != json.dumps(its, sort_keys=True):
        raise ValueError(f"{where} are of another window")


def check_counters(counters: Any, own: dict[str, Any], name: Any) -> None:
    """Check the counters stored with a sum: same window, whether it was in p.grad, and its deferred scale."""
    where = f"the counters beside the sum of parameter {name!r}"
    check_copy(counters, own, where)
    if not is_bool(counters.get("delivered")) or not is_number(counters.get("owed")):
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
SHAPED = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg"}
SHAPED |= {"acc_delta", "sum", "prev", "step_size", "ax", "variance"}


def check_inner_state(inner: Optimizer, names: dict[int, Any]) -> None:
    """Check that the state of torch's optimizers fits, as torch does not; `names` by the parameters' ids."""
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
