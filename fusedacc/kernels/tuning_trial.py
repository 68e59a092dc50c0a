"""Time several candidates for the same work, and decide which is the fastest.

Delays must not decide. Each round times every candidate once, so that a slow period slows all of them, and
candidates are compared round by round. A round in which this process lost a core is discarded. The default
loses only to a candidate that was faster in most rounds, after all rounds. If a trial is inconclusive,
`tuning` uses the default for now and repeats the trial later.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

#: Share of time that a candidate must save, in the median of the rounds.
MIN_SPEEDUP = 0.05
#: Share of rounds that must agree that a candidate is faster, or not.
MIN_AGREEMENT = 0.75
#: Uninterrupted rounds per trial.
ROUNDS = 15
#: Seconds of a trial at most.
TRIAL_SECONDS = 0.25
#: Seconds of a sample; it calls a candidate at least once.
SAMPLE_SECONDS = 40e-6
#: A candidate is dropped if every sample takes this many times the best median, after at least so many
#: rounds.
MAX_SLOWDOWN, MIN_ROUNDS = 3.0, 3
#: Share of the cores' time that a virtual machine's host may take.
MAX_STOLEN = 0.05
#: Seconds from an inconclusive trial to the next: first and longest pause. Each pause is twice the last.
FIRST_PAUSE, LONGEST_PAUSE = 60.0, 86400.0


@dataclass(frozen=True)
class Decision:
    """A candidate, and the reason.

    Attributes:
        candidate, reason: in words.
        microseconds: median times of the trial by candidate; empty without a trial.
        default: the candidate without a trial.
        conclusive: whether the decision is final. If not, the trial is repeated later.
        tries: number of trials.
        tried_at: time of the last trial, in seconds since 1970.
    """

    candidate: str
    reason: str
    microseconds: Mapping[str, float] = field(default_factory=dict)
    default: str = ""
    conclusive: bool = True
    tries: int = 0
    tried_at: float = 0.0

    def __str__(self) -> str:
        times = times_of(self.microseconds)
        return f"{self.candidate}: {self.reason}{f' ({times})' if times else ''}"

    def is_due(self) -> bool:
        """Return whether the trial should be repeated now."""
        pause = min(FIRST_PAUSE * 2.0 ** min(self.tries - 1, 30), LONGEST_PAUSE)
        # A time in the future means that the clock was set back.
        return not self.conclusive and not self.tried_at <= time.time() < self.tried_at + pause

    def as_entry(self) -> dict[str, Any]:
        """Return the decision as plain values, with the names used in cache files and reports."""
        facts = asdict(self)
        return {"way": facts.pop("candidate"), "why": facts.pop("reason"), **facts}


def times_of(microseconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {own:g} us" for name, own in microseconds.items())


@dataclass(frozen=True)
class TrialTimes:
    """What was timed.

    Attributes:
        times: seconds per call of each candidate in each valid round; a dropped candidate has fewer.
        complete: whether there were enough rounds.
        discarded: the same for interrupted rounds.
        stolen: share of the cores' time that a virtual machine's host took.
    """

    times: Mapping[str, list[float]]
    complete: bool = True
    discarded: Mapping[str, list[float]] = field(default_factory=dict)
    stolen: float = 0.0

    def problem(self) -> str:
        """Return why the trial is inconclusive; empty if it is conclusive."""
        if self.stolen > MAX_STOLEN:
            return f"the virtual machine's host took {self.stolen:.0%} of the cores' time in the trial"
        if self.complete:
            return ""
        disturbed = any(self.discarded.values())
        return "other processes disturbed the trial" if disturbed else "the trial took too long"

    def medians(self) -> dict[str, float]:
        """Return the seconds per call of each candidate, from interrupted rounds if it has no others."""
        times = {name: own or self.discarded[name] for name, own in self.times.items()}
        return {name: statistics.median(own) for name, own in times.items()}


def time_candidates(candidates: Mapping[str, Callable[[], object]], default: str) -> TrialTimes:
    """Time the candidates until there are `ROUNDS` rounds without an interruption, or the time is up. The
    default is never dropped.
    """
    calls = {name: _calls_per_sample(run) for name, run in candidates.items()}
    times: dict[str, list[float]] = {name: [] for name in candidates}
    discarded: dict[str, list[float]] = {name: [] for name in candidates}
    running, attempt = list(candidates), 0
    # A random order, then its reverse, so that periodic delays hit all candidates alike.
    shuffle = random.Random(0).shuffle
    with Interruptions() as interruptions:
        end = perf_counter() + TRIAL_SECONDS
        while len(running) > 1 and len(times[default]) < ROUNDS and perf_counter() < end:
            running.reverse() if attempt % 2 else shuffle(running)
            attempt += 1
            interruptions.mark()
            samples = {name: seconds_per_call(candidates[name], calls[name]) for name in running}
            taken = discarded if interruptions.since_mark() else times
            for name, seconds in samples.items():
                taken[name].append(seconds)
            if len(times[default]) >= MIN_ROUNDS:
                running = _without_hopeless(running, times, default)
        complete = len(running) == 1 or len(times[default]) == ROUNDS
        return TrialTimes(times, complete, discarded, interruptions.stolen_share())


def _calls_per_sample(run: Callable[[], object]) -> int:
    run()  # the first call also loads and allocates
    fastest = min(seconds_per_call(run, 1) for _ in range(3))
    return max(1, math.ceil(SAMPLE_SECONDS / max(fastest, 1e-9)))


def seconds_per_call(run: Callable[[], object], calls: int) -> float:
    """Return the seconds per call on the host."""
    begin = perf_counter()
    for _ in range(calls):
        run()
    return (perf_counter() - begin) / calls


def _without_hopeless(running: list[str], times: Mapping[str, list[float]], default: str) -> list[str]:
    """Return the candidates that may still be the fastest, and the default.

    Delays only lengthen samples, so a candidate is judged by its fastest sample.
    """
    longest = MAX_SLOWDOWN * min(statistics.median(times[name]) for name in running)
    return [name for name in running if name == default or min(times[name]) <= longest]


def decide(default: str, trial: TrialTimes) -> Decision:
    """Choose a candidate that is clearly faster than the default, else the default."""
    medians = trial.medians()
    figures = {name: round(1e6 * seconds, 1) for name, seconds in medians.items()}

    def decision(candidate: str, why: str, conclusive: bool = True) -> Decision:
        return Decision(candidate, why, figures, default, conclusive)

    kept, fastest = "the default for this CPU: ", "the fastest in a trial"
    problem = trial.problem()
    if problem:
        return decision(default, kept + problem, False)
    ratios = {
        # A dropped candidate has fewer rounds.
        name: [its / other for its, other in zip(own, trial.times[default], strict=False)]
        for name, own in trial.times.items()
        if name != default
    }
    faster = [name for name, own in ratios.items() if len(own) >= ROUNDS and _is_faster(own)]
    if faster:
        return decision(min(faster, key=lambda name: statistics.median(ratios[name])), fastest)
    doubtful = [name for name, own in ratios.items() if not _is_not_faster(own)]
    if doubtful:
        return decision(
            default, f"{kept}the rounds of the trial disagreed on {' and '.join(doubtful)}", False
        )
    first = min(medians, key=medians.__getitem__)
    return decision(
        default, fastest if first == default else f"{kept}{first} was not clearly faster in a trial"
    )


def _is_faster(ratios: list[float]) -> bool:
    """Return whether a candidate is clearly faster, from its times divided by the default's."""
    agreement = statistics.fmean(ratio < 1 for ratio in ratios)
    return statistics.median(ratios) <= 1 - MIN_SPEEDUP and agreement >= MIN_AGREEMENT


