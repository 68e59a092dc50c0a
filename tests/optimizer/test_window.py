"""The window alone: a state machine of numbers, without tensors."""

from __future__ import annotations

import math
from fractions import Fraction

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


@pytest.mark.parametrize(("steps", "given"), [(1, 1), (2, 2), (3, 3), (7, 7), (3, 2), (8, 1)])
def test_mean_divides_by_what_the_window_holds(steps, given):
    window = Window(steps, None)
    scales = [run_micro_batch(window) for _ in range(given)]
    total = sum(scales) * window.target(partial=True)
    assert math.isclose(total, 1.0, rel_tol=1e-15)
    assert len(set(scales)) == 1


def test_three_workers_three_samples_two_steps_divide_by_18():
    """The worked example of data-parallel accumulation: a sum over samples, two steps, three workers."""
    for steps, divisor in ((2, 18), (1, 6)):
        samples = 3 if steps == 2 else 2
        window = Window(steps, None)
        per_micro_batch = Fraction(1, samples)
        workers = Fraction(1, 3)
        scale = Fraction(run_micro_batch(window)).limit_denominator(10)
        assert scale * per_micro_batch * workers == Fraction(1, divisor)


@pytest.mark.parametrize("reduction", ["weighted", "normalized"])
def test_weights_divide_by_their_sum(reduction):
    window = Window(3, reduction)
    weights = [3.0, 0.5, 40.0]
    scales = [run_micro_batch(window, weight) for weight in weights]
    target = window.target()
    assert target == 1.0 / sum(weights)
    assert scales == (weights if reduction == "weighted" else [1.0, 1.0, 1.0])


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
    micro.weight = 2
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
    with pytest.raises(ValueError, match=r"weight=1\.0 was given, but reduction='mean' takes none"):
        Window(2, "mean").open(1.0)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf")])
def test_bad_weight_values(weight):
    with pytest.raises(ValueError, match="weight must be finite and at least 0"):
        check_weight(weight)


def test_weights_of_other_kinds():
    assert check_weight(torch.tensor(3)) == 3.0
    with pytest.raises(TypeError, match="weight must be a real number"):
        check_weight("3")
    with pytest.raises(TypeError, match="0-dim tensor"):
        check_weight(torch.ones(1, device="meta"))
    kept = check_weight(torch.ones((), dtype=torch.int64, device="meta"))
    assert isinstance(kept, torch.Tensor)
    assert (kept.device.type, kept.dtype) == ("meta", torch.float32)


def test_schedule_is_asked_once_per_window():
    asked = []

    def schedule(updates: int) -> int:
        asked.append(updates)
        return updates + 1

    window = Window(schedule, "sum")
    sizes = []
    for _ in range(3):
        count = 0
        while not count or window.micro_step < window.steps:
            run_micro_batch(window)
            count += 1
        sizes.append(count)
        window.end_update()
    assert sizes == [1, 2, 3]
    assert asked == [0, 1, 2]


@pytest.mark.parametrize(
    ("steps", "error", "words"),
    [
        (0, ValueError, "at least 1"),
        (-2, ValueError, "at least 1"),
        (2.0, TypeError, "2.0"),
        (True, TypeError, "True"),
    ],
)
def test_bad_steps(steps, error, words):
    with pytest.raises(error, match=words):
        Window(steps, None)
    scheduled = Window(lambda updates: steps, None)
    with pytest.raises(error, match=words):
        _ = scheduled.steps


def test_bad_reduction_and_nesting():
    with pytest.raises(ValueError, match="'mean', 'sum', 'weighted', 'normalized' or None, got 'average'"):
        Window(2, "average")
    window = Window(2, None)
    window.open(None)
    with pytest.raises(RuntimeError, match="do not nest"):
        window.open(None)


def test_manual_loops_that_count_need_the_context():
    for reduction in ("mean", "weighted", "normalized"):
        with pytest.raises(RuntimeError, match=r"needs `with optimizer.accumulate\(\):`"):
            _ = Window(None, reduction).base_scale
    assert Window(None, None).base_scale == 1.0


def test_taint_is_told_until_the_window_is_reset():
    window = Window(2, None)
    window.tainted = "an exception has interrupted a backward"
    with pytest.raises(RuntimeError, match=r"interrupted a backward.*discard\(\)"):
        window.check_untainted()
    window.reset()
    window.check_untainted()
    assert window.tainted is None


def test_state_round_trip_in_mid_window():
    window = Window(lambda updates: 3, "normalized")
    run_micro_batch(window, 2.5)
    window.open(None).ran = True
    copy = Window(lambda updates: 3, "normalized")
    copy.restore(window.state())
    assert copy.state() == window.state()
    assert copy.micro.ran
    assert not copy.in_context
