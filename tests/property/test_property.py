"""The wrapper equals plain PyTorch under random events.

The number of cases: FUSEDACC_PROPERTY_CASES (100; 4,000 with FUSEDACC_FULL_TESTS=1). One case alone:
FUSEDACC_SEED=17. A failure prints its seed and the fewest events that still fail.
"""

import os

import pytest
import torch

import fusedacc
from fusedacc.accumulators.p_grad import SumsForUpdate
from fusedacc.kernels import native_module
from fusedacc.optimizer.update import Update

from .events import random_case
from .lockstep import failure, report
from .oracle import Loop
from .world import Case, Make

FULL = os.environ.get("FUSEDACC_FULL_TESTS", "") not in ("", "0")
COUNT = int(os.environ.get("FUSEDACC_PROPERTY_CASES") or (4000 if FULL else 100))
ONE = os.environ.get("FUSEDACC_SEED")
BUILT = native_module.loaded() is not None
SEEDS = range(COUNT) if ONE is None else [int(ONE)]


class Schedule:
    """A callable of the update index that can be pickled."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes

    def __call__(self, num_updates: int) -> int:
        return self.sizes[num_updates % len(self.sizes)]


def wrapping(seed: int) -> Make:
    """Wrap with the default backend, and in every fifth case with the eager one."""
    backend = "eager" if seed % 5 == 4 else "auto"

    def wrapped(inner: torch.optim.Optimizer, loop: Loop) -> fusedacc.AccumulatingOptimizer:
        steps = Schedule(loop.steps) if isinstance(loop.steps, tuple) else loop.steps
        return fusedacc.AccumulatingOptimizer(
            inner,
            steps,
            reduction=loop.reduction,
            accumulate_dtype=loop.accumulate_dtype,
            rounding=loop.rounding,
            seed=seed if loop.rounding == "stochastic" else None,
            max_grad_norm=loop.clip,
            norm_type=loop.norm_type,
            skip_nonfinite=loop.skips,
            master_weights=loop.masters,
            backend=backend,
        )

    return wrapped


def shrink_buckets(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In half of the cases gradients that wait are added often."""
    if seed % 2 == 1:
        monkeypatch.setattr("fusedacc.accumulators.engine.LAUNCH_BYTES", 100)


def choose_engine(case: Case, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use no engine in every fourth case, and the native engine, if it is built, in the others.

    Without it, gradients of several threads may stay in p.grad until `step()`.
    """
    has_threads = any(event.get("variant") == "thread" for event in case.events)
    without = seed % 4 == 3 and not has_threads
    monkeypatch.setenv(native_module.VARIABLE, "0" if without else "1" if BUILT else "")


def check_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare every norm that clipping uses with the norm of the sums in float64."""
    taken = Update._norm

    def checked(update: Update, sums: SumsForUpdate, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        norm, nonfinite = taken(update, sums, dtype)
        dense = [total.to_dense() if total.is_sparse else total for total in sums.tensors]
        flat = torch.cat([total.to(torch.complex128).flatten() for total in dense])
        wanted = torch.linalg.vector_norm(flat, update.settings.norm_type).double()
        repeated = [total.dtype for total in sums.tensors if total.is_sparse]  # rows that are added at last
        rounding = max([1e-5, *(torch.finfo(dtype).eps for dtype in repeated)])
        torch.testing.assert_close(norm.double(), wanted, rtol=rounding, atol=1e-12, equal_nan=True)
        assert bool(nonfinite) == any(not bool(total.isfinite().all()) for total in dense)
        return norm, nonfinite

    monkeypatch.setattr(Update, "_norm", checked)


@pytest.mark.parametrize("seed", SEEDS)
def test_wrapped_training_equals_stock(seed, monkeypatch):
    shrink_buckets(seed, monkeypatch)
    case, make = random_case(seed), wrapping(seed)
    choose_engine(case, seed, monkeypatch)
    check_norms(monkeypatch)
    failed = failure(case, make) is not None
    assert not failed, report(case, make)
