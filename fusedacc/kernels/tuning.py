"""Choices by trial: several ways are right, and which one is the fastest depends on the machine.

The first time that a question comes up, its ways run in turns for some milliseconds (`tuning_trial`). The
process then uses the fastest way, or the default where no other way is faster beyond doubt. Answers are kept
in `FUSEDACC_CACHE` (default: `fusedacc` in `XDG_CACHE_HOME` or `~/.cache`), by processor, instruction sets,
threads and versions, for later processes. If several processes ask at once, all use the first answer that is
written. `FUSEDACC_TUNE=0` and `torch.use_deterministic_algorithms(True)` forbid trials and ignore answers.

A trial on a busy machine may be inconclusive. The process then uses the default, and the trial is repeated by
a later process, or for a new wrapper. The first pause between two tries is a minute. Each pause is twice as
long as the one before, up to a day: there are 11 tries on the first day at most, and one on each later day.
A conclusive answer replaces an inconclusive one, never the reverse.

Ways may differ in the last bits of their results. A wrapper keeps the answers that it has used, and its
checkpoints carry them, so that a run that resumes on the same processor continues with the same bits.
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
from .environment import switch
from .tuning_trial import decide, time_ways

#: "0": no trials, the processor's features decide; "1", "" or not set: trials.
VARIABLE = "FUSEDACC_TUNE"
#: The folder in which answers are kept.
FOLDER = "FUSEDACC_CACHE"
FILE = "choices.json"
#: Seconds from an inconclusive trial to the next one: the first time, and at most. They double in between.
FIRST_PAUSE, LONGEST_PAUSE = 60.0, 86400.0


@dataclass(frozen=True)
class Question:
    """Which of several ways is the fastest here.

    name: the same in every process and release in which it means the same; it stands in checkpoints.
    ways: their names. default: the one that is taken without a trial.
    trial: makes the operands on the CPU; returns what is timed, by the names of the ways.
    """

    name: str
    ways: tuple[str, ...]
    default: str
    trial: Callable[[], Mapping[str, Callable[[], object]]] = field(compare=False)


@dataclass(frozen=True)
class Choice:
    """A way, and why it was chosen.

    Attributes:
        way, why: in words.
        microseconds: the medians of the trial, if there was one.
        default: the way without a trial.
        conclusive: whether the answer is final. If not, the trial is repeated later.
        tries: how many trials were made.
        tried_at: when the last one was made, in seconds since 1970.
    """

    way: str
    why: str
    microseconds: Mapping[str, float] = field(default_factory=dict)
    default: str = ""
    conclusive: bool = True
    tries: int = 0
    tried_at: float = 0.0

    def __str__(self) -> str:
        times = self._times()
        return f"{self.way}: {self.why}{f' ({times})' if times else ''}"

    def _times(self) -> str:
        return ", ".join(f"{way} {own:g} us" for way, own in self.microseconds.items())

    def in_full(self) -> str:
        """The same with the default, the number of tries, and whether the answer is final."""
        kind = "conclusive" if self.conclusive else "inconclusive"
        tries = f"{self.tries} {'try' if self.tries == 1 else 'tries'}"
        facts = filter(None, (self._times(), f"default {self.default}", f"{kind} after {tries}"))
        return f"{self.way}: {self.why} ({'; '.join(facts)})"

    def is_due(self) -> bool:
        """Whether the trial should be repeated now."""
        pause = min(FIRST_PAUSE * 2.0 ** min(self.tries - 1, 30), LONGEST_PAUSE)
        # A time in the future means that the clock was set back since.
        return not self.conclusive and not self.tried_at <= time.time() < self.tried_at + pause


_lock = threading.RLock()
_found: dict[tuple[str, str], Choice] = {}
_this_thread = threading.local()
_unsaved = ""


def fixed_by() -> str | None:
    """What forbids trials; None where they are allowed.

    Raises:
        ValueError: FUSEDACC_TUNE is neither "0" nor "1".
    """
    off = "no trials: the processor's features decide"
    if switch(VARIABLE, on="trials", off=off, unset="trials") is False:
        return f"{VARIABLE}=0"
    return "torch.use_deterministic_algorithms" if torch.are_deterministic_algorithms_enabled() else None


def choose(question: Question, kept: MutableMapping[str, str] | None = None) -> Choice:
    """The way to go, found by a trial if need be.

    Args:
        question: asked as often as one likes; the answer is looked up.
        kept: answers to stay with, by the names of questions; this one is added. If it is not there yet, an
            inconclusive trial may be repeated. Without `kept` this process's first answer holds.

    Raises:
        ValueError: as `fixed_by`.
    """
    reason, wanted = fixed_by(), None if kept is None else kept.get(question.name)
    if reason is not None:
        choice = Choice(question.default, f"by the processor's features, since {reason} forbids trials")
    else:
        here = machine()
        known = _found.get((here, question.name))
        if wanted in question.ways:
            if known is None or known.way != wanted:
                return Choice(wanted, "as it was when the wrapper began, or in its checkpoint")
            return known
        if not may_try():
            return known or Choice(
                question.default, "by the processor's features: this is no place for a trial"
            )
        if known is None or (kept is not None and known.is_due()):
            known = _answer(here, question)
        choice = known
    if kept is not None:
        kept[question.name] = choice.way
    return choice


def _answer(here: str, question: Question) -> Choice:
    """The answer of this process or an earlier one; of a trial if there is none, or its repetition is due."""
    with _lock:
        known = _best(_found.get((here, question.name)), _known(_read(), here, question))
        if known is None or known.is_due():
            with undisturbed():
                verdict = decide(question.default, time_ways(question.trial(), question.default))
            tries = known.tries + 1 if known else 1
            fresh = Choice(
                verdict.way,
                verdict.why,
                verdict.microseconds,
                question.default,
                verdict.conclusive,
                tries,
                time.time(),
            )
            known = _save(here, question, fresh)
        _found[here, question.name] = known
    return known


def _best(first: Choice | None, second: Choice | None) -> Choice | None:
    """The one of two answers that counts: the conclusive one, else that of the later try, else the first."""
    if first is None or second is None:
        return first or second
    later = second.conclusive or second.tries > first.tries
    return second if later and not first.conclusive else first


def report() -> list[dict[str, Any]]:
    """What this process has found or looked up on the machine as it is now: plain values, by question."""
    here = machine()
    return [
        {"question": name, **dataclasses.asdict(choice)}
        for (where, name), choice in sorted(_found.items())
        if where == here
    ]


def describe(found: Mapping[str, Any]) -> str:
    """One of a report's entries, as a line."""
    facts = {name: value for name, value in found.items() if name != "question"}
    return f"{found['question']}: {Choice(**facts).in_full()}"


