"""Sketches: linear maps, which add up over shards and chunks."""

import pytest
import torch

from fusedacc.auditing import sketches
from fusedacc.auditing.sketches import SketchMap

SHAPES = [(), (1,), (7,), (100,), (3, 5), (64, 65), (8, 3, 3, 3), (1000, 2), (2, 1000)]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_sketch_of_a_sum_is_the_sum_of_the_sketches(shape, generator):
    sketch = SketchMap().sketch
    a = torch.randn(shape, generator=generator, dtype=torch.float64)
    b = torch.randn(shape, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(sketch(a + 2 * b, a.shape), sketch(a, a.shape) + 2 * sketch(b, b.shape))
    assert len(sketch(a, a.shape)) <= 64


@pytest.mark.parametrize("shape", [(10,), (10, 7), (10, 3, 3)])
def test_sketches_of_shards_add_up(shape, generator):
    sketch = SketchMap().sketch
    gradient = torch.randn(shape, generator=generator)
    parts = [sketch(gradient[first : first + 4], gradient.shape, first) for first in (0, 4, 8)]
    torch.testing.assert_close(sum(parts), sketch(gradient, gradient.shape))


def test_chunks_add_up(generator, monkeypatch):
    gradient = torch.randn(50, 33, generator=generator)
    whole = SketchMap().sketch(gradient, gradient.shape)
    monkeypatch.setattr(sketches, "CPU_CHUNK", 100)
    torch.testing.assert_close(SketchMap().sketch(gradient, gradient.shape), whole)


def test_norms_are_kept_on_average(generator):
    sketch = SketchMap().sketch
    gradients = [torch.randn(40, 30, generator=generator, dtype=torch.float64) for _ in range(200)]
    ratios = torch.tensor([float(sketch(g, g.shape).norm() / g.norm()) for g in gradients])
    # The variance of one squared ratio is about 2/8 + 2/8, so the mean of 200 is within 3 * 0.35 / sqrt(200).
    assert abs(ratios.square().mean() - 1) < 0.15


def test_sparse_and_empty_gradients():
    sketch = SketchMap().sketch
    dense = torch.zeros(6, 4)
    dense[2] = 1.0
    torch.testing.assert_close(sketch(dense.to_sparse(1), dense.shape), sketch(dense, dense.shape))
    assert not sketch(torch.zeros(0), torch.Size((6, 4))).any()


def test_the_random_state_of_the_script_is_left_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    SketchMap().sketch(torch.ones(100, 100), torch.Size((100, 100)))
    assert torch.equal(torch.get_rng_state(), before)
