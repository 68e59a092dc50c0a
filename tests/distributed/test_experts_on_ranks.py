"""Mixtures of experts on two ranks, each with tokens for different experts, equal one process."""

import pytest
import torch.distributed as dist
from experts_models import Mixture, loss_of
from ranks import on_each_rank
from ranks_setting import assert_nets_close, assert_ranks_equal, given, inner_of, small_buckets, wrap

RANKS, UPDATES = 2, 4


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("kind", ["ddp", "group"])
@pytest.mark.parametrize(("how", "stock_way"), [("grouped", "stock"), ("loop", "loop")])
@on_each_rank(RANKS)
def test_experts_of_two_ranks(how: str, stock_way: str, kind: str, steps: int) -> None:
    """With one step per window, sums are sent during the backward when only some experts are written."""
    rank, net, wanted = dist.get_rank(), Mixture(how), Mixture(stock_way)
    called, told = given(net, kind)
    stock = inner_of(wanted)
    with small_buckets():
        optimizer = wrap(net, steps, model=called, data_parallel=told)
        for window in range(UPDATES):
            for index in range(window * steps, (window + 1) * steps):
                loss_of(called, 2 * index + rank, unused=4).backward()
                optimizer.step(), optimizer.zero_grad()
                for each in range(RANKS):
                    (loss_of(wanted, 2 * index + each, unused=4) / (steps * RANKS)).backward()
            stock.step(), stock.zero_grad()
    assert_nets_close(net, wanted)
    assert_ranks_equal(net)
    assert all(slot.paths == ("grouped",) for slot in optimizer._slots if slot.param.dim() == 3)
