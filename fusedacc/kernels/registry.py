"""Select backends. A selection is made once per (device, dtypes) and cached.

An explicit choice is followed, or refused with the reason. `auto` selects the first backend in the device's
order that can run there; `FUSEDACC_BACKEND` overrides `auto`. The first selection of a backend on a GPU
checks its results (`selftest`).
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from . import selftest
from .dtypes import Tensors, pair_name

#: The modules of the backends, the preferred first.
_MODULES = {"cuda": "native", "triton": "triton.backend", "cpu": "native", "eager": "reference"}
NAMES = tuple(_MODULES)
#: The environment variable that replaces `backend="auto"`.
VARIABLE = "FUSEDACC_BACKEND"
#: The backends of the native library. Its operators check every tensor before anything is modified.
NATIVE = frozenset({"cuda", "cpu"})

#: `Backend.accumulate_`, for accumulators that `Backend.prepare` was given.
Run = Callable[..., None]


@dataclass(eq=False)
class Backend:
    """A backend of accumulation passes: its name, its limits, and its operators."""

    name: str
    #: Returns why it cannot run here, or cannot take tensors of (device, accumulator's dtype, gradient's
    #: dtype); None if it can.
    obstacle: Callable[[torch.device, torch.dtype, torch.dtype], str | None]
    #: (accumulators, gradients, scale, overwrite, beta=1.0, noise=None): one pass over
    #: tensors of one device, with any dtype pairs; bumps no version counters. accumulator <- round(beta *
    #: accumulator) + scale * gradient, or scale * gradient where it is overwritten, rounded once more.
    #: `scale` and `beta` are floats or 0-dim tensors. With `noise`, every accumulator is bfloat16 and the
    #: last rounding is stochastic (see `rounding`).
    accumulate_: Run
    #: Prepares accumulators for many passes.
    prepare: Callable[[Tensors], Run]
    #: (tensors of one device, norm_type) -> partial norms: a float64 vector on that device, from one read. A
    #: partial norm is finite unless an element is not. Parts depend on the tensors' sizes only, so equal
    #: tensors give equal bits.
    norm_partials: Callable[[Tensors, float], Tensor]
    #: (partials, norm_type, float32 or float64) -> the norm in that dtype, and 1.0 in float32 if an element
    #: was not finite, else 0.0. Both are 0-dim, on the partials' device; any backend may have made the
    #: partials.
    finish_norm: Callable[[Tensors, float, torch.dtype], tuple[Tensor, Tensor]]
    #: As `lists.accumulate_rows_`: (table, indices [n], gradients [n, columns], scale, padding,
    #: by_frequency). Rows are dense; padding is -1 for none. Bumps no version counter. None if the backend
    #: has no kernel for rows.
    accumulate_rows_: Callable[..., None] | None = None


@dataclass(frozen=True)
class Selection:
    """A backend, and why it was chosen."""

    backend: Backend
    reason: str


@functools.cache
def get(name: str) -> Backend:
    """Return the backend of that name. Its module is imported on the first call."""
    module = importlib.import_module(f".{_MODULES[name]}", __package__)
    return getattr(module, name)


def order(device: torch.device) -> tuple[str, ...]:
    """Return the backends that `auto` tries on a device. Triton's interpreter on a CPU must be requested."""
    return tuple(name for name in NAMES if name != "triton" or device.type != "cpu")


def obstacle(
    name: str, device: torch.device, accumulator_dtype: torch.dtype, gradient_dtype: torch.dtype
) -> str | None:
    """Return why the backend cannot run such a pair of tensors on this machine; None if it can."""
    why_not = get(name).obstacle(device, accumulator_dtype, gradient_dtype)
    return why_not or _failed_selftest(name, device)


def _failed_selftest(who: str, device: torch.device) -> str | None:
    """Return why a backend, or one of its kernels, is not trusted on a device, or None."""
    why = selftest.failure(who, device)
    return None if why is None else f"its self-test has failed: {why} ({selftest.HOW_TO_REPORT})"


def requested(backend: str) -> tuple[str, str]:
    """Return the requested backend, and what requested it: the argument or the environment variable. Raises
    ValueError unless the name is "auto" or one of `NAMES`.
    """
    source = "backend"
    if backend == "auto":
        backend = os.environ.get(VARIABLE) or "auto"
        source = VARIABLE
    if backend != "auto" and backend not in NAMES:
        allowed = ", ".join(map(repr, ("auto", *NAMES)))
        raise ValueError(f"{source}={backend!r} is no backend; allowed: {allowed}")
    return backend, source


def _select(
    name: str, source: str, task: str, names: Sequence[str], problem_of: Callable[[str], str | None]
) -> tuple[str, str]:
    """Return the requested backend, or for "auto" the first of `names` that can run, and why. Raises
    RuntimeError if there is none.

    name, source: as `requested` returns them. task: in words that follow "cannot". problem_of: returns why a
    backend cannot do it; None if it can.
    """
    if name != "auto":
        problem = problem_of(name)
        if problem is None:
            return name, f"chosen by {source}={name!r}"
        able = ("auto", *(other for other in names if problem_of(other) is None))
        allowed = ", ".join(map(repr, able))
        raise RuntimeError(f"{source}={name!r} cannot {task}: {problem}. Allowed here: {allowed}")
    passed: list[str] = []
    for candidate in names:
        problem = problem_of(candidate)
        if problem is None:
            first = f"first of {', '.join(names)} that can run here"
            return candidate, "; ".join([first, *passed])
        passed.append(f"not {candidate}: {problem}")
    raise RuntimeError(f"no backend can {task}: {'; '.join(passed)}")


