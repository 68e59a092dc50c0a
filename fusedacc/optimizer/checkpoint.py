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
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..accumulators import Accumulators, GradState, Slot
from ..accumulators.reduction import reduction_of
from ..distributed import RankPlace
from ..distributed.rows import own_rows, spread
from ..kernels import tuning
from . import checkpoint_checks as checks
from .checkpoint_checks import CHOICES, NOISE, OWN
from .master_weights import LOW, MasterWeights
from .window import FIELDS, RANKED_VERSION, VERSION, Window, fresh_window, version_of

SUM = "fusedacc_sum"
RANK_SUM = "fusedacc_rank_sum"
RANK_COUNTERS = "fusedacc_rank_counters"
COUNTERS = "fusedacc_counters"
MASTER = "fusedacc_master"
APART = "fusedacc_state"
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
    """Return the inner state_dict with the counters, masters and the sums of a partly filled window.

    Tensors of the wrapper are copies.
    """
    result = dict(optimizer.state_dict())
    partial = include_partial and not window.empty
    own: dict[str, Any] = {"version": VERSION, "counted": window.counted, "reduction": window.reduction.name}
    own["window"] = window.state() if partial else fresh_window(window.state())
    if accumulators.choices:
        own[CHOICES] = {"processor": tuning.processor(), "ways": dict(accumulators.choices)}
    own |= {NOISE: noise} if (noise := accumulators.noise.state()) else {}
    if checks.has_torch_form(result):
        own["inner_steps"] = _inner_steps(result["state"])
    slots = _slots_by_index(optimizer, accumulators)
    ours: dict[int, dict[str, Tensor]] = {}
    if masters is not None:
        copies = {index: masters.of(slot) for index, slot in slots.items()}
        ours = {index: {MASTER: copy.clone()} for index, copy in copies.items() if copy is not None}
    if partial:
        for index, kept in _sums(own, slots, window, accumulators, place).items():
            ours[index] = {**ours.get(index, {}), **kept}
    result[OWN] = own
    if not checks.has_torch_form(result):
        return result | ({APART: ours} if ours else {})
    if ours:
        state = dict(result["state"])
        result["state"] = state | {index: {**state.get(index, {}), **kept} for index, kept in ours.items()}
    result["param_groups"] = [group | {COUNTERS: json.dumps(own)} for group in result["param_groups"]]
    return result


def _sums(
    own: dict[str, Any], slots: dict[int, Slot], window: Window, accumulators: Accumulators, place: RankPlace
) -> dict[int, dict[str, Tensor]]:
    """Return the sums of a partly filled window with their counters, and add their number to `own`."""
    sums = {index: accumulators.grads.current(slot) for index, slot in slots.items()}
    ranked = place.count > 1
    if ranked:
        sums = _rows_to_save(slots, sums, window.reduced)
        own |= {"ranks": place.count, "window": window.state(over_ranks=True)}
    own["version"] = version_of(own["window"])
    unit = 1.0
    if window.shards and window.reduction.weighs:
        # Save what one process would save: the sums and weights of all ranks.
        weights = {name: own["window"][name] for name in ("weight_total", "weight")}
        summed = window.shards.summed([weight or 0.0 for weight in weights.values()])
        pairs = zip(weights.items(), summed, strict=True)
        own["window"] |= {name: None if weight is None else total for (name, weight), total in pairs}
        unit = window.shards.divisor
    own["sums"] = sum(total is not None for total in sums.values())
    of_window = {key: value for key, value in own.items() if key not in (CHOICES, NOISE)}
    kept: dict[int, dict[str, Tensor]] = {}
    for index, total in sums.items():
        if total is None:
            continue
        slot = slots[index]
        owed = unit * accumulators.scale_of(slot)
        said = {"delivered": slot.grad_state is GradState.PUBLISHED, "owed": owed}
        if ranked:
            held = accumulators.grads.current(slot) is not None
            said |= {"held": held, "addition": accumulators.noise.next_addition}
            kept[index] = _row(of_window | said, total, window.reduced, place)
        else:
            kept[index] = {SUM: total.detach().clone(), COUNTERS: packed(of_window | said)}
    return kept


def _stands_apart(optimizer: Optimizer, state_dict: Any) -> bool:
    """Whether a checkpoint has the wrapper's entries under `APART`. One of torch's form never has."""
    stock = getattr(optimizer.state_dict, "__func__", None) is Optimizer.state_dict
    if stock or checks.has_torch_form(state_dict):
        return False
    return not checks.has_torch_form(optimizer.state_dict())


