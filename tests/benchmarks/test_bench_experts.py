"""experts.py: every way trains the same layer, and ours moves fewer bytes. No time is asserted."""

from __future__ import annotations

import pytest
import torch

from benchmarks.contestants.experts import Shape
from benchmarks.harness.results import Results
from benchmarks.suites import experts
from benchmarks.suites.layers import INSIDE, STOCK

SHAPE = Shape(4, 32, 16, 8, 2)


def sums_of(own):
    if own.optimizer is not None:
        return [slot.accumulator for slot in own.optimizer._slots]
    return [getattr(p, "total", p.grad) for p in own.model.parameters()]


@pytest.mark.parametrize("dtypes", experts.DTYPES)
@pytest.mark.parametrize("layer", ["grouped", "loop"])
def test_every_way_adds_the_same(layer, dtypes):
    names = experts.WAYS[dtypes]
    ways = {way: experts.work(SHAPE, layer, dtypes, way, torch.device("cpu")) for way in names}
    for own in ways.values():
        own.run()
        own.run()
    sums = {way: sums_of(own) for way, own in ways.items()}
    for way, found_sums in sums.items():
        for ours, theirs in zip(found_sums, sums[STOCK], strict=True):
            assert ours.dtype == torch.float32
            # Sums of a mean hold another unit, which the update takes out.
            found, wanted = (each.float() / each.float().norm() for each in (ours, theirs))
            torch.testing.assert_close(found, wanted, rtol=0.02, atol=1e-3, msg=way)
    assert ways[INSIDE].bytes() < ways[STOCK].bytes()


def test_figures_are_kept_for_both_kinds_of_memory():
    results = Results(None)
    experts.figures(results, "quick")
    found = {(row.case, row.mode) for row in results.rows}
    assert {mode for _, mode in found} == {*experts.MODES, "backward"}
    assert all(row.median is not None for row in results.rows)
    held = [row for row in results.rows if row.provider == INSIDE and row.mode in experts.MODES]
    assert {row.against for row in held} == {STOCK, experts.HOOK}
