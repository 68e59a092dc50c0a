"""The window alone: a state machine of numbers, without tensors."""

from __future__ import annotations

import pytest
import torch

from fusedacc.optimizer.micro_batch import check_weight
from fusedacc.optimizer.window import Window


def run_micro_batch(window: Window, weight: float | None = None) -> float:
    """One micro-batch as the wrapper drives it; returns what its gradient is multiplied by, at the end."""
    micro = window.open(weight)
    scale = window.base_scale * window.factor
    micro.ran = True
    window.in_context = False
    window.end_micro_batch()
    return scale


@pytest.mark.parametrize(("steps", "given"), [(1, 1), (3, 3), (7, 7), (3, 2), (8, 1)])
def test_mean_divides_by_what_the_window_holds(steps, given):
    window = Window(steps, None)
    scales = [run_micro_batch(window) for _ in range(given)]
    assert sum(scales) * window.target(partial=True) == pytest.approx(1.0, rel=1e-15)
    assert len(set(scales)) == 1


def test_target_is_unknown_while_a_weight_is_missing_or_all_are_zero():
    window = Window(2, "normalized")
    run_micro_batch(window, 0.0)
    window.open(None)
    assert window.target(ending=True) is None
    window.micro.weight = 4.0
    assert window.target(ending=True) == 0.25
    empty = Window(1, "normalized")
    run_micro_batch(empty, 0.0)
    assert empty.target() is None


def test_weight_rules():
    weighted = Window(2, "weighted")
    micro = weighted.open(None)
    with pytest.raises(RuntimeError, match="needs a weight before the backward"):
        _ = weighted.base_scale
    micro.ran = True
    with pytest.raises(RuntimeError, match=r"weight=3\.0 came after the backward"):
        micro.weight = 3
    normalized = Window(2, "normalized")
    micro = normalized.open(None)
    micro.ran = True
    normalized.in_context = False
    with pytest.raises(RuntimeError, match="needs a weight for each micro-batch"):
        normalized.end_micro_batch()
    assert normalized.micro_step == 0
    with pytest.raises(ValueError, match="weight=0 came after the backward"):
        micro.weight = 0
    micro.weight = 5
    normalized.end_micro_batch()
    assert (normalized.micro_step, normalized.weight_total) == (1, 5.0)


def test_weights_that_are_tensors():
    assert check_weight(torch.tensor(3)) == 3.0
    kept = check_weight(torch.ones((), dtype=torch.int64, device="meta"))
    assert isinstance(kept, torch.Tensor)
    assert (kept.device.type, kept.dtype) == ("meta", torch.float32)


def test_schedule_is_asked_once_per_window():
    asked, sizes = [], []
    window = Window(lambda updates: asked.append(updates) or updates + 1, "sum")
    for _ in range(3):
        count = 0
        while not count or window.micro_step < window.steps:
            run_micro_batch(window)
            count += 1
        sizes.append(count)
        window.end_update()
    assert (sizes, asked) == ([1, 2, 3], [0, 1, 2])


def test_contexts_do_not_nest():
    window = Window(2, None)
    window.open(None)
    with pytest.raises(RuntimeError, match="do not nest"):
        window.open(None)


def test_state_round_trip_in_mid_window():
    window = Window(lambda updates: 3, "normalized")
    run_micro_batch(window, 2.5)
    window.open(None).ran = True
    copy = Window(lambda updates: 3, "normalized")
    copy.restore(window.state())
    assert copy.state() == window.state()
    assert copy.micro.ran
    assert not copy.in_context
