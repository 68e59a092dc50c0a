"""A trial's verdict: delays never select a slower way, and on a quiet machine the faster way wins."""

import itertools
import os
import random
import subprocess
import sys
import time

import pytest
from answers import ScriptedClock

from fusedacc.kernels import tuning_trial
from fusedacc.kernels.tuning_trial import (
    MIN_ROUNDS,
    ROUNDS,
    Interruptions,
    TrialTimes,
    decide,
    time_candidates,
)

#: Calls before the first round, for each way.
UNTIMED = 4
SEEDS = range(100)


@pytest.fixture
def clock(monkeypatch):
    clock = ScriptedClock()
    clock.install(monkeypatch)
    return clock


# Delays by call: the factor by which call `index`, at time `now`, takes longer.


def one(chance):
    late, factor = chance.randrange(UNTIMED * 2 + 2 * ROUNDS), chance.uniform(3, 100)
    return lambda index, now: factor if index == late else 1


def first_round(chance):
    """The first sample that counts, of either way."""
    late = UNTIMED * 2 + chance.randrange(2)
    return lambda index, now: 3 if index == late else 1


def every_fifth(chance):
    offset, factor = chance.randrange(5), chance.uniform(2, 20)
    return lambda index, now: factor if index % 5 == offset else 1


def half_of_four(chance):
    """If the order alternated, every round would delay the same way."""
    offset = chance.randrange(4)
    return lambda index, now: 3 if (index + offset) % 4 < 2 else 1


def burst(chance):
    begin, seconds, factor = chance.uniform(0, 1e-3), chance.uniform(1e-4, 3e-3), chance.uniform(2, 10)
    return lambda index, now: factor if begin <= now < begin + seconds else 1


def by_chance(chance):
    share = chance.uniform(0, 0.3)
    return lambda index, now: chance.uniform(1.5, 10) if chance.random() < share else 1


def frequency(chance):
    slope = chance.uniform(-300, 300)
    return lambda index, now: max(0.3, 1 + slope * now)


@pytest.mark.parametrize(
    ("pattern", "decided"),
    [
        (one, 1),
        (first_round, 1),
        (every_fifth, 0.2),
        (half_of_four, 0.2),
        (burst, 0.9),
        (by_chance, 0.6),
        (frequency, 1),
    ],
)
def test_unnoticed_delays_do_not_decide(clock, pattern, decided):
    """The default takes 50 us. No slower way wins, and no conclusive trial rejects a faster one.

    `decided`: the share of trials that must be conclusive.
    """
    found = []
    for seed in SEEDS:
        for other in (40e-6, 60e-6):
            chance = random.Random(seed)
            clock.delay(pattern(chance), lambda chance=chance: chance.gauss(1, 0.01))
            ways = {"default": clock.way(50e-6), "other": clock.way(other)}
            verdict = decide("default", time_candidates(ways, "default"))
            right = "other" if other < 50e-6 else "default"
            assert verdict.candidate in (right, "default"), seed
            assert verdict.candidate == right or not verdict.conclusive, seed
            found.append(verdict.conclusive)
    assert sum(found) >= decided * len(found)


def test_the_faster_way_wins_on_a_quiet_machine(clock):
    for seed in SEEDS[:40]:
        chance = random.Random(seed)
        clock.delay(lambda index, now: 1, lambda chance=chance: chance.gauss(1, 0.03))
        for times, way in (
            ({"default": 50e-6, "other": 40e-6}, "other"),
            ({"default": 50e-6, "other": 60e-6}, "default"),
            ({"default": 50e-6, "other": 50e-6}, "default"),
            ({"default": 500e-6, "other": 50e-6}, "other"),
            ({"default": 50e-6, "other": 49e-6, "third": 40e-6, "fourth": 500e-6}, "third"),
        ):
            trial = time_candidates({name: clock.way(own) for name, own in times.items()}, "default")
            verdict = decide("default", trial)
            assert (verdict.candidate, verdict.conclusive) == (way, True), (seed, times)
            assert len(trial.times["default"]) == ROUNDS


def test_a_much_slower_way_is_left_out_early(clock):
    ways = {"default": clock.way(50e-6), "slow": clock.way(500e-6), "other": clock.way(60e-6)}
    trial = time_candidates(ways, "default")
    assert list(map(len, trial.times.values())) == [ROUNDS, MIN_ROUNDS, ROUNDS]
    del ways["other"]
    trial = time_candidates(ways, "default")
    assert set(map(len, trial.times.values())) == {MIN_ROUNDS}
    verdict = decide("default", trial)
    assert (verdict.candidate, verdict.conclusive) == ("default", True)
    assert verdict.reason == "the fastest in a trial"


