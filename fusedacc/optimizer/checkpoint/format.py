"""The entries of a checkpoint: their names, how counters are encoded, and which entries are the wrapper's."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...accumulators import Accumulators, Slot

#: The version of the format.
VERSION = 1

#: The key of the counters at the top level, and in these counters that of the state of stochastic rounding.
TOP_LEVEL = "fusedacc"
NOISE = "noise"
#: The key of the parameters' entries if the inner optimizer's state_dict has another form than torch's.
OTHER_FORM = "fusedacc_state"

#: Keys in a parameter's state, and `COUNTERS` in a group too.
SUM = "fusedacc_sum"
COUNTERS = "fusedacc_counters"
MASTER = "fusedacc_master"
#: Instead of `SUM` and `COUNTERS`, if the sums of several ranks are saved: one row for each rank.
RANK_SUM = "fusedacc_rank_sum"
RANK_COUNTERS = "fusedacc_rank_counters"
OUR_KEYS = (SUM, COUNTERS, MASTER, RANK_SUM, RANK_COUNTERS)

#: What is saved with a sum in addition to the window's counters: whether it was in p.grad, and its deferred
#: scale.
PUBLISHED = "published"
DEFERRED_SCALE = "deferred_scale"


@dataclass(frozen=True)
class SavedSum:
    """The sum of one parameter in a checkpoint.

    Attributes:
        total: the accumulator.
        published: whether it was in p.grad.
        deferred_scale: its deferred scale.
    """

    total: Tensor
    published: bool
    deferred_scale: float

    @classmethod
    def with_counters(cls, total: Tensor, counters: dict[str, Any]) -> SavedSum:
        """Return the sum that was saved with these counters."""
        return cls(total, counters[PUBLISHED], counters[DEFERRED_SCALE])


def pack(counters: dict[str, Any], width: int = 0) -> Tensor:
    """Encode counters as a uint8 tensor of at least `width` bytes, which every format stores unchanged."""
    return torch.tensor(list(json.dumps(counters).ljust(width).encode()), dtype=torch.uint8)


def unpack(saved: Any) -> Any:
    """Decode the result of `pack`, or its text. Raises ValueError if it is damaged."""
    try:
        return json.loads(saved if isinstance(saved, str) else bytes(saved.to(torch.uint8).tolist()))
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"the counters are damaged: {error}") from None


def has_torch_form(state_dict: Any) -> bool:
    """Whether it is a dict with the two entries of a torch state_dict."""
    return isinstance(state_dict, dict) and {"state", "param_groups"} <= state_dict.keys()


def slots_by_index(optimizer: Optimizer, accumulators: Accumulators) -> dict[int, Slot]:
    """Return the slots by the index of their parameters in a torch state_dict."""
    indices: dict[int, int] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            indices.setdefault(id(param), len(indices))
    return {indices[id(slot.param)]: slot for slot in accumulators.slots if id(slot.param) in indices}


def count_inner_steps(state: Any) -> float | None:
    """Return the largest update count in the inner optimizer's state; None if it has none."""
    steps = [entry["step"] for entry in state.values() if isinstance(entry, dict) and "step" in entry]
    counts = [float(step) for step in steps if isinstance(step, Real)]
    by_device: dict[torch.device, list[Tensor]] = {}
    for step in steps:
        if type(step) is Tensor and step.numel() == 1 and not step.is_meta:
            by_device.setdefault(step.device, []).append(step.reshape(()).double())
    counts += [torch.stack(tensors).amax().item() for tensors in by_device.values()]
    return max(counts, default=None)


def forget_stale(inner: Optimizer) -> None:
    """Remove the wrapper's entries from the groups and state of an optimizer that has loaded a checkpoint."""
    for group in inner.param_groups:
        group.pop(COUNTERS, None)
    for entry in inner.state.values():
        if isinstance(entry, dict):
            for key in OUR_KEYS:
                entry.pop(key, None)


