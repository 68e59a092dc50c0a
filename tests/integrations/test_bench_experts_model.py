"""The benchmark of a whole mixture of experts: every way trains the same model, ours moves fewer bytes. No
time is asserted."""

from __future__ import annotations

import importlib
import os
from unittest import mock

import pytest
import torch

# The package pins threads for the process that measures, not for what other tests start.
with mock.patch.dict(os.environ):
    importlib.import_module("benchmarks")

from experts_sums import assert_ways_add_the_same

from benchmarks.suites import experts, experts_model
from benchmarks.suites.layers import INSIDE

(SIZE,) = experts_model.SIZES["quick"]


@pytest.mark.parametrize("dtypes", experts.DTYPES)
def test_every_way_adds_the_same(dtypes):
    names = experts.WAYS[dtypes]
    ways = {way: experts_model.work(SIZE, dtypes, way, torch.device("cpu")) for way in names}
    assert_ways_add_the_same(ways, atol=4e-3)
    assert ways[INSIDE].bytes() < min(ways[way].bytes() for way in names if way != INSIDE)
    assert sum(slot.param.dim() == 3 for slot in ways[INSIDE].optimizer._slots) == 4
    assert " grouped " in ways[INSIDE].optimizer.explain()
