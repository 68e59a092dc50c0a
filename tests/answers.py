"""Simulates autotuning trials whose outcome the test chooses."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from unittest import mock

import pytest

from fusedacc.kernels import tuning, tuning_trial
from fusedacc.kernels.tuning_trial import Interruptions


class ScriptedClock:
    """A clock for trials. Only the timed candidates advance it."""

    def __init__(self) -> None:
        self.delay(lambda index, now: 1.0)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make trials use this clock and see no interruptions."""
        monkeypatch.setattr(tuning_trial, "perf_counter", self._read)
        monkeypatch.setattr(Interruptions, "since_mark", lambda self: False)
        monkeypatch.setattr(tuning_trial, "_processor_ticks", lambda: [0] * 8)

    def _read(self) -> float:
        self.now += 1e-9  # so that every call takes some time
        return self.now

    def delay(self, factor: Callable[[int, float], float], noise: Callable[[], float] = lambda: 1.0) -> None:
        """Restart the clock at 0. Call `index`, at time `now`, takes `factor(index, now)` times as long."""
        self.now, self._factor, self._noise, self._calls = 0.0, factor, noise, itertools.count()

    def pass_by(self, seconds: float) -> None:
        """Advance the clock."""
        self.now += seconds * self._factor(next(self._calls), self.now) * self._noise()

    def way(self, seconds: float) -> Callable[[], object]:
        """Return a candidate that takes `seconds` on this clock."""
        return lambda: self.pass_by(seconds)


@contextlib.contextmanager
def trials(**variables: str) -> Iterator[None]:
    """Allow trials, and remove this process's cached answers."""
    with (
        mock.patch.dict(os.environ, {tuning.TUNE_ENV: "1", **variables}),
        mock.patch.dict(tuning._found, clear=True),
        mock.patch.object(Interruptions, "since_mark", return_value=False),  # other tests run too
        mock.patch.object(Interruptions, "stolen_share", return_value=0.0),
    ):
        yield


@contextlib.contextmanager
def answer(*answers: str) -> Iterator[None]:
    """Set this process's cached answers, given as pairs of a question's name and the chosen way."""
    with trials():
        for name, way in zip(answers[::2], answers[1::2], strict=True):
            tuning._found[tuning.machine(), name] = tuning.Decision(way, "says the test")
        yield