class _Parts:
    """A checkpoint separated into the inner optimizer's entries and the wrapper's.

    count: the number of the inner optimizer's parameters if the wrapper's entries are under `APART`, else
    None. Raises ValueError if the checkpoint is damaged.
    """

    def __init__(self, state_dict: dict[str, Any], count: int | None) -> None:
        #: The wrapper's entries in each parameter's state, by saved name: `OURS` in this order.
        self.sums: dict[Any, Any] = {}
        self.counters: dict[Any, Any] = {}
        self.masters: dict[Any, Any] = {}
        self.rank_sums: dict[Any, Any] = {}
        self.rank_counters: dict[Any, Any] = {}
        self._ours = self.sums, self.counters, self.masters, self.rank_sums, self.rank_counters
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
        alone = {} if self.rank_counters else self.sums
        if alone.keys() != self.counters.keys() or (self.rank_sums and not self.rank_counters):
            raise ValueError("state_dict is damaged: sums without counters, or counters without sums")
        own = state_dict.get(OWN)
        if own is None and (self.copies or self.counters):
            own = [*self.copies, *self.counters.values()][0]
            if not isinstance(own, dict):
                raise ValueError(f"the counters ({COUNTERS!r}) are damaged")
            own = {key: value for key, value in own.items() if key not in ("delivered", "owed")}
            if self._is_stale(own):
                own = None
                self._forget_ours()
        self.own = own

    def _is_stale(self, own: dict[str, Any]) -> bool:
        """Whether a bare optimizer has made updates since it loaded these counters."""
        if self._was_cast:
            return True
        if "inner_steps" not in own:  # saved by an earlier version
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
        inner = {name: self._inner_entry(name, entry) for name, entry in state_dict["state"].items()}
        for name in [name for name, entry in state_dict["state"].items() if entry and not inner[name]]:
            del inner[name]
        groups = state_dict["param_groups"]
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
        """Check that the checkpoint fits (else ValueError), and select this rank's sums. `slots` are by saved
        name.
        """
        if self.own is not None and self.rank_counters:
            checks.check_over_ranks(self.own)
            shared = checks.shared_by_ranks(self.own)
            for copy in self.copies:
                checks.check_over_ranks(copy)
                checks.check_copy(checks.shared_by_ranks(copy), shared, "the counters in a group")
            saved = self.sums, self.rank_sums, self.rank_counters
            self.own, self.sums, self.counters = _of_rank(self.own, *saved, place)
            self.copies = []
        if self.own is not None:
            checks.check_window(self.own, len(self.sums), window)
            for copy in self.copies:
                checks.check_copy(copy, self.own, "the counters in a group")
            for name, total in self.sums.items():
                checks.check_counters(self.counters[name], self.own, name)
                checks.check_sum(total, name, slots.get(name))
            if window.shards and window.reduction.weighs and self.sums:
                self._share(window.shards.ranks, window.shards.divisor)
            saved = self.own["window"]
            if place.count > 1 and not self.rank_counters and (saved["micro_step"] or saved["ran"]):
                shares = _of_one(self.own, self.sums, self.counters, place)
                self.own, self.sums, self.counters = shares
        kept = slots.items() if masters else ()
        # Distributed checkpoint leaves out the masters of frozen parameters.
        low = {name for name, slot in kept if slot.param.dtype in LOW and slot.param.requires_grad}
        checks.check_masters(self.masters, slots, low)

    def _share(self, ranks: int, divisor: float) -> None:
        """Convert the sums and weights of one process to those of one of `ranks` that FSDP2 averages."""
        assert self.own is not None
        window = dict(self.own["window"])
        for name in ("weight_total", "weight"):
            window[name] = None if window[name] is None else window[name] / ranks
        self.own = self.own | {"window": window}
        for name, counters in self.counters.items():
            owed = counters.get("owed", 1.0) / divisor
            if owed != 1.0:
                self.sums[name] = self.sums[name] * owed
            self.counters[name] = counters | {"owed": 1.0}