class Work(NamedTuple):
    """Work besides additions of lists, for which only some backends have a kernel.

    Attributes:
        kind: in words. Each kind has its own self-test.
        backends: the backends that have a kernel for it, the preferred first.
        device: where the tensors are.
        accumulator: the dtype of the sums, or of the arithmetic if there are none.
        operand: the dtype of what is read.
    """

    kind: str
    backends: tuple[str, ...]
    device: torch.device
    accumulator: torch.dtype
    operand: torch.dtype

    def component(self, backend: str) -> str:
        """Return the name under which a backend's kernel fails a self-test."""
        return f"{backend}, {self.kind}"


@selftest.remembered
def select_for_work(name: str, source: str, work: Work) -> tuple[str, str]:
    """Return the backend for work, and why.

    If the backend that was requested has no kernel for it, Triton's runs in place of CUDA's, and "eager"
    otherwise.

    name, source: as `requested` returns them.
    """

    def problem(candidate: str) -> str | None:
        # Without Triton, torch's product runs.
        if candidate == "triton" and candidate not in work.backends:
            return None
        why_not = obstacle(candidate, work.device, work.accumulator, work.operand)
        return why_not or _failed_selftest(work.component(candidate), work.device)

    candidates = tuple(
        candidate for candidate in work.backends if name != "auto" or candidate in order(work.device)
    )
    what = "a product" if work.kind == "products" else work.kind
    task = f"add {what} of {pair_name(work.operand, work.accumulator)} on {work.device}"
    chosen, reason = _select(name, source, task, candidates, problem)
    if chosen in work.backends:
        return chosen, reason
    reason = f"{reason}, which has no kernel for {work.kind}"
    if chosen != "cuda" or "triton" not in work.backends:
        return "eager", reason
    why_not = problem("triton")
    if why_not is not None:
        return "eager", f"{reason}; not triton: {why_not}"
    return "triton", reason


#: (backend, device, operand's dtype, accumulator's dtype) -> what is wrong with its results, or None.
CheckOfWork = Callable[[str, torch.device, torch.dtype, torch.dtype], str | None]


def select_checked(check: CheckOfWork, backend: str, work: Work) -> tuple[str, str]:
    """As `select_for_work`, for a backend whose self-test of this kind has passed or is deferred.

    backend: the user's argument.
    """
    name, source = requested(backend)
    return selftest.now_or_deferred(_select_checked, _select_unchecked, check, name, source, work)


@selftest.remembered
def _select_checked(check: CheckOfWork, name: str, source: str, work: Work) -> tuple[str, str]:
    device = work.device
    what = pair_name(work.operand, work.accumulator)
    while True:  # a backend that fails is an obstacle in the next round
        chosen, reason = select_for_work(name, source, work)
        if chosen == "eager":
            break
        check_chosen = functools.partial(check, chosen, device, work.operand, work.accumulator)
        if selftest.problem_of(work.component(chosen), what, device, check_chosen) is None:
            break
    if name == "auto":
        for passed in work.backends[: work.backends.index(chosen)]:
            selftest.warn_once(work.component(passed), device, f"Backend {chosen!r}")
    return chosen, reason


def _select_unchecked(check: CheckOfWork, name: str, source: str, work: Work) -> tuple[str, str]:
    """As `_select_checked`, without the check."""
    return select_for_work(name, source, work)


@selftest.remembered
def _untested(
    name: str, source: str, device: torch.device, accumulator: torch.dtype, gradient: torch.dtype
) -> Selection:
    def problem(candidate: str) -> str | None:
        return obstacle(candidate, device, accumulator, gradient)

    task = f"run {pair_name(gradient, accumulator)} on {device}"
    candidates = order(device) if name == "auto" else NAMES
    chosen, reason = _select(name, source, task, candidates, problem)
    return Selection(get(chosen), reason)


@selftest.remembered
def _selection(
    name: str, source: str, device: torch.device, accumulator: torch.dtype, gradient: torch.dtype
) -> Selection:
    """As `_untested`, for a backend whose self-test has passed."""
    while True:  # a backend that fails is an obstacle in the next round
        selection = _untested(name, source, device, accumulator, gradient)
        if self_test(selection.backend, device, accumulator, gradient) is None:
            break
    if name == "auto":
        candidates = order(device)
        for passed in candidates[: candidates.index(selection.backend.name)]:
            selftest.warn_once(passed, device, f"Backend {selection.backend.name!r}")
    return selection


def self_test(
    backend: Backend, device: torch.device, accumulator: torch.dtype, gradient: torch.dtype
) -> str | None:
    """Return what is wrong with a backend's sums of a pair, by a new or an earlier check; None for eager.
    Raises as `selftest.problem_of`.
    """
    if backend.name == "eager" or device.type not in selftest.DEVICE_TYPES:
        return None
    check = functools.partial(selftest.checks().sums, backend, device, gradient, accumulator)
    return selftest.problem_of(backend.name, pair_name(gradient, accumulator), device, check)


def select(
    device: torch.device, accumulator_dtype: torch.dtype, gradient_dtype: torch.dtype, backend: str = "auto"
) -> Selection:
    """Select the backend for one pair of `dtypes.PAIRS` on one device.

    Raises ValueError for a wrong name or variable, and RuntimeError if the requested backend cannot run there
    or its self-test has failed.
    """
    name, source = requested(backend)
    return selftest.now_or_deferred(
        _selection, _untested, name, source, device, accumulator_dtype, gradient_dtype
    )


def select_untested(
    device: torch.device, accumulator_dtype: torch.dtype, gradient_dtype: torch.dtype, backend: str = "auto"
) -> Backend:
    """Return the backend of `select`, without a self-test of this pair."""
    name, source = requested(backend)
    return _untested(name, source, device, accumulator_dtype, gradient_dtype).backend
