"""Mixtures of experts on two ranks, each with tokens for different experts, equal one process."""

import pytest
from experts_models import Mixture, loss_of
from ranks import on_each_rank
from ranks_setting import assert_nets_close, assert_ranks_equal, given, small_buckets, train_both, wrap
from torch import Tensor, nn


def loss_of_rank(model: nn.Module, index: int, rank: int) -> Tensor:
    return loss_of(model, 2 * index + rank, unused=4)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("kind", ["ddp", "group"])
@pytest.mark.parametrize(("how", "stock_way"), [("grouped", "stock"), ("loop", "loop")])
@on_each_rank(2)
def test_experts_of_two_ranks(how: str, stock_way: str, kind: str, steps: int) -> None:
    """With one step per window, sums are sent during the backward when only some experts are written."""
    net, wanted = Mixture(how), Mixture(stock_way)
    called, told = given(net, kind)
    with small_buckets():
        optimizer = wrap(net, steps, model=called, data_parallel=told)
        train_both(called, optimizer, wanted, steps, loss_of_rank, windows=4)
    assert_nets_close(net, wanted)
    assert_ranks_equal(net)
    assert all(slot.paths == ("grouped",) for slot in optimizer._slots if slot.param.dim() == 3)
