"""Choices by trial: where several ways are right, and which one is the fastest depends on the machine.

The first time that a question comes up, its ways run in turns for some milliseconds. Another way than the one
that the processor's features speak for is taken only where it is faster by more than noise. An answer holds
for the process, and for later ones: it is kept in `FUSEDACC_CACHE` (default: `fusedacc` in `XDG_CACHE_HOME`
or `~/.cache`), by processor, instruction sets, threads and versions; of processes that ask at once, the first
to write is followed by all. `FUSEDACC_TUNE=0` and `torch.use_deterministic_algorithms(True)` leave trials and
answers aside.

Ways may differ in the last bits of their results. A wrapper keeps the answers that it has used, and its
checkpoints carry them, so that what resumes on the same processor goes on as it began.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import importlib.metadata
import json
import math
import os
import platform
import resource
import statistics
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

#: "0": no trials, the processor's features decide; "1", "" or not set: trials.
VARIABLE = "FUSEDACC_TUNE"
#: The folder in which answers are kept.
FOLDER = "FUSEDACC_CACHE"
FILE = "choices.json"
#: How much less time than the fixed way another must take, in the median of paired rounds.
MARGIN = 0.05
#: In this share of the rounds it must have been faster at all.
AGREEMENT = 0.75
#: A trial tells nothing where other processes have taken a core from this one more often than once in so many
#: timed samples: what two threads share then takes as long as the scheduler likes.
SAMPLES_PER_PREEMPTION = 4
#: Of a trial: seconds, rounds, seconds of a timed sample at least, and when a way is out of the question.
BUDGET, ROUNDS, LEAST_ROUNDS, SAMPLE, HOPELESS = 0.008, 15, 4, 40e-6, 3.0


@dataclass(frozen=True)
class Question:
    """Which of several ways is the fastest here.

    name: the same in every process and release in which it means the same; it stands in checkpoints.
    ways: their names. fixed: the one that is taken without a trial.
    trial: makes the operands on the CPU; returns what is timed, by the names of the ways.
    """

    name: str
    ways: tuple[str, ...]
    fixed: str
    trial: Callable[[], Mapping[str, Callable[[], object]]] = field(compare=False)


@dataclass(frozen=True)
class Choice:
    """A way, why it was chosen, and the medians of the trial in microseconds, if there was one."""

    way: str
    why: str
    microseconds: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        times = ", ".join(f"{way} {own:g} us" for way, own in self.microseconds.items())
        return f"{self.way}: {self.why}{f' ({times})' if times else ''}"


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
        kept: answers that somebody has to stay with, by the names of questions; this one is added.

    Raises:
        ValueError: as `fixed_by`.
    """
    reason, wanted = fixed_by(), None if kept is None else kept.get(question.name)
    if reason is not None:
        choice = Choice(question.fixed, f"by the processor's features, since {reason} forbids trials")
    else:
        here = machine()
        known = _found.get((here, question.name))
        if wanted in question.ways:
            if known is None or known.way != wanted:
                return Choice(wanted, "as it was when the wrapper began, or in its checkpoint")
            return known
        if not _may_try():
            return known or Choice(
                question.fixed, "by the processor's features: this is no place for a trial"
            )
        choice = known or _answer(here, question)
    if kept is not None:
        kept[question.name] = choice.way
    return choice


def _answer(here: str, question: Question) -> Choice:
    with _lock:
        known = _found.get((here, question.name)) or _known(_read(), here, question)
        if known is None:
            with _undisturbed():
                trial = time_ways(question.trial())
            known = _save(here, question, decide(question, trial))
        _found[here, question.name] = known
    return known


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
    choice = Choice(found["way"], found["why"], found["microseconds"])
    return f"{found['question']}: {choice}"


def forget() -> None:
    """Let go of what this process has found; the file stays."""
    with _lock:
        _found.clear()


# Trials