def test_the_first_samples_do_not_leave_out_a_way(clock):
    """Two of the first three samples of the faster way are delayed."""
    index = itertools.count()
    ways = {
        "default": clock.way(50e-6),
        "other": lambda: clock.pass_by(1e-3 if next(index) in (UNTIMED, UNTIMED + 1) else 40e-6),
    }
    verdict = decide("default", time_candidates(ways, "default"))
    assert (verdict.candidate, verdict.conclusive) == ("other", True)


def test_a_trial_without_time_for_its_rounds_changes_nothing(clock):
    ways = {"default": clock.way(20e-3), "other": clock.way(10e-3)}
    trial = time_candidates(ways, "default")
    assert MIN_ROUNDS < len(trial.times["other"]) < ROUNDS
    verdict = decide("default", trial)
    assert (verdict.candidate, verdict.conclusive) == ("default", False)
    assert verdict.reason.endswith("the trial took too long")
    assert verdict.microseconds == {"default": 20000.0, "other": 10000.0}


@pytest.mark.parametrize(
    ("other", "conclusive"),
    [
        ([0.9] * ROUNDS, True),
        ([0.97] * ROUNDS, True),
        ([1.2] * ROUNDS, True),
        ([0.5] * 9 + [2.0] * 6, False),
        ([2.0] * 9 + [0.5] * 6, False),
        ([0.5] * (ROUNDS - 1), False),
    ],
)
def test_rounds_that_disagree_are_inconclusive(other, conclusive):
    verdict = decide("default", TrialTimes({"default": [1.0] * ROUNDS, "other": other}))
    assert (verdict.candidate, verdict.conclusive) == ("other" if other[-1] == 0.9 else "default", conclusive)


# Interruptions that the system reports


def test_interrupted_rounds_do_not_count(clock, monkeypatch):
    """In two of three rounds another process takes a core, and only the default becomes slower."""
    interrupted = []

    def since_mark(self):
        interrupted.append(len(interrupted) % 3 > 0)
        return interrupted[-1]

    monkeypatch.setattr(Interruptions, "since_mark", since_mark)

    def default():
        clock.pass_by(500e-6 if len(interrupted) % 3 > 0 else 50e-6)

    trial = time_candidates({"default": default, "other": clock.way(60e-6)}, "default")
    assert len(trial.discarded["default"]) >= 2 * ROUNDS - 2
    verdict = decide("default", trial)
    assert (verdict.candidate, verdict.conclusive) == ("default", True)
    assert verdict.microseconds["default"] == 50


def test_a_trial_that_is_always_interrupted_ends_and_changes_nothing(clock, monkeypatch):
    monkeypatch.setattr(Interruptions, "since_mark", lambda self: True)
    trial = time_candidates({"default": clock.way(50e-6), "other": clock.way(5e-6)}, "default")
    assert clock.now < 1.1 * tuning_trial.TRIAL_SECONDS
    verdict = decide("default", trial)
    assert (verdict.candidate, verdict.conclusive) == ("default", False)
    assert verdict.reason.endswith("other processes disturbed the trial")
    assert verdict.microseconds == {"default": 50, "other": 5}


def test_a_trial_with_stolen_time_changes_nothing(clock, monkeypatch):
    ticks = iter([[0] * 8, [90, 0, 0, 0, 0, 0, 0, 10]])
    monkeypatch.setattr(tuning_trial, "_processor_ticks", lambda: next(ticks))
    trial = time_candidates({"default": clock.way(50e-6), "other": clock.way(5e-6)}, "default")
    verdict = decide("default", trial)
    assert (verdict.candidate, verdict.conclusive) == ("default", False)
    assert "the virtual machine's host took 10% of the cores' time" in verdict.reason


def test_sharing_a_core_is_an_interruption():
    """No file stays open."""
    cores, files = os.sched_getaffinity(0), len(os.listdir("/proc/self/fd"))
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        os.sched_setaffinity(0, {min(cores)})
        os.sched_setaffinity(other.pid, {min(cores)})
        with Interruptions() as found:
            end = time.monotonic() + 120
            while not found.since_mark() and time.monotonic() < end:
                pass
            assert found.since_mark()
            assert 0 <= found.stolen_share() <= 1
    finally:
        os.sched_setaffinity(0, cores)
        other.kill()
        other.wait()
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_system_without_counts_reports_no_interruption(monkeypatch, tmp_path):
    monkeypatch.setattr(tuning_trial, "Path", lambda path: tmp_path / "missing")
    with Interruptions() as found:
        assert found._files == []
        assert found.stolen_share() == 0