class Checkpoint:
    """A checkpoint, separated into the entries of the inner optimizer and those of the wrapper.

    Args:
        state_dict: the checkpoint, of which the structure was checked.
        num_parameters: the number of the inner optimizer's parameters if the wrapper's entries are under
            `OTHER_FORM`, else None.

    Attributes:
        inner: the inner optimizer's state_dict.
        names: the saved names of the parameters, in the order of the parameters.
        counters: the counters of the window; None if there are none, or only stale ones.
        group_counters: their copies in the groups.
        sums: the entries under `SUM`, by the parameters' saved names; so are the next four.
        sum_counters: those under `COUNTERS`, decoded.
        masters: those under `MASTER`.
        rank_sums: those under `RANK_SUM`.
        rank_counters: those under `RANK_COUNTERS`.

    Raises:
        ValueError: it is damaged.
    """

    def __init__(self, state_dict: dict[str, Any], num_parameters: int | None) -> None:
        self._entries: dict[str, dict[Any, Any]] = {key: {} for key in OUR_KEYS}
        self.sums = self._entries[SUM]
        self.sum_counters = self._entries[COUNTERS]
        self.masters = self._entries[MASTER]
        self.rank_sums = self._entries[RANK_SUM]
        self.rank_counters = self._entries[RANK_COUNTERS]
        #: Whether torch has cast the counters, as a bare optimizer does when it loads them.
        self._was_cast = False
        self.group_counters: list[Any] = []
        if num_parameters is None:
            self.names = [name for group in state_dict["param_groups"] for name in group["params"]]
            self.inner = self._separate_torch_form(state_dict)
        else:
            self.names = list(range(num_parameters))
            self.inner = self._separate_other_form(state_dict)
        self._check_pairs()
        self.counters = self._find_counters(state_dict)

    def _separate_torch_form(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Take our entries, and return the inner optimizer's state_dict."""
        inner = {key: value for key, value in state_dict.items() if key != TOP_LEVEL}
        state = {name: self._take_entries(name, entry) for name, entry in state_dict["state"].items()}
        inner["state"] = {
            name: entry for name, entry in state.items() if entry or not state_dict["state"][name]
        }
        groups = state_dict["param_groups"]
        self.group_counters = [unpack(group[COUNTERS]) for group in groups if COUNTERS in group]
        inner["param_groups"] = [
            {key: value for key, value in group.items() if key != COUNTERS} for group in groups
        ]
        return inner

    def _separate_other_form(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Take our entries, and return the inner optimizer's state_dict."""
        for name, entry in state_dict.get(OTHER_FORM, {}).items():
            self._take_entries(name, entry)
        return {key: value for key, value in state_dict.items() if key not in (TOP_LEVEL, OTHER_FORM)}

    def _take_entries(self, name: Any, entry: Any) -> Any:
        """Take our entries of one parameter's state, and return the others."""
        if not isinstance(entry, dict) or entry.keys().isdisjoint(OUR_KEYS):
            return entry
        for key in OUR_KEYS:
            if key in entry:
                self._entries[key][name] = unpack(entry[key]) if key == COUNTERS else entry[key]
        for key in (COUNTERS, RANK_COUNTERS):
            saved = entry.get(key)
            self._was_cast = self._was_cast or (isinstance(saved, Tensor) and saved.is_floating_point())
        return {key: value for key, value in entry.items() if key not in OUR_KEYS}

    def _check_pairs(self) -> None:
        """Raise ValueError unless each sum has its counters."""
        if (
            self.sums.keys() != self.sum_counters.keys()
            or self.rank_sums.keys() != self.rank_counters.keys()
            or (self.sums and self.rank_sums)
        ):
            raise ValueError("state_dict is damaged: sums without counters, or counters without sums")

    def _find_counters(self, state_dict: dict[str, Any]) -> Any:
        """Return the counters at the top level, else a copy that is not stale."""
        counters = state_dict.get(TOP_LEVEL)
        copies = [*self.group_counters, *self.sum_counters.values()]
        if counters is not None or not copies:
            return counters
        if not isinstance(copies[0], dict):
            raise ValueError(f"the counters ({COUNTERS!r}) are damaged")
        counters = {key: value for key, value in copies[0].items() if key not in (PUBLISHED, DEFERRED_SCALE)}
        if self._is_stale(counters):
            self._drop_stale_entries()
            return None
        return counters

    def _is_stale(self, counters: dict[str, Any]) -> bool:
        """Whether a bare optimizer has made updates since it loaded these counters."""
        if self._was_cast:
            return True
        if "inner_steps" not in counters:  # the inner optimizer's state_dict has another form than torch's
            return False
        saved = counters["inner_steps"]
        present = count_inner_steps(self.inner.get("state", {}))
        if present is not None:
            return saved is None or (isinstance(saved, Real) and present > saved)
        # The optimizer counts no updates. Distributed checkpoint drops the top level too, but uses names.
        return not (self.sums or self.rank_sums) and not any(isinstance(name, str) for name in self.names)

    def _drop_stale_entries(self) -> None:
        if self.sums or self.rank_sums:
            warnings.warn(
                "state_dict holds the sums of a partly filled window, but a bare optimizer has made updates "
                "since it loaded them; they are ignored",
                stacklevel=6,
            )
        self.group_counters = []
        for entries in self._entries.values():
            entries.clear()
