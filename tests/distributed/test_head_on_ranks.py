"""A language model's head on two ranks equals one process that has all logits."""

import pytest
import torch
import torch.distributed as dist
from ranks import on_each_rank
from ranks_setting import assert_nets_close, assert_ranks_equal, given, inner_of, small_buckets, wrap
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import fusedacc
from fusedacc.nn.functional import linear_cross_entropy

RANKS, UPDATES, CLASSES = 2, 3, 50


class Model(nn.Module):
    """A model with tied weights. `fused`: it computes the loss without logits."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer, self.fused = nn.Embedding(CLASSES, 8), nn.Linear(8, 8), fused

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, weight = self.layer(self.embedding(tokens[:-1])), self.embedding.weight
        if self.fused:
            return linear_cross_entropy(hidden, weight, tokens[1:], slice_size=16)
        return F.cross_entropy(F.linear(hidden, weight), tokens[1:])


def tokens_of(index: int) -> Tensor:
    return torch.randint(CLASSES, (12,), generator=torch.Generator().manual_seed(index))


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("kind", ["ddp", "group"])
@on_each_rank(RANKS)
def test_heads_of_two_ranks(kind: str, steps: int) -> None:
    rank, net, wanted = dist.get_rank(), Model(True), Model(False)
    called, told = given(net, kind)
    stock = inner_of(wanted)
    with small_buckets():
        optimizer = wrap(net, steps, model=called, data_parallel=told)
        for window in range(UPDATES):
            for index in range(window * steps, (window + 1) * steps):
                called(tokens_of(2 * index + rank)).backward()
                optimizer.step(), optimizer.zero_grad()
                for each in range(RANKS):
                    (wanted(tokens_of(2 * index + each)) / (steps * RANKS)).backward()
            stock.step(), stock.zero_grad()
    assert_nets_close(net, wanted)
    assert_ranks_equal(net)
    assert "head" in optimizer.explain()


@on_each_rank(RANKS)
def test_heads_of_fsdp2() -> None:
    """The gathered weight accumulates until this rank's shard gets its part."""
    rank, net, wanted = dist.get_rank(), Model(True), Model(False)
    fully_shard(net)
    optimizer, stock = fusedacc.AccumulatingOptimizer(inner_of(net), 2, model=net), inner_of(wanted)
    for index in range(4):
        with optimizer.accumulate(net):
            net(tokens_of(2 * index + rank)).backward()
        optimizer.step(), optimizer.zero_grad()
        for each in range(RANKS):
            (wanted(tokens_of(2 * index + each)) / (2 * RANKS)).backward()
        if index % 2:
            stock.step(), stock.zero_grad()
    for one, other in zip(net.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(one.full_tensor(), other)
    assert "head+embedding" in optimizer.explain()
