"""embedding.py: every way adds the same, and its bytes are those of the rows. No time is asserted."""

import pytest
import torch
from bench_setup import CPU

from benchmarks.suites import embedding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_way_adds_the_same(dtype):
    size, count = (300, 16), 40
    results, counted = [], []
    for way in range(3):
        torch.manual_seed(0)
        own = embedding.work(size, count, (dtype, torch.float32), CPU)
        variant = embedding.accumulations(own, size, count)[way]
        own.sums.zero_()
        own.turn_back()
        for _ in range(embedding.SETS):
            variant.run()
        results.append(own.sums)
        counted.append(variant.bytes)
    # Sums of at most 160 gradients; stock's bfloat16 gradient is rounded after every addition.
    loose = 0.1 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(results[0], results[2], rtol=loose, atol=loose)
    torch.testing.assert_close(results[1], results[2], rtol=1e-5, atol=1e-5)
    assert counted[2] < counted[1] < counted[0]
