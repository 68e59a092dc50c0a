"""A choice among candidates that all do the same work, and what was decided.

Every choice of this package is a `Choice`. A backend is the first candidate without an obstacle, unless a
user names one (`Choice.select`, `registry`). How the CPU loops work is decided by a trial (`tuning.choose`):
products (`matmul`), grouped products and their rounding (`grouped`), the grain size and prefetching
(`loop_settings`), and which small layers are replaced (`optimizer.small_layers`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

#: Seconds from an inconclusive trial to the next one: the first time, and at most. They double in between.
FIRST_PAUSE, LONGEST_PAUSE = 60.0, 86400.0

Trial = Callable[[], Mapping[str, Callable[[], object]]]


@dataclass(frozen=True)
class Choice:
    """Which of several candidates does some work on this machine.

    Attributes:
        name: of a choice by trial, the same in every process and release in which it means the same, since
            checkpoints hold it; else the work, in words that go on after "cannot".
        candidates: their names, the preferred first.
        default: of a choice by trial, the candidate for this CPU without a trial.
        trial: makes the operands on the CPU; returns what is timed, by the names of the candidates.
        obstacle: why a candidate cannot do the work here; None if it can.
    """

    name: str
    candidates: tuple[str, ...]
    default: str = ""
    trial: Trial | None = field(default=None, compare=False)
    obstacle: Callable[[str], str | None] = field(default=lambda candidate: None, compare=False)

    def select(self, requested: str, source: str) -> Decision:
        """Take the requested candidate, which need not be one of ours, or the first that can for "auto".

        source: what requested it, for the reason: an argument or an environment variable.

        Raises:
            RuntimeError: the requested candidate cannot; or none can.
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
        microseconds: the medians of the trial by candidate, if there was one.
        default: the candidate without a trial.
        conclusive: whether the decision is final. If not, the trial is repeated later.
        tries: how many trials were made.
        tried_at: when the last one was made, in seconds since 1970.
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
        """Whether the trial should be repeated now."""
        pause = min(FIRST_PAUSE * 2.0 ** min(self.tries - 1, 30), LONGEST_PAUSE)
        # A time in the future means that the clock was set back since.
        return not self.conclusive and not self.tried_at <= time.time() < self.tried_at + pause

    def as_entry(self) -> dict[str, Any]:
        """The decision as plain values, by the names that cache files and reports have."""
        facts = asdict(self)
        return {"way": facts.pop("candidate"), "why": facts.pop("reason"), **facts}


def times_of(microseconds: Mapping[str, float]) -> str:
    """The medians of a trial in words."""
    return ", ".join(f"{name} {own:g} us" for name, own in microseconds.items())


def decision_of(entry: Any, choice: Choice) -> Decision | None:
    """The decision that a cache file has for a choice; None where it has none for these candidates."""
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
        # Releases before these fields existed said it in words only.
        conclusive if isinstance(conclusive, bool) else "disturbed the trial" not in reason,
        tries if isinstance(tries, int) and tries > 0 else 1,
        tried_at if isinstance(tried_at, int | float) else 0.0,
    )


def better(first: Decision | None, second: Decision | None) -> Decision | None:
    """The decision that counts: the conclusive one, else that of the later try, else the first."""
    if first is None or second is None:
        return first or second
    later = second.conclusive or second.tries > first.tries
    return second if later and not first.conclusive else first
