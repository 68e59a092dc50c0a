"""layers.py, embedding.py and experts.py: all ways compute the same sums."""

import pytest
import torch
from bench_setup import CPU
from experts_sums import assert_ways_add_the_same

from benchmarks.contestants.experts import Shape
from benchmarks.suites import embedding, experts, layers
from benchmarks.suites.layers import INSIDE, STOCK, WAYS, WRAPPED

MATRICES, LOOKUP, CHAIN = ([(24, 8), (8, 8)], 6), ((50, 8, 6),), (3, 8)


def sums(work) -> list[torch.Tensor]:
    """Return the sums of the weights' gradients of two micro-batches."""
    torch.manual_seed(1)
    for _ in range(2):
        work.run()
    if work.optimizer is None:
        return [p.grad for p in work.model.parameters()]
    return [slot.accumulator * layers.ENDLESS for slot in work.optimizer._slots]


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (layers.linears, (*MATRICES, "float32")),
        (layers.linears, (*MATRICES, "autocast bfloat16 into float32")),
        (layers.linears, (*MATRICES, "bfloat16 into float32")),
        (layers.lookup, LOOKUP),
        (layers.chain, CHAIN),
    ],
)
def test_every_way_sums_the_same(make, shape):
    found = {way: sums(make(*shape, CPU, way)) for way in WAYS}
    # Some ways round products of bfloat16 to bfloat16, others do not.
    loose = 2.0**-6 if "bfloat16" in str(shape) else 1e-5
    for way in (WRAPPED, INSIDE):
        torch.testing.assert_close(found[way], found[STOCK], rtol=loose, atol=loose)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_way_adds_the_same_rows(dtype):
    size, count = (300, 16), 40
    results, counted = [], []
    for way in range(3):
        torch.manual_seed(0)
        own = embedding.Lookups(size, count, (dtype, torch.float32), CPU)
        variant = embedding.accumulations(own, size, count)[way]
        own.sums.zero_()
        for _ in range(embedding.SETS):
            variant.run()
        results.append(own.sums)
        counted.append(variant.bytes)
    # Sums of at most 160 gradients; stock's bfloat16 gradient is rounded after every addition.
    loose = 0.1 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(results[0], results[2], rtol=loose, atol=loose)
    torch.testing.assert_close(results[1], results[2], rtol=1e-5, atol=1e-5)
    assert counted[2] < counted[1] < counted[0]


@pytest.mark.parametrize("dtypes", experts.DTYPES)
@pytest.mark.parametrize("layer", ["grouped", "loop"])
def test_every_way_adds_the_same_experts(layer, dtypes):
    shape = Shape(4, 32, 16, 8, 2)
    ways = {way: experts.work(shape, layer, dtypes, way, CPU) for way in experts.WAYS[dtypes]}
    assert_ways_add_the_same(ways, atol=1e-3)
    assert ways[INSIDE].bytes() < ways[STOCK].bytes()
