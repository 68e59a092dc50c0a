"""experts.py: every way trains the same layer, and ours moves fewer bytes. No time is asserted."""

import pytest
import torch
from experts_sums import assert_ways_add_the_same

from benchmarks.contestants.experts import Shape
from benchmarks.suites import experts
from benchmarks.suites.layers import INSIDE, STOCK

SHAPE = Shape(4, 32, 16, 8, 2)


@pytest.mark.parametrize("dtypes", experts.DTYPES)
@pytest.mark.parametrize("layer", ["grouped", "loop"])
def test_every_way_adds_the_same(layer, dtypes):
    names = experts.WAYS[dtypes]
    ways = {way: experts.work(SHAPE, layer, dtypes, way, torch.device("cpu")) for way in names}
    assert_ways_add_the_same(ways, atol=1e-3)
    assert ways[INSIDE].bytes() < ways[STOCK].bytes()
