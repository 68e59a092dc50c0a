"""The benchmarks that need the frameworks, at tiny sizes: peaks of every architecture, and whole mixtures of
experts. No time is asserted."""

import importlib
import os
from unittest import mock

import pytest
import torch
from experts_sums import assert_ways_add_the_same

# The package pins threads for the process that measures, not for what other tests start.
with mock.patch.dict(os.environ):
    importlib.import_module("benchmarks")

from benchmarks.contestants.zoo.architectures import architectures
from benchmarks.suites import experts, experts_model, planner
from benchmarks.suites.layers import INSIDE

CPU = torch.device("cpu")
TINY = {own.name: own for own in architectures(tiny=True)}
(SIZE,) = experts_model.SIZES["quick"]


@pytest.mark.parametrize("name", TINY)
def test_peak_of_each_architecture(name):
    """By `model=` and under autocast, where most is done by operators of ours."""
    found = planner.compared(TINY[name], "model=", planner.AUTOCAST, CPU)
    assert planner.off(*found) <= planner.TOLERANCE


@pytest.mark.parametrize("dtypes", experts.DTYPES)
def test_every_way_adds_the_same(dtypes):
    names = experts.WAYS[dtypes]
    ways = {way: experts_model.work(SIZE, dtypes, way, CPU) for way in names}
    assert_ways_add_the_same(ways, atol=4e-3)
    assert ways[INSIDE].bytes() < min(ways[way].bytes() for way in names if way != INSIDE)
    assert sum(slot.param.dim() == 3 for slot in ways[INSIDE].optimizer._slots) == 4
    assert " grouped " in ways[INSIDE].optimizer.explain()
