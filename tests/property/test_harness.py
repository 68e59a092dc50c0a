"""The property test tested: mistakes in the wrapper are found out, and stock never differs from itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from fusedacc import AccumulatingOptimizer as Wrapper
from fusedacc.accumulators.p_grad import ParamGrads
from fusedacc.accumulators.partial_norms import PartialNorms
from fusedacc.optimizer import update
from fusedacc.optimizer.master_weights import MasterWeights
from fusedacc.optimizer.parameters import ParameterSet
from fusedacc.optimizer.window import Window

from .events import random_case
from .lockstep import failure
from .oracle import Mismatch
from .test_property import wrapping

#: A method or property, and what takes its place: a function that is handed the original first.
Mistake = tuple[type, str, Callable[..., Any] | property]


def given(**options: Any) -> Mistake:
    """The wrapper is made with other options than were asked for."""
    return Wrapper, "__init__", lambda original, *rest, **asked: original(*rest, **asked | options)


def then(kind: type, name: str, follow: Callable[[Any], Any]) -> Mistake:
    """After a method, something else is done."""

    def both(original: Callable[..., Any], self: Any, *rest: Any, **options: Any) -> Any:
        result = original(self, *rest, **options)
        follow(self)
        return result

    return kind, name, both


def always(value: Any) -> property:
    return property(lambda self: value)


#: Each with the seed of a case that shows it; if cases change, the test searches for another.
MISTAKES: dict[str, tuple[int, Mistake]] = {
    "a part-filled window is divided by the full size": (
        6,
        (Window, "target", lambda original, window, ending=False, partial=False: original(window, ending)),
    ),
    "zero_grad() drops the window": (2, (Wrapper, "zero_grad", lambda _, opt, *__, **___: opt.discard())),
    "a step without a backward counts": (
        6,
        (Window, "close_micro_batch", lambda _, window: (window.end_micro_batch(), window.full)[1]),
    ),
    "an ignored backward counts": (5, (Wrapper, "ignore", lambda _, opt: nullcontext())),
    "discard() does nothing": (51, (Wrapper, "discard", lambda _, opt: None)),
    "all weights are 1": (
        13,
        (Wrapper, "accumulate", lambda original, opt, weight=None: original(opt, weight=weight and 1.0)),
    ),
    "gradients of weight 0 are added": (38, (Window, "has_zero_weight", always(False))),
    "a checkpoint loses the window": (
        22,
        (Wrapper, "state_dict", lambda original, opt: original(opt, include_partial=False)),
    ),
    "a copy loses the window": (17, then(Wrapper, "__setstate__", Wrapper.discard)),
    "a checkpoint loses the masters": (151, then(Wrapper, "load_state_dict", Wrapper.refresh_master_weights)),
    "masters are rounded": (1, then(Wrapper, "step", Wrapper.refresh_master_weights)),
    "there are no masters": (1, given(master_weights=False)),
    "masters do not follow their parameters": (
        5,
        (
            MasterWeights,
            "of",
            lambda of, it, slot: it._masters[slot] if slot in it._masters else of(it, slot),
        ),
    ),
    "sums are in low precision": (2, given(accumulate_dtype=torch.bfloat16)),
    "nothing is clipped": (2, given(max_grad_norm=None)),
    "another norm is clipped": (2, given(norm_type=float("inf"))),
    "what is not finite is applied": (3, given(skip_nonfinite=False)),
    "dropped updates are not counted": (3, (Wrapper, "num_skipped", always(0))),
    "the loss scale stays": (
        5,
        then(update.Scaling, "__init__", lambda it: setattr(it, "multiplier", None)),
    ),
    "private gradients are shown": (6, given(private_gradients=False)),
    "groups changed by hand go unseen": (1, (ParameterSet, "in_step", always(True))),
    "what was consumed counts again": (
        7,
        then(ParamGrads, "end_update", lambda it: setattr(it, "consumed", False)),
    ),
    "what replaces p.grad is dropped": (76, (ParamGrads, "mark_user_gradients", lambda _, grads: None)),
    "norms are of before p.grad was changed": (58, (PartialNorms, "clear", lambda _, norms: None)),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_out(name, monkeypatch):
    hint, (kind, method, broken) = MISTAKES[name]
    original = getattr(kind, method)
    if not isinstance(broken, property):
        monkeypatch.setattr(kind, method, lambda *rest, **options: broken(original, *rest, **options))
    else:
        monkeypatch.setattr(kind, method, broken)
    found = (failure(random_case(seed), wrapping(seed)) for seed in (hint, *range(400)))
    assert any(isinstance(error, Mismatch) for error in found)
