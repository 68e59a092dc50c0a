"""A choice among candidates that do the same work, and the decision.

A backend is the first candidate that can run, unless the user names one (`Choice.select`, `registry`). Trials
(`tuning.choose`) decide how the CPU loops work: products (`matmul`), grouped products and their rounding
(`grouped`), the grain size and prefetching (`loop_settings`), and which small layers are replaced
(`optimizer.parameters`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

#: Seconds from an inconclusive trial to the next: first and longest pause. Each pause is twice the last.
FIRST_PAUSE, LONGEST_PAUSE = 60.0, 86400.0


def switch(variable: str, *, on: str, off: str, unset: str) -> bool | None:
    """Return whether the environment variable is "1" or "0"; None if it is empty or not set; else raise
    ValueError. on, off, unset: what "1", "0" and no value mean, for the error.
    """
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        allowed = f"'0' ({off}), '1' ({on}), or not set ({unset})"
        raise ValueError(f"{variable}={value!r}: allowed are {allowed}")
    return value == "1" if value else None


Trial = Callable[[], Mapping[str, Callable[[], object]]]


@dataclass(frozen=True)
class Choice:
    """A choice among several candidates for some work on this machine.

    Attributes:
        name: for trials: the name in checkpoints; it must keep its meaning across releases. Otherwise the
            work, in words that follow "cannot".
        candidates: their names, the preferred first.
        default: for trials: the candidate for this CPU if there is no trial.
        trial: creates operands on the CPU; returns the callables to time, by candidate.
        obstacle: why a candidate cannot do the work here; None if it can.
    """

    name: str
    candidates: tuple[str, ...]
    default: str = ""
    trial: Trial | None = field(default=None, compare=False)
    obstacle: Callable[[str], str | None] = field(default=lambda candidate: None, compare=False)

    def select(self, requested: str, source: str) -> Decision:
        """Select the requested candidate (any name is allowed), or for "auto" the first that can run;
        RuntimeError if none can. source: the argument or environment variable that requested it, for the
        reason.
        """
        if requested != "auto":
            problem = self.obstacle(requested)
            if problem is None:
                return Decision(requested, f"chosen by {source}={requested!r}")
            able = ("auto", *(other for other in self.candidates if self.obstacle(other) is None))
            allowed = ", ".join(map(repr, able))
            raise RuntimeError(
                f"{source}={requested!r} cannot {self.name}: {problem}. Allowed here: {allowed}"
            )
        passed: list[str] = []
        for candidate in self.candidates:
            problem = self.obstacle(candidate)
            if problem is None:
                first = f"first of {', '.join(self.candidates)} that can run here"
                return Decision(candidate, "; ".join([first, *passed]))
            passed.append(f"not {candidate}: {problem}")
        raise RuntimeError(f"no backend can {self.name}: {'; '.join(passed)}")


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


def decision_of(entry: Any, choice: Choice) -> Decision | None:
    """Return the decision of a cache entry; None if it has none for these candidates."""
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
