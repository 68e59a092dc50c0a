"""Saves the wrapper's state."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...accumulators import Accumulators, GradState, Slot
from ...distributed import RankPlace
from ..master_weights import MasterWeights
from ..window import Window
from .format import (
    COUNTERS,
    DEFERRED_SCALE,
    MASTER,
    NOISE,
    OTHER_FORM,
    PUBLISHED,
    SUM,
    TOP_LEVEL,
    VERSION,
    count_inner_steps,
    has_torch_form,
    pack,
    slots_by_index,
)
from .ranks import WindowRanks, row_entries, with_weights_of_ranks
from .window_fields import emptied, read_window


def save(
    optimizer: Optimizer,
    window: Window,
    accumulators: Accumulators,
    masters: MasterWeights | None,
    place: RankPlace,
    *,
    include_partial: bool,
) -> dict[str, Any]:
    """Return the inner state_dict, and copies of the masters and of the sums of a partly filled window."""
    result = dict(optimizer.state_dict())
    partial = include_partial and not window.empty
    saved = read_window(window)
    counters: dict[str, Any] = {
        "version": VERSION,
        "counted": window.counted,
        "reduction": window.reduction.name,
        "window": saved if partial else emptied(saved),
    }
    noise = accumulators.noise.state()
    if noise is not None:
        counters[NOISE] = noise
    if has_torch_form(result):
        counters["inner_steps"] = count_inner_steps(result["state"])
    slots = slots_by_index(optimizer, accumulators)
    entries: dict[int, dict[str, Tensor]] = {}
    if masters is not None:
        for index, slot in slots.items():
            master = masters.of(slot)
            if master is not None:
                entries[index] = {MASTER: master.clone()}
    if partial:
        for index, of_sum in _save_sums(counters, slots, window, accumulators, place).items():
            entries[index] = entries.get(index, {}) | of_sum
    result[TOP_LEVEL] = counters
    if has_torch_form(result):
        state = dict(result["state"])
        for index, ours in entries.items():
            state[index] = {**state.get(index, {}), **ours}
        result["state"] = state
        text = json.dumps(counters)
        result["param_groups"] = [group | {COUNTERS: text} for group in result["param_groups"]]
    elif entries:
        result[OTHER_FORM] = entries
    return result


def _save_sums(
    counters: dict[str, Any],
    slots: dict[int, Slot],
    window: Window,
    accumulators: Accumulators,
    place: RankPlace,
) -> dict[int, dict[str, Tensor]]:
    """Return the sums of a partly filled window with their counters, and complete the window's counters."""
    has_rows = place.count > 1
    sums: dict[int, Tensor] = {}
    for index, slot in slots.items():
        total = accumulators.grads.current(slot)
        if total is None and has_rows and (slot.in_reduce_bucket or slot.param.requires_grad):
            # Another rank may have a sum, and all ranks must save the same parameters.
            total = torch.zeros_like(slot.param, dtype=slot.accumulate_dtype, requires_grad=False)
        if total is not None:
            sums[index] = total
    if window.shards and window.reduction.weighs:
        counters["window"] = with_weights_of_ranks(counters["window"], window.shards)
    counters.update(WindowRanks.of(window, place).counters())
    counters["sums"] = len(sums)
    of_window = {name: value for name, value in counters.items() if name != NOISE}
    entries: dict[int, dict[str, Tensor]] = {}
    for index, total in sums.items():
        slot = slots[index]
        of_sum = of_window | {
            PUBLISHED: slot.grad_state == GradState.PUBLISHED,
            DEFERRED_SCALE: float(slot.beta) * window.scale_left_out,
        }
        if has_rows:
            has_sum = accumulators.grads.current(slot) is not None
            addition = accumulators.noise.next_addition
            entries[index] = row_entries(total, of_sum, place, has_sum=has_sum, addition=addition)
        else:
            entries[index] = {SUM: total.detach().clone(), COUNTERS: pack(of_sum)}
    return entries
