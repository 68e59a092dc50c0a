"""A language model's head on two ranks equals one process that has all logits."""

import pytest
import torch
from ranks import on_each_rank
from ranks_setting import assert_nets_close, assert_ranks_equal, given, small_buckets, train_both, wrap
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from fusedacc.nn.functional import linear_cross_entropy

RANKS, CLASSES = 2, 50


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


def loss_of(model: nn.Module, index: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(2 * index + rank)
    return model(torch.randint(CLASSES, (12,), generator=generator))


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("kind", ["ddp", "group"])
@on_each_rank(RANKS)
def test_heads_of_two_ranks(kind: str, steps: int) -> None:
    net, wanted = Model(True), Model(False)
    called, told = given(net, kind)
    with small_buckets():
        optimizer = wrap(net, steps, model=called, data_parallel=told)
        train_both(called, optimizer, wanted, steps, loss_of)
    assert_nets_close(net, wanted)
    assert_ranks_equal(net)
    assert "head" in optimizer.explain()


@on_each_rank(RANKS)
def test_heads_of_fsdp2() -> None:
    """The gathered weight accumulates until this rank's shard gets its part."""
    net, wanted = fully_shard(Model(True)), Model(False)
    optimizer = wrap(net, 2, model=net)
    train_both(net, optimizer, wanted, 2, loss_of)
    for one, other in zip(net.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(one.full_tensor(), other)
    assert "head+embedding" in optimizer.explain()
