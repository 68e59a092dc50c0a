"""Choices by trial: all candidates are correct; which one is the fastest depends on the machine.

Trials decide how the CPU loops work: products (`matmul`), grouped products and rounding (`grouped`), the
grain size and prefetching (`loop_settings`), and which small layers are replaced (`optimizer.parameters`).

When a choice first comes up, its candidates run in turns for some milliseconds (`tuning_trial`). The process
then uses the fastest, or the default if no other is clearly faster. `FUSEDACC_TUNE=0` and
`torch.use_deterministic_algorithms(True)` disable trials and ignore decisions.

A file keeps decisions for later processes, by processor, threads and versions. It is in the folder
`FUSEDACC_CACHE` (default: `fusedacc` in `XDG_CACHE_HOME` or `~/.cache`). If several processes decide at once,
all use the first decision that is written.

A trial on a busy machine may be inconclusive. The process then uses the default, and a later process or a new
wrapper repeats the trial. Pauses between tries double from a minute to a day: at most 11 tries on the first
day, and one on each later day. A conclusive decision replaces an inconclusive one, never the reverse.

Candidates may differ in the last bits of their results. A wrapper keeps the decisions that it has used, and
its checkpoints store them, so a run that resumes on the same processor continues with the same bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import gc
import importlib.metadata
import json
import os
import platform
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from . import library
from .checks import switch
from .tuning_trial import Decision, decide, time_candidates, times_of

#: "0": no trials, use the defaults; "1", "" or not set: trials.
TUNE_ENV = "FUSEDACC_TUNE"
#: Environment variable that names the folder of the file with decisions.
CACHE_DIR_ENV = "FUSEDACC_CACHE"
CACHE_FILE = "choices.json"
#: Variables of other libraries: their instructions, and how threads wait for work.
_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "OMP_WAIT_POLICY")

_lock = threading.RLock()
#: This process's decisions, by machine and name.
_found: dict[tuple[str, str], Decision] = {}
_unsaved = ""
_this_thread = threading.local()


@dataclass(frozen=True)
class Choice:
    """A choice among several candidates for some work on this machine.

    Attributes:
        name: the name in checkpoints; it must keep its meaning across releases.
        candidates: their names.
        default: the candidate for this CPU if there is no trial.
        trial: creates operands on the CPU; returns the callables to time, by candidate.
    """

    name: str
    candidates: tuple[str, ...]
    default: str
    trial: Callable[[], Mapping[str, Callable[[], object]]] = field(compare=False)


def _decision_of(found: Mapping[str, Any], here: str, choice: Choice) -> Decision | None:
    """Return the file's decision for a machine; None if it has none for these candidates."""
    entry = found.get(here, {}).get(choice.name)
    if not isinstance(entry, dict) or entry.get("way") not in choice.candidates:
        return None
    figures, reason = entry.get("microseconds"), str(entry.get("why"))
    if isinstance(figures, dict) and figures and not figures.keys() >= set(choice.candidates):
        return None  # of a release that had fewer candidates
    conclusive, tries, tried_at = (entry.get(name) for name in ("conclusive", "tries", "tried_at"))
    return Decision(
        entry["way"],
        reason,
        figures if isinstance(figures, dict) else {},
        choice.default,
        # Older releases recorded this in the reason only.
        conclusive if isinstance(conclusive, bool) else "disturbed the trial" not in reason,
        tries if isinstance(tries, int) and tries > 0 else 1,
        tried_at if isinstance(tried_at, int | float) else 0.0,
    )


def better(first: Decision | None, second: Decision | None) -> Decision | None:
    """Return the decision that counts: a conclusive one, else that of the later try, else the first."""
    if first is None or second is None:
        return first or second
    later = second.conclusive or second.tries > first.tries
    return second if later and not first.conclusive else first


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
        known = better(_found.get((here, choice.name)), _decision_of(read(CACHE_FILE), here, choice))
        if known is None or known.is_due():
            with undisturbed():
                fresh = decide(choice.default, time_candidates(choice.trial(), choice.default))
            tries = known.tries + 1 if known else 1
            fresh = dataclasses.replace(fresh, tries=tries, tried_at=time.time())
            known = save(here, choice, fresh)
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


def machine() -> str:
    """Return what a decision depends on: processor, instruction sets, threads and versions."""
    onednn = torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()
    set_by = [f"{name}={os.environ[name]}" for name in _VARIABLES if os.environ.get(name)]
    return _machine(torch.get_num_threads(), bool(onednn), *set_by)


@functools.cache
def _machine(threads: int, onednn: bool, *set_by: str) -> str:
    own = library.built_with()["cpu_capability"] if library.load_error() is None else "no library"
    parts = (
        processor(),
        f"fusedacc {version('fusedacc') or 'from its sources'}",
        f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}",
        f"kernels {own}",
        "oneDNN" if onednn else "no oneDNN",
        f"{threads} thread{'s' if threads > 1 else ''}",
        *set_by,
    )
    return "; ".join(parts)


@functools.cache
def processor() -> str:
    """Return its model, and a hash of its features, which virtual machines hide from the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = facts.get("model name") or platform.processor() or platform.machine()
    details = [facts.get(key, "") for key in ("cpu family", "model", "stepping", "flags", "Features")]
    return f"{name} ({zlib.crc32(' '.join(details).encode()):08x})"


def folder() -> Path:
    own = os.environ.get(CACHE_DIR_ENV)
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fusedacc"


def kept_where() -> str:
    """Return where decisions are kept, and why they are not, if so."""
    return f"{folder() / CACHE_FILE}{f' (not written: {_unsaved})' if _unsaved else ''}"


def is_saved() -> bool:
    """Return whether every decision of this process could be written."""
    return not _unsaved


@contextlib.contextmanager
def locked(file: str) -> Iterator[None]:
    """Context: hold the file's lock against other processes of this host, if it can be locked."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, RuntimeError):  # read-only, or no home: no lock
            folder().mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(folder() / f"{file}.lock", "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def read(file: str) -> dict[str, dict[str, Any]]:
    """Return the file's entries by machine; empty if it does not exist or cannot be read."""
    try:
        found = json.loads((folder() / file).read_text())
    except (OSError, ValueError, RuntimeError):  # RuntimeError: no home
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: entries for name, entries in found.items() if isinstance(entries, dict)}


def write(file: str, entries: Mapping[str, Any]) -> None:
    """Replace the file as a whole: readers see the old or the new one."""
    with tempfile.TemporaryDirectory(dir=folder()) as new:
        (Path(new) / file).write_text(json.dumps(entries, indent=1))
        os.replace(Path(new) / file, folder() / file)


def save(here: str, choice: Choice, decision: Decision) -> Decision:
    """Write a decision to the file. Return the one that counts, which may be another process's."""
    global _unsaved
    try:
        with locked(CACHE_FILE):
            found = read(CACHE_FILE)
            known = _decision_of(found, here, choice)
            if known is not None and better(known, decision) is known:
                return known
            entry = decision.as_entry()
            del entry["default"]
            found.setdefault(here, {})[choice.name] = entry
            write(CACHE_FILE, found)
    except (OSError, RuntimeError) as problem:  # read-only, full, no home: keep it for this process
        _unsaved = f"{type(problem).__name__}: {problem}"
    return decision


def version(package: str) -> str | None:
    """Return an installed package's version; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
