"""With gradients that functions add to sinks the wrapper equals plain PyTorch under random events, as in
test_property.py.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from sink_functions import write_product
from torch import Tensor, nn

import fusedacc

from . import collector, models
from .events import random_case
from .legality import exact
from .lockstep import failure, report
from .models import Dense
from .oracle import spread
from .test_main_grad import repeats
from .test_property import COUNT, ONE, check_norms, choose_engine, shrink_buckets, wrapping
from .world import Case

SEEDS = range(max(COUNT // 4, 1)) if ONE is None else [int(ONE)]


def add_product(sink: fusedacc.Sink, left: Tensor, right: Tensor) -> None:
    sink.add_product(left, right)


def add(sink: fusedacc.Sink, left: Tensor, right: Tensor) -> None:
    sink.add(left.t() @ right)


class Product(torch.autograd.Function):
    """rows @ weight.T, whose backward adds the weight's gradient in one of the ways."""

    @staticmethod
    def forward(ctx, rows: Tensor, weight: Tensor, way: Callable[..., None]) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.way = way
        return rows @ weight.t()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        sink = fusedacc.sink(weight)
        if sink is None:
            return grad @ weight, grad.t() @ rows, None
        ctx.way(sink, grad, rows)
        return grad @ weight, None, None


class Rows(torch.autograd.Function):
    """weight[indices], whose backward adds rows to the weight's sum; their dense gradient if `adds_dense`."""

    @staticmethod
    def forward(ctx, indices: Tensor, weight: Tensor, adds_dense: bool) -> Tensor:
        ctx.save_for_backward(indices, weight)
        ctx.adds_dense = adds_dense
        return weight[indices]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor | None, None]:
        indices, weight = ctx.saved_tensors

        def dense() -> Tensor:
            return torch.ops.aten.embedding_dense_backward(grad, indices, len(weight), -1, False)

        sink = fusedacc.sink(weight)
        if sink is None:
            return None, dense(), None
        if ctx.adds_dense:
            sink.add(dense())
        else:
            sink.add_rows(indices, grad)
        return None, None, None


def without_same_bits(case: Case) -> Case:
    """Return a case that allows other bits, because a product is added to the sum before it is rounded."""
    return replace(case, loop=replace(case.loop, clip=1.0)) if exact(case) else case


def is_low(case: Case) -> bool:
    """Whether gradients or sums are ever in a low-precision dtype."""
    dtypes = {case.model.dtype, *(event.get("dtype") for event in case.events)}
    return bool(dtypes & {"bfloat16", "float16"}) or case.loop.accumulate_dtype is not None


def adds_up(case: Case) -> bool:
    """Whether autograd adds up several gradients of a weight before they reach the sum."""
    return repeats(case) or case.model.tied


def spread_of_terms(gradient: Tensor) -> Tensor:
    """Return what bounds the terms of a gradient that has lost some of their digits: they may have cancelled
    each other.
    """
    each = spread(gradient)
    return each + 4 * each.nan_to_num(0.0, 0.0, 0.0).max() if each.numel() else each


@pytest.mark.parametrize("seed", SEEDS)
def test_training_with_sinks_equals_stock(seed, monkeypatch):
    case, make = without_same_bits(random_case(seed)), wrapping(seed)
    low = is_low(case)
    # `add_product` rounds nothing to the parameter's dtype.
    ways = (add, write_product) if low else (add_product, add, write_product)
    way = ways[seed % len(ways)]
    if low and adds_up(case):  # a loop that rounds each sum is no oracle
        monkeypatch.setattr(fusedacc, "sink", lambda weight: None)
    monkeypatch.setattr(collector, "spread", spread_of_terms)

    def dense(self: Dense, x: Tensor) -> Tensor:
        rows = Product.apply(x.reshape(-1, x.shape[-1]), self.linear.weight, way)
        return torch.tanh(rows.view(x.shape) + self.linear.bias)

    def embedding(self: nn.Embedding, indices: Tensor) -> Tensor:
        if self.sparse:
            return torch.nn.functional.embedding(indices, self.weight, sparse=True)
        return Rows.apply(indices, self.weight, low)

    monkeypatch.setattr(models.Dense, "forward", dense)
    monkeypatch.setattr(nn.Embedding, "forward", embedding)
    shrink_buckets(seed, monkeypatch)
    choose_engine(case, seed, monkeypatch)
    check_norms(monkeypatch)
    failed = failure(case, make) is not None
    assert not failed, report(case, make)
