"""Loads a checkpoint of the wrapper or of the bare inner optimizer, completely or not at all."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from ...accumulators import Accumulators, Slot
from ...distributed import RankPlace
from ..master_weights import LOW, MasterWeights
from ..window import Window
from .checks import (
    check_copy,
    check_counters,
    check_masters,
    check_other_form,
    check_sum,
    check_sum_counters,
    check_torch_form,
    check_window,
)
from .format import NOISE, OTHER_FORM, Checkpoint, SavedSum, has_torch_form, slots_by_index
from .inner_checks import check_groups, check_inner_state
from .ranks import WindowRanks, check_ranks, select_rank, with_weights_of_rank
from .window_fields import is_partial, new_window, restore_window


def load(
    optimizer: Optimizer,
    window: Window,
    accumulators: Accumulators,
    masters: MasterWeights | None,
    place: RankPlace,
    state_dict: dict[str, Any],
) -> None:
    """Load a checkpoint; errors as the wrapper's method."""
    uses_torch_state_dict = getattr(optimizer.state_dict, "__func__", None) is Optimizer.state_dict
    if uses_torch_state_dict or has_torch_form(state_dict) or has_torch_form(optimizer.state_dict()):
        check_torch_form(state_dict)
        checkpoint = Checkpoint(state_dict, None)
    else:
        check_other_form(state_dict, OTHER_FORM)
        checkpoint = Checkpoint(state_dict, sum(len(group["params"]) for group in optimizer.param_groups))
    # As in torch, saved names are matched to the present parameters by position.
    present = slots_by_index(optimizer, accumulators)
    slots = {name: present[index] for index, name in enumerate(checkpoint.names) if index in present}
    loaded = _select_window(checkpoint, slots, window, place)
    with_master: set[Any] = set()
    if masters is not None:
        # Distributed checkpoint leaves out the masters of frozen parameters.
        with_master = {
            name for name, slot in slots.items() if slot.param.dtype in LOW and slot.param.requires_grad
        }
    check_masters(checkpoint.masters, slots, with_master)

    _load_inner(optimizer, checkpoint, slots, accumulators, masters)
    if window.counted or loaded.sums:
        accumulators.clear()
    if window.shards:
        window.shards.drop_withheld()
    restore_window(window, loaded.counters)
    accumulators.noise.restore(loaded.noise, accumulators.slots)
    for name, saved in loaded.sums.items():
        scale = saved.deferred_scale / window.scale_left_out
        accumulators.restore(slots[name], saved.total, saved.published, scale)
    if masters is not None:
        for name, master in checkpoint.masters.items():
            masters.put(slots[name], master)
    elif checkpoint.masters:
        warnings.warn(
            "state_dict holds float32 masters, but this wrapper has none, so they and the precision of the "
            "state are lost; pass master_weights=True to keep them",
            stacklevel=3,
        )


@dataclass
class _LoadedWindow:
    """What a checkpoint has of this rank's window.

    Attributes:
        counters: the window's counters.
        noise: the state of stochastic rounding, if any.
        sums: the sums by the parameters' saved names.
    """

    counters: dict[str, Any]
    noise: dict[str, int] | None = None
    sums: dict[Any, SavedSum] = field(default_factory=dict)


def _select_window(
    checkpoint: Checkpoint, slots: dict[Any, Slot], window: Window, place: RankPlace
) -> _LoadedWindow:
    """Return the window to load. Raises ValueError unless it fits; `slots` by saved name."""
    counters = checkpoint.counters
    if counters is None:
        return _LoadedWindow(new_window())
    check_counters(counters)
    if is_partial(counters["window"]):
        check_ranks(counters, WindowRanks.of(window, place))
    sums: dict[Any, SavedSum] = {}
    if checkpoint.rank_sums:
        counters, sums = select_rank(checkpoint, counters, place)
        check_window(counters, len(sums), window)
    else:
        check_window(counters, len(checkpoint.sums), window)
        for copy in checkpoint.group_counters:
            check_copy(copy, counters, "the counters in a group")
        for name, total in checkpoint.sums.items():
            of_sum = checkpoint.sum_counters[name]
            check_sum_counters(of_sum, counters, name)
            sums[name] = SavedSum.with_counters(total, of_sum)
    for name, saved in sums.items():
        check_sum(saved.total, name, slots.get(name))
    of_window = counters["window"]
    if sums and window.shards and window.reduction.weighs:
        of_window = with_weights_of_rank(of_window, window.shards)
    return _LoadedWindow(of_window, counters.get(NOISE), sums)


def _load_inner(
    optimizer: Optimizer,
    checkpoint: Checkpoint,
    slots: dict[Any, Slot],
    accumulators: Accumulators,
    masters: MasterWeights | None,
) -> None:
    """Load the inner optimizer's entries, or raise ValueError and restore what it was."""
    groups = optimizer.param_groups
    backup = _Backup(optimizer)
    # torch casts state to the parameters' dtype. With masters swapped in, this is float32.
    in_float32 = nullcontext() if masters is None else masters.swapped(accumulators.slots, write_back=False)
    try:
        with in_float32:
            optimizer.load_state_dict(checkpoint.inner)
        # Check now, because the user's hooks may change what is loaded.
        check_groups(optimizer.param_groups, groups, optimizer.defaults)
        check_inner_state(optimizer, {id(slot.param): name for name, slot in slots.items()})
    except BaseException as error:
        backup.restore()
        # A missing key, or another structure.
        shows_mismatch = isinstance(error, LookupError | AttributeError | RuntimeError)
        if shows_mismatch and not isinstance(error, torch.OutOfMemoryError):
            raise ValueError(f"state_dict does not fit {type(optimizer).__name__}: {error!r}") from error
        raise


class _Backup:
    """A backup of an optimizer's attributes, of the dicts and lists in them, and of the attributes of objects
    in them that have a `load_state_dict`: another optimizer, a scheduler.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        containers: list[Any] = [vars(optimizer)]
        known = {id(containers[0])}
        for container in containers:  # grows
            for value in container.values() if isinstance(container, dict) else container:
                loads = hasattr(type(value), "load_state_dict") and hasattr(value, "__dict__")
                inside = vars(value) if loads and not isinstance(value, torch.nn.Module) else value
                if isinstance(inside, dict | list) and id(inside) not in known:
                    known.add(id(inside))
                    containers.append(inside)
        self._contents = [(container, container.copy()) for container in containers]

    def restore(self) -> None:
        for container, contents in self._contents:
            container.clear()
            if isinstance(container, dict):
                container.update(contents)
            else:
                container.extend(contents)
