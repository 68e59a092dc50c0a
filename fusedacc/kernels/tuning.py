"""Choices by trial: all candidates are correct; which one is the fastest depends on the machine.

When a choice first comes up, its candidates run in turns for some milliseconds (`tuning_trial`). The process
then uses the fastest, or the default if no other is clearly faster. A file keeps decisions for later
processes (`tuning_cache`). `FUSEDACC_TUNE=0` and `torch.use_deterministic_algorithms(True)` disable trials
and ignore decisions.

A trial on a busy machine may be inconclusive. The process then uses the default, and a later process or a new
wrapper repeats the trial. Pauses between tries double from a minute to a day: at most 11 tries on the first
day, and one on each later day. A conclusive decision replaces an inconclusive one, never the reverse.

Candidates may differ in the last bits of their results. A wrapper keeps the decisions that it has used, and
its checkpoints store them, so a run that resumes on the same processor continues with the same bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import threading
import time
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from . import tuning_cache
from .choices import Choice, Decision, better, switch, times_of
from .tuning_cache import machine, processor
from .tuning_trial import decide, time_candidates

__all__ = ["Choice", "Decision", "choose", "machine", "processor"]

#: "0": no trials, use the defaults; "1", "" or not set: trials.
TUNE_ENV = "FUSEDACC_TUNE"

_lock = threading.RLock()
#: This process's decisions, by machine and name.
_found: dict[tuple[str, str], Decision] = {}
_this_thread = threading.local()


def trials_disabled_by() -> str | None:
    """Return what disables trials; None if they are enabled. Raises ValueError for a wrong FUSEDACC_TUNE."""
    off = "no trials: use the defaults for this CPU"
    if switch(TUNE_ENV, on="trials", off=off, unset="trials") is False:
        return f"{TUNE_ENV}=0"
    return "torch.use_deterministic_algorithms" if torch.are_deterministic_algorithms_enabled() else None


def choose(choice: Choice, kept: MutableMapping[str, str] | None = None) -> Decision:
    """Decide, by a trial if necessary.

    kept: candidates to keep, by choice; this decision is added. With `kept`, an inconclusive trial may be
    repeated if the choice is not in it yet. Without, this process's first decision holds.
    """
    disabled, wanted = trials_disabled_by(), None if kept is None else kept.get(choice.name)
    if disabled is not None:
        decision = Decision(choice.default, f"the default for this CPU, because {disabled} disables trials")
    else:
        here = machine()
        known = _found.get((here, choice.name))
        if wanted in choice.candidates:
            if known is None or known.candidate != wanted:
                return Decision(wanted, "kept from the wrapper's first use or its checkpoint")
            return known
        if not may_try():
            return known or Decision(choice.default, "the default for this CPU: no trial can run here")
        if known is None or (kept is not None and known.is_due()):
            known = _decide(here, choice)
        decision = known
    if kept is not None:
        kept[choice.name] = decision.candidate
    return decision


def _decide(here: str, choice: Choice) -> Decision:
    """Return this process's decision or a cached one. Run a trial if there is none, or one is due."""
    with _lock:
        known = better(_found.get((here, choice.name)), tuning_cache.load(here, choice))
        if known is None or known.is_due():
            assert choice.trial is not None
            with undisturbed():
                fresh = decide(choice.default, time_candidates(choice.trial(), choice.default))
            tries = known.tries + 1 if known else 1
            fresh = dataclasses.replace(fresh, tries=tries, tried_at=time.time())
            known = tuning_cache.save(here, choice, fresh)
        _found[here, choice.name] = known
    return known


def report() -> list[dict[str, Any]]:
    """Return this process's decisions on the machine as it is now, as plain values."""
    here = machine()
    return [
        {"question": name, **decision.as_entry()}
        for (where, name), decision in sorted(_found.items(), key=lambda item: item[0])
        if where == here
    ]


def describe(found: Mapping[str, Any]) -> str:
    """Return an entry of `report` as a line."""
    kind = "conclusive" if found["conclusive"] else "inconclusive"
    tries = f"{found['tries']} {'try' if found['tries'] == 1 else 'tries'}"
    facts = (times_of(found["microseconds"]), f"default {found['default']}", f"{kind} after {tries}")
    return f"{found['question']}: {found['way']}: {found['why']} ({'; '.join(filter(None, facts))})"


def forget() -> None:
    """Drop this process's decisions; the file stays."""
    with _lock:
        _found.clear()


def may_try() -> bool:
    """Return whether a trial may run here: not inside another one, a jit trace or a functorch transform."""
    return not (
        getattr(_this_thread, "trying", False)
        or torch._C._is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


@contextlib.contextmanager
def garbage_uncollected() -> Iterator[None]:
    """Context: disable the garbage collector."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Context: isolate a trial from modes, autocast, autograd and garbage collection."""
    _this_thread.trying = True
    try:
        with (
            garbage_uncollected(),
            _disable_current_modes(),
            torch._C.DisableTorchFunction(),
            torch.autocast("cpu", enabled=False),
            torch.inference_mode(False),
            torch.no_grad(),
        ):
            yield
    finally:
        _this_thread.trying = False