class _Former:
    """A backup of an optimizer's attributes, and of the dicts and lists in them.

    It includes the attributes of objects that have a `load_state_dict`: another optimizer, a scheduler.
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
    """Load a checkpoint of the wrapper or of the bare inner optimizer; errors as `load_state_dict` of the
    wrapper.
    """
    present = _slots_by_index(optimizer, accumulators)
    apart = _stands_apart(optimizer, state_dict)
    if apart:
        checks.check_apart(state_dict, APART)
    else:
        checks.check_structure(state_dict)
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
        checks.check_groups(optimizer.param_groups, groups, optimizer.defaults)
        checks.check_inner_state(optimizer, {id(slot.param): name for name, slot in slots.items()})
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
    choices = (parts.own or {}).get(CHOICES)
    # On another CPU torch's own products have other bits, and another choice may be faster.
    if choices is not None and choices["processor"] == tuning.processor():
        accumulators.choices.clear()
        accumulators.choices.update(choices["ways"])
    accumulators.noise.restore((parts.own or {}).get(NOISE), accumulators.slots)
    for name, total in parts.sums.items():
        counters = parts.counters[name]
        accumulators.restore(slots[name], total, counters["delivered"], counters.get("owed", 1.0))
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
    *("masters", "sums", "spent", "choices", "noise"),
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
            (grads.current(slot), slot.grad_state is GradState.PUBLISHED, accumulators.scale_of(slot))
            if private
            else None
            for slot in accumulators.slots
        ],
        "spent": grads.consumed,
        "choices": dict(accumulators.choices),
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
    accumulators.choices.update(kept["choices"] or {})
    accumulators.noise.restore(kept["noise"], accumulators.slots)
    if kept["spent"]:
        accumulators.grads.mark_consumed()
    for slot, master in zip(accumulators.slots, kept["masters"] or (), strict=False):
        if master is not None and masters is not None:
            masters.put(slot, master)


# A partly filled window of several ranks, loaded on the same or another number of ranks. Each rank has the
# sums and counters that a checkpoint of one process holds. `spread` stores them as one row for each rank, and
# `_of_rank` turns the rows that this rank has read back into what one process would have saved. Sums that
# were already all-reduced are equal on all ranks, and are saved as by one process.
#
# On another number of ranks, each rank continues at the window's micro-batch. A rank then has several rows,
# which are added, or none. `carried` is the number of micro-batches in its sums beyond those that it counts.

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


def _rows_to_save(
    slots: Mapping[int, Slot], sums: Mapping[int, Tensor | None], reduced: bool
) -> dict[int, Tensor | None]:
    """Return the sums, with zeros where another rank may have one: all ranks save the same parameters."""
    return {
        index: torch.zeros_like(slot.param, dtype=slot.accumulate_dtype, requires_grad=False)
        if sums[index] is None and not reduced and (slot.in_bucket or slot.param.requires_grad)
        else sums[index]
        for index, slot in slots.items()
    }


def _row(said: dict[str, Any], total: Tensor, reduced: bool, place: RankPlace) -> dict[str, Any]:
    """Return the entries for a parameter's state; `reduced` says that all ranks have the same sum."""
    record = packed(said | {"rank": place.rank}, WIDTH).to(total.device)  # so that the group can gather it
    kept = total.detach().clone(memory_format=torch.contiguous_format)
    counters = {RANK_COUNTERS: spread(record.unsqueeze(0), place)}
    return counters | ({SUM: kept} if reduced else {RANK_SUM: spread(kept.unsqueeze(0), place)})


def _of_rank(
    own: dict[str, Any],
    sums: Mapping[Any, Tensor],
    rows: Mapping[Any, Any],
    counters: Mapping[Any, Any],
    place: RankPlace,
) -> tuple[dict[str, Any], dict[Any, Tensor], dict[Any, dict[str, Any]]]:
    """Return this rank's share of the window as one process would have saved it: the counters, the sums, and
    the counters stored with each sum.

    `own` has the counters of the parameter groups. By saved parameter name: `sums` are equal on all ranks,
    `rows` are the rows of each rank's sums, and `counters` those of the rows. Raises ValueError if the
    checkpoint is damaged or holds another rank's rows.
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


def _of_one(
    own: dict[str, Any], sums: Mapping[Any, Tensor], counters: Mapping[Any, Any], place: RankPlace
) -> tuple[dict[str, Any], dict[Any, Tensor], dict[Any, dict[str, Any]]]:
    """Do the same as `_of_rank` for a window that one process has saved; rank 0 gets its sums."""
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