def _may_try() -> bool:
    """Whether nothing would see a trial that cannot be kept from it: an outer trial, a trace, a transform."""
    return not (
        getattr(_this_thread, "trying", False)
        or torch._C._is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Nobody's modes, autocast or graph: a question may come up in the middle of anything."""
    _this_thread.trying = True
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
        _this_thread.trying = False


@dataclass(frozen=True)
class Trial:
    """Seconds of each way in each round, and how often another process has taken a core meanwhile."""

    times: Mapping[str, list[float]]
    preemptions: int = 0

    @property
    def disturbed(self) -> bool:
        samples = sum(map(len, self.times.values()))
        return self.preemptions * SAMPLES_PER_PREEMPTION > samples


def time_ways(ways: Mapping[str, Callable[[], object]]) -> Trial:
    """Run the ways in turns. Those that are hopeless have one round only."""
    before, once = preemptions(), {}
    for name, run in ways.items():
        run()
        once[name] = _seconds(run, 1)
    best = min(once.values())
    names = [name for name in ways if once[name] <= HOPELESS * best]
    calls = max(1, math.ceil(SAMPLE / max(best, 1e-9)))
    times: dict[str, list[float]] = {name: [] for name in names}
    end = time.perf_counter() + BUDGET
    for index in range(ROUNDS if len(names) > 1 else 1):
        if index >= LEAST_ROUNDS and time.perf_counter() > end:
            break
        for turn in range(len(names)):
            name = names[(index + turn) % len(names)]
            times[name].append(_seconds(ways[name], calls))
    return Trial({name: times.get(name, [once[name]]) for name in ways}, preemptions() - before)


def preemptions() -> int:
    """How often another process has taken a core from a thread of this one, so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _seconds(run: Callable[[], object], calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - begin) / calls


def decide(question: Question, trial: Trial) -> Choice:
    """The fastest way where that is beyond doubt, else the fixed one."""
    medians = {name: statistics.median(own) for name, own in trial.times.items()}
    figures = {name: round(1e6 * seconds, 1) for name, seconds in medians.items()}
    fastest, fixed = min(medians, key=lambda name: medians[name]), question.fixed
    if trial.disturbed:
        return Choice(fixed, "by the processor's features: other processes disturbed the trial", figures)
    if fastest == fixed:
        return Choice(fixed, "the fastest in a trial", figures)
    both = trial.times[fastest], trial.times[fixed]
    if len(both[0]) == len(both[1]):  # else one of them was hopeless
        ratios = [own / its for own, its in zip(*both, strict=True)]
        agree = sum(ratio < 1 for ratio in ratios) >= AGREEMENT * len(ratios)
        if statistics.median(ratios) > 1 - MARGIN or not agree:
            why = f"by the processor's features: {fastest} was not faster beyond doubt in a trial"
            return Choice(fixed, why, figures)
    return Choice(fastest, "the fastest in a trial", figures)


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
    figures = entry.get("microseconds")
    return Choice(entry["way"], str(entry.get("why")), figures if isinstance(figures, dict) else {})


def _save(here: str, question: Question, choice: Choice) -> Choice:
    """Write an answer down; returns the one that stands, which another process may have written first."""
    global _unsaved
    try:
        where = folder()
        where.mkdir(parents=True, exist_ok=True)
        with open(where / f"{FILE}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            answers = _read()
            known = _known(answers, here, question)
            if known is not None:
                return known
            entry = {"way": choice.way, "why": choice.why, "microseconds": dict(choice.microseconds)}
            answers.setdefault(here, {})[question.name] = entry
            with tempfile.TemporaryDirectory(dir=where) as new:
                (Path(new) / FILE).write_text(json.dumps(answers, indent=1))
                os.replace(Path(new) / FILE, where / FILE)
    except (OSError, RuntimeError) as problem:  # read-only, full, no home: then it holds for this process
        _unsaved = f"{type(problem).__name__}: {problem}"
    return choice
