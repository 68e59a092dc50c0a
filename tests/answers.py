"""Trials whose outcome a test decides."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from unittest import mock

import pytest

from fusedacc.kernels import tuning, tuning_trial
from fusedacc.kernels.tuning_trial import Interruptions


class ScriptedClock:
    """A clock for trials that only the ways advance."""

    def __init__(self) -> None:
        self.delay(lambda index, now: 1.0)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let trials use this clock and see no interruptions."""
        monkeypatch.setattr(tuning_trial, "perf_counter", self._read)
        monkeypatch.setattr(Interruptions, "since_mark", lambda self: False)
        monkeypatch.setattr(tuning_trial, "_processor_ticks", lambda: [0] * 8)

    def _read(self) -> float:
        self.now += 1e-9  # so that nothing takes no time at all
        return self.now

    def delay(self, factor: Callable[[int, float], float], noise: Callable[[], float] = lambda: 1.0) -> None:
        """Start again at 0: call number `index`, at time `now`, takes `factor(index, now)` times as long."""
        self.now, self._factor, self._noise, self._calls = 0.0, factor, noise, itertools.count()

    def pass_by(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds * self._factor(next(self._calls), self.now) * self._noise()

    def way(self, seconds: float) -> Callable[[], object]:
        """A way that takes so long."""
        return lambda: self.pass_by(seconds)


@contextlib.contextmanager
def trials(**variables: str) -> Iterator[None]:
    """Trials are allowed, and this process has found nothing yet."""
    with (
        mock.patch.dict(os.environ, {tuning.TUNE_ENV: "1", **variables}),
        mock.patch.dict(tuning._found, clear=True),
        mock.patch.object(Interruptions, "since_mark", return_value=False),  # other tests run beside
        mock.patch.object(Interruptions, "stolen_share", return_value=0.0),
    ):
        yield


@contextlib.contextmanager
def answer(*answers: str) -> Iterator[None]:
    """This process has found these answers: a question's name, its way, and so on in pairs."""
    with trials():
        for name, way in zip(answers[::2], answers[1::2], strict=True):
            tuning._found[tuning.machine(), name] = tuning.Decision(way, "says the test")
        yield
