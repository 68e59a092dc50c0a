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
from .world import Make

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


def wrapping(seed: int) -> Make:
    """Wraps with the default backend, and for every fifth case with the eager one."""
    backend = "eager" if seed % 5 == 4 else "auto"

    def wrapped(inner: torch.optim.Optimizer, loop: Loop) -> fusedacc.AccumulatingOptimizer:
        steps = Schedule(loop.steps) if isinstance(loop.steps, tuple) else loop.steps
        options = {"reduction": loop.reduction, "accumulate_dtype": loop.accumulate_dtype}
        return fusedacc.AccumulatingOptimizer(inner, steps, **options, backend=backend)

    return wrapped


def shrink_buckets(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of the cases fill many buckets in each backward, a third find every gradient large."""
    if seed % 3 == 1:
        monkeypatch.setattr("fusedacc.hooks.BUCKET_BYTES", 100)
    if seed % 3 == 2:
        monkeypatch.setattr("fusedacc.hooks.LARGE_BYTES", 64)
        monkeypatch.setattr("fusedacc.capture.LARGE_BYTES", 64)


@pytest.mark.parametrize("seed", SEEDS)
def test_wrapped_training_equals_stock(seed, monkeypatch):
    shrink_buckets(seed, monkeypatch)
    case, make = random_case(seed), wrapping(seed)
    failed = failure(case, make) is not None
    assert not failed, report(case, make)
