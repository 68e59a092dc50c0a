"""experts.py: every way trains the same layer, and ours moves fewer bytes. No time is asserted."""

from __future__ import annotations

import pytest
import torch
from experts_sums import assert_ways_add_the_same

from benchmarks.contestants.experts import Shape
from benchmarks.harness.results import Results
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


def test_figures_are_kept_for_both_kinds_of_memory():
    results = Results(None)
    experts.figures(results, "quick")
    found = {(row.case, row.mode) for row in results.rows}
    assert {mode for _, mode in found} == {*experts.MODES, "backward"}
    assert all(row.median is not None for row in results.rows)
    held = [row for row in results.rows if row.provider == INSIDE and row.mode in experts.MODES]
    assert {row.against for row in held} == {STOCK, experts.HOOK}
