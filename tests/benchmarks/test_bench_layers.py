"""layers.py: every way sums the same, and its bytes are those that were promised. No time is asserted."""

from __future__ import annotations

import pytest
import torch
from bench_setup import CPU

from benchmarks.suites import layers


def sums(work) -> list[torch.Tensor]:
    """What the weights' gradients of two micro-batches add up to."""
    torch.manual_seed(1)
    for _ in range(2):
        work.run()
    if work.optimizer is None:
        return [p.grad for p in work.model.parameters()]
    slots = work.optimizer._slots
    return [slot.accumulator * layers.ENDLESS for slot in slots]


@pytest.mark.parametrize("dtypes", ["float32", "autocast bfloat16 into float32", "bfloat16 into float32"])
def test_every_way_sums_the_same(dtypes):
    found = {way: sums(layers.linears([(24, 8), (8, 8)], 6, dtypes, CPU, way)) for way in layers.WAYS}
    # Products of bfloat16 may be rounded to it in one way and not in another.
    loose = 1e-5 if dtypes == "float32" else 2.0**-6
    for way in (layers.WRAPPED, layers.INSIDE):
        torch.testing.assert_close(found[way], found[layers.STOCK], rtol=loose, atol=loose)


@pytest.mark.parametrize("make", ["lookup", "chain"])
def test_the_others_too(make):
    shape = ((50, 8, 6),) if make == "lookup" else (3, 8)
    found = {way: sums(getattr(layers, make)(*shape, CPU, way)) for way in layers.WAYS}
    for way in (layers.WRAPPED, layers.INSIDE):
        torch.testing.assert_close(found[way], found[layers.STOCK], rtol=1e-5, atol=1e-6)
