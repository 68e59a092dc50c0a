"""Two ranks whose wrapper was given no `data_parallel`: training equals stock's."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from loops import network
from ranks import on_ranks
from ranks_setting import assert_nets_close, assert_ranks_equal, one_process, small_loss, wrap
from torch import nn
from torch.nn.parallel import DistributedDataParallel

K, UPDATES = 2, 2


def trains(loop: str) -> None:
    net = network()
    parallel = net if loop == "without DDP" else DistributedDataParallel(net)
    optimizer = wrap(parallel, None if loop == "manual" else K)
    for index in range(K * UPDATES):
        last = index % K == K - 1
        context = contextlib.nullcontext()
        if loop == "accumulate()":
            context = optimizer.accumulate(model=parallel)
        elif loop == "manual" and not last:
            context = parallel.no_sync()
        with context:
            assert loop != "accumulate()" or not parallel.require_backward_grad_sync, "the wrapper reduces"
            (small_loss(parallel, index) / (K if loop == "manual" else 1)).backward()
        if loop != "manual" or last:
            optimizer.step(), optimizer.zero_grad()
    assert optimizer.num_updates == UPDATES
    ranks = [dist.get_rank()] if loop == "without DDP" else [0, 1]
    assert_nets_close(net, one_process(K, range(K * UPDATES), ranks))
    if loop == "without DDP":
        assert "process group" in optimizer.explain()
    optimizer.close()


@pytest.mark.parametrize("loop", ["accumulate()", "every micro-batch", "manual", "without DDP"])
def test_two_ranks_train_as_stock(loop):
    on_ranks(2, trains, loop)


def clips(silent: bool) -> None:
    net = network()
    parallel = DistributedDataParallel(net)
    optimizer = wrap(parallel, K)
    for index in range(K):
        with optimizer.accumulate(model=parallel) if silent else contextlib.nullcontext():
            small_loss(parallel, index).backward()
        if optimizer.will_update:
            nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        optimizer.step()
    assert optimizer.num_updates == 1
    norm = nn.utils.get_total_norm([p.grad for p in net.parameters()])
    torch.testing.assert_close(norm, torch.tensor(1e-3), rtol=1e-4, atol=0)
    for p in net.parameters():
        p.data.copy_(p.grad)
    assert_ranks_equal(net)
    optimizer.close()


@pytest.mark.parametrize("silent", [True, False])
def test_gradients_are_clipped_between_the_last_backward_and_step(silent):
    on_ranks(2, clips, silent)
