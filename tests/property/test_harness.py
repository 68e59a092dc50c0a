"""The property test tested: an honest wrapper passes it, and each of the broken ones is found out."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest
import sweeps
import torch

from .broken import BROKEN
from .events import random_case
from .legality import exact
from .lockstep import failure, stock
from .naive import Exposing, Naive
from .scaling import PlainScaler, Scaling

CASES = [case for case in map(random_case, range(400)) if not exact(case)]


def stand_in(case):
    """The case's own oracle, looking like a wrapper."""

    def make(inner, loop):
        subject = stock(case)(inner, loop)
        subject.optimizer = inner
        return subject

    return make


def test_an_honest_wrapper_passes():
    for case in CASES[: 50 if sweeps.FULL else 25]:
        assert failure(case, Naive, exposes=False) is None


def test_one_that_shows_the_final_gradient_passes():
    for case in list(filter(Exposing.takes, CASES))[: 30 if sweeps.FULL else 15]:
        assert failure(case, Exposing) is None


def test_two_stock_interpreters_never_differ():
    """What the harness compares is deterministic. p.grad of stock cannot show what masters have."""
    for case in map(random_case, range(40 if sweeps.FULL else 20)):
        assert case.loop.masters or failure(case, stand_in(case), exposes=exact(case)) is None


def test_the_plain_scaler_is_torchs():
    """Overflow now and then, in a loop of torch's own."""
    generator = random.Random(0)
    for interval in (1, 2, 3):
        torchs = torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=interval)
        oracle = SimpleNamespace(has_updated=True, found=False, loss_scale=1.0)
        plain = PlainScaler(Scaling("torch", 2.0**9, interval), oracle)
        p = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([p], lr=0.1)
        for _ in range(30):
            oracle.found = generator.random() < 0.3
            loss = p.sum() * (float("inf") if oracle.found else 1.0)
            assert torch.equal(torchs.scale(loss), plain.scale(loss)), "which losses are multiplied by"
            torchs.scale(loss).backward()
            torchs.step(optimizer), plain.note()
            torchs.update(), plain.update()
            optimizer.zero_grad()
            assert plain.state_dict().items() <= torchs.state_dict().items()


def follows(events, kinds, soon):
    """Whether an event of the one kind is among so many before one of the other."""
    found = [event.kind for event in events]
    before, after = kinds
    return any(kind == after and before in found[max(0, i - soon) : i] for i, kind in enumerate(found))


def cases_for(broken):
    """Cases in which this mistake can show, of ever more."""
    drawn = (case for case in map(random_case, range(400, 2000)) if not exact(case))
    for case in itertools.chain(CASES, drawn):
        if (
            (broken.feature is None or getattr(case.loop, broken.feature))
            and {event.kind for event in case.events}.issuperset(broken.events)
            and (broken.soon is None or follows(case.events, broken.events, broken.soon))
            and (broken.change is None or any(event.get("change") == broken.change for event in case.events))
            and (not issubclass(broken, Exposing) or Exposing.takes(case))
        ):
            yield case


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_wrapper_is_found_out(broken):
    honest, exposes = (Exposing, True) if issubclass(broken, Exposing) else (Naive, False)
    found = next(case for case in cases_for(broken) if failure(case, broken, exposes) is not None)
    assert failure(found, honest, exposes) is None
