"""The wrapper against stock under random events.

The number of cases: FUSEDACC_PROPERTY_CASES (300; 4,000 with FUSEDACC_FULL_TESTS=1). One case alone:
FUSEDACC_SEED=17. A failure prints its seed and the fewest events that still fail.
"""

from __future__ import annotations

import os

import pytest
import torch

import fusedacc

from .events import random_case
from .lockstep import failure, report
from .oracle import Loop

FULL = os.environ.get("FUSEDACC_FULL_TESTS", "") not in ("", "0")
COUNT = int(os.environ.get("FUSEDACC_PROPERTY_CASES") or (4000 if FULL else 300))
ONE = os.environ.get("FUSEDACC_SEED")
SEEDS = range(COUNT) if ONE is None else [int(ONE)]


class Schedule:
    """A callable of the update index that can be pickled."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes

    def __call__(self, num_updates: int) -> int:
        return self.sizes[num_updates % len(self.sizes)]


def wrapped(inner: torch.optim.Optimizer, loop: Loop) -> fusedacc.AccumulatingOptimizer:
    steps = Schedule(loop.steps) if isinstance(loop.steps, tuple) else loop.steps
    return fusedacc.AccumulatingOptimizer(
        inner, steps, reduction=loop.reduction, accumulate_dtype=loop.accumulate_dtype
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_wrapped_training_equals_stock(seed):
    case = random_case(seed)
    if failure(case, wrapped) is not None:
        pytest.fail(report(case, wrapped), pytrace=False)
