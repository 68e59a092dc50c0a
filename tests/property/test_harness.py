"""The property test tested: an honest wrapper passes it, and each of the broken ones is found out."""

from __future__ import annotations

import pytest

from .events import random_case
from .lockstep import exact, failure, stock
from .naive import BROKEN, Naive

CASES = [case for case in map(random_case, range(120)) if not exact(case)]


def stand_in(case):
    """The case's own oracle, looking like a wrapper."""

    def make(inner, loop):
        subject = stock(case)(inner, loop)
        subject.optimizer = inner
        return subject

    return make


def test_an_honest_wrapper_passes():
    """All cases by which the broken ones are found out."""
    assert [failure(case, Naive, exposes=False) for case in CASES] == [None] * len(CASES)


def test_two_stock_interpreters_never_differ():
    """What the harness compares is deterministic."""
    for case in map(random_case, range(30)):
        assert failure(case, stand_in(case), exposes=exact(case)) is None


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_wrapper_is_found_out(broken):
    assert any(failure(case, broken, exposes=False) is not None for case in CASES)