def _is_not_faster(ratios: list[float]) -> bool:
    """Return whether it is clearly not faster by a relevant amount."""
    agreement = statistics.fmean(ratio > 1 - 2 * MIN_SPEEDUP for ratio in ratios)
    return statistics.median(ratios) > 1 - MIN_SPEEDUP and agreement >= MIN_AGREEMENT


#: On an idle machine, a thread that wakes up waits less than this for its core.
WAKE_UP_SECONDS = 50e-6
#: Index of steal time in /proc/stat.
_STEAL = 7


class Interruptions:
    """Context manager that detects interruptions. It keeps a file open for each thread.

    Linux counts for each thread how long it was ready to run but had no core, and in a virtual machine how
    long the host ran something else (steal time). Every system counts how often the process was preempted.
    """

    def __init__(self) -> None:
        self._files: list[int] = []
        for file in Path("/proc/self/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # the thread has ended
                self._files.append(os.open(file, os.O_RDONLY))
        self._ticks = _processor_ticks()
        self.mark()

    def __enter__(self) -> Interruptions:
        return self

    def __exit__(self, *exception: object) -> None:
        while self._files:
            os.close(self._files.pop())

    def mark(self) -> None:
        """Look for interruptions from now on."""
        self._marked = self._counts()

    def since_mark(self) -> bool:
        """Return whether a thread was preempted or waited for a core since the last `mark()`."""
        counts = zip(self._counts(), self._marked, strict=True)
        preemptions, waited, runs = (now - before for now, before in counts)
        return preemptions > 0 or waited > WAKE_UP_SECONDS * max(1, runs)

    def stolen_share(self) -> float:
        """Return the share of all cores' time that the host took since this was made."""
        now = _processor_ticks()
        total = sum(now) - sum(self._ticks)
        return (now[_STEAL] - self._ticks[_STEAL]) / total if total > 0 else 0.0

    def _counts(self) -> tuple[int, float, int]:
        """Return the process's preemptions, its threads' seconds of waiting, and how often they ran."""
        waited = runs = 0
        for file in self._files:
            with contextlib.suppress(OSError, ValueError):  # the thread has ended
                _, own_wait, own_runs = os.pread(file, 96, 0).split()
                waited, runs = waited + int(own_wait), runs + int(own_runs)
        return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw, waited * 1e-9, runs


def _processor_ticks() -> list[int]:
    """Return the ticks of all cores: user, nice, system, idle, iowait, irq, softirq and steal."""
    try:
        with Path("/proc/stat").open() as file:
            found = [int(number) for number in file.readline().split()[1 : _STEAL + 2]]
    except (OSError, ValueError):
        found = []
    return found if len(found) == _STEAL + 1 else [0] * (_STEAL + 1)
