"""The benchmark on two ranks: all its loops give the same losses. No test checks times."""

import dataclasses

import pytest
import torch.distributed as dist
from bench_setup import CPU
from ranks import on_ranks

from benchmarks.contestants.loops import Demo
from benchmarks.suites.data_parallel import MODEL, VARIANTS
from examples.demo.measure import batches
from examples.demo.model import load_text


def config(dtype: str) -> Demo:
    return Demo(dtype, CPU, 2, width=32, layers=2, heads=2, context=16, micro_batch_size=2)


def losses(dtype: str) -> dict[str, list[float]]:
    """Return the losses of each way on this rank."""
    of, text = dataclasses.replace(config(dtype), seed=dist.get_rank()), load_text()
    found = {}
    for way in VARIANTS[dtype]:
        loop = way.make(of)
        found[way.name] = [loop.update(batches(text, of, update)).item() for update in range(4)]
    return found


@pytest.mark.parametrize("dtype", VARIANTS)
def test_all_ways_train_alike(dtype):
    for found in on_ranks(2, losses, dtype):
        inside = found.pop(MODEL.name)
        first, *others = found.values()
        assert others
        # float32 sums of two ranks, scaled by powers of two, have equal bits.
        assert others == [first] * len(others)
        assert inside == pytest.approx(first, rel=2.0**-8 if dtype == "bfloat16" else 2.0**-18)
        assert first[-1] < first[0]