def forget() -> None:
    """Let go of what this process has found; the file stays."""
    with _lock:
        _found.clear()


# Trials


def may_try() -> bool:
    """Whether nothing would see a trial that cannot be kept from it: an outer trial, a trace, a transform."""
    return not (
        getattr(_this_thread, "trying", False)
        or torch._C._is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Keep a trial from what surrounds it: modes, autocast, the graph and garbage collection."""
    _this_thread.trying = True
    collects = gc.isenabled()
    gc.disable()
    try:
        with (
            _disable_current_modes(),
            torch._C.DisableTorchFunction(),
            torch.autocast("cpu", enabled=False),
            torch.inference_mode(False),
            torch.no_grad(),
        ):
            yield
    finally:
        if collects:
            gc.enable()
        _this_thread.trying = False


# The machine and the file


#: Of other libraries: which instructions they use, and how threads wait for work.
_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "OMP_WAIT_POLICY")


def machine() -> str:
    """What an answer depends on beside the question: processor, instruction sets, threads and versions."""
    onednn = torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()
    set_by = [f"{name}={os.environ[name]}" for name in _VARIABLES if os.environ.get(name)]
    return _machine(torch.get_num_threads(), bool(onednn), *set_by)


@functools.cache
def _machine(threads: int, onednn: bool, *set_by: str) -> str:
    own = library.built_with()["cpu_capability"] if library.load_error() is None else "no library"
    try:
        version = importlib.metadata.version("fusedacc")
    except importlib.metadata.PackageNotFoundError:
        version = "from its sources"
    parts = (
        processor(),
        f"fusedacc {version}",
        f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}",
        f"kernels {own}",
        "oneDNN" if onednn else "no oneDNN",
        f"{threads} thread{'s' if threads > 1 else ''}",
        *set_by,
    )
    return "; ".join(parts)


@functools.cache
def processor() -> str:
    """Its model, and a number that stands for its features, which virtual machines hide from the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = facts.get("model name") or platform.processor() or platform.machine()
    details = [facts.get(key, "") for key in ("cpu family", "model", "stepping", "flags", "Features")]
    return f"{name} ({zlib.crc32(' '.join(details).encode()):08x})"


def folder() -> Path:
    """Where answers are kept."""
    own = os.environ.get(FOLDER)
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fusedacc"


def kept_where() -> str:
    """Where answers are kept, and why they are not, if so."""
    return f"{folder() / FILE}{f' (not written: {_unsaved})' if _unsaved else ''}"


def is_saved() -> bool:
    """Whether every answer of this process could be written."""
    return not _unsaved


def _read() -> dict[str, dict[str, Any]]:
    """The file's answers by machine; nothing where it is not there, or not ours to read."""
    try:
        found = json.loads((folder() / FILE).read_text())
    except (OSError, ValueError, RuntimeError):  # the last: no home
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: answers for name, answers in found.items() if isinstance(answers, dict)}


def _known(answers: dict[str, dict[str, Any]], here: str, question: Question) -> Choice | None:
    entry = answers.get(here, {}).get(question.name)
    if not isinstance(entry, dict) or entry.get("way") not in question.ways:
        return None
    figures, why = entry.get("microseconds"), str(entry.get("why"))
    conclusive, tries, tried_at = (entry.get(name) for name in ("conclusive", "tries", "tried_at"))
    return Choice(
        entry["way"],
        why,
        figures if isinstance(figures, dict) else {},
        question.default,
        # Releases before these fields existed said it in words only.
        conclusive if isinstance(conclusive, bool) else "disturbed the trial" not in why,
        tries if isinstance(tries, int) and tries > 0 else 1,
        tried_at if isinstance(tried_at, int | float) else 0.0,
    )


def _save(here: str, question: Question, choice: Choice) -> Choice:
    """Write an answer; returns the one that counts, which another process may have written before."""
    global _unsaved
    try:
        where = folder()
        where.mkdir(parents=True, exist_ok=True)
        with open(where / f"{FILE}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            answers = _read()
            known = _known(answers, here, question)
            if known is not None and _best(known, choice) is known:
                return known
            entry = dataclasses.asdict(choice)
            del entry["default"]
            answers.setdefault(here, {})[question.name] = entry
            with tempfile.TemporaryDirectory(dir=where) as new:
                (Path(new) / FILE).write_text(json.dumps(answers, indent=1))
                os.replace(Path(new) / FILE, where / FILE)
    except (OSError, RuntimeError) as problem:  # read-only, full, no home: then it holds for this process
        _unsaved = f"{type(problem).__name__}: {problem}"
    return choice
