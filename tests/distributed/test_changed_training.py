"""Parameters that are unfrozen between windows, and other changes that the wrapper cannot predict."""

import pytest
import torch
import torch.distributed as dist
from loops import failing
from ranks import on_each_rank
from ranks_setting import assert_nets_close, assert_ranks_equal, given, inner_of, small_buckets, wrap
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANKS = 2


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 2))


def loss_of(model: nn.Module, index: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * index + rank)
    return model(torch.randn(4, 30, generator=generator)).pow(2).mean()


@pytest.mark.sweep
@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize("kind", ["ddp", "ddp that may change", "group"])
@pytest.mark.parametrize("steps", [1, 2, 3])
@on_each_rank(RANKS)
def test_what_is_unfrozen_is_reduced_in_its_first_window(steps: int, kind: str, idle: bool) -> None:
    """Run four windows, then unfreeze one layer. If `idle`, rank 1 computes no gradients for it."""
    rank, net, wanted = dist.get_rank(), network(), network()
    net[4].requires_grad_(False)
    with small_buckets():
        called, told = given(net, kind)
        optimizer = wrap(net, steps, data_parallel=told)
        for epoch in range(2):
            net[4].requires_grad_(epoch == 1)
            for index in range(4 * steps) if epoch == 0 or rank == 0 or not idle else ():
                loss_of(called, 100 * epoch + index, rank).backward()
                optimizer.step(), optimizer.zero_grad()
            optimizer.flush(), optimizer.zero_grad()
    stock = inner_of(wanted)
    for epoch in range(2):
        wanted[4].requires_grad_(epoch == 1)
        ranks = (0,) if epoch and idle else range(RANKS)
        for index in range(4 * steps):
            for each in ranks:
                (loss_of(wanted, 100 * epoch + index, each) / (steps * len(ranks))).backward()
            if (index + 1) % steps == 0:
                stock.step(), stock.zero_grad()
    assert_nets_close(net, wanted)
    assert_ranks_equal(net)


@pytest.mark.parametrize("kind", ["ddp that may change", "group"])
@on_each_rank(RANKS)
def test_what_is_unfrozen_in_a_manual_loop_becomes_a_sum(kind: str) -> None:
    """Run the same with a bfloat16 model in a manual loop, whose sums are float32."""
    rank, net, wanted = dist.get_rank(), network().bfloat16(), network().bfloat16()
    net[4].requires_grad_(False)
    called, told = given(net, kind)
    optimizer = wrap(net, None, data_parallel=told)
    for epoch in range(2):
        net[4].requires_grad_(epoch == 1)
        # Rank 1 uses the layer in no forward, but still gets its gradient.
        part = called if rank == 0 or epoch == 0 or kind != "group" else net[:4]
        for index in range(3):
            x = torch.randn(4, 30, generator=torch.Generator().manual_seed(index)).bfloat16()
            part(x).float().pow(2).mean().backward()
            assert all(p.grad is None or p.grad.dtype == torch.float32 for p in net.parameters())
            optimizer.step(), optimizer.zero_grad()
    assert not torch.equal(net[4].weight, wanted[4].weight)
    assert_ranks_equal(net)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("kind", ["ddp", "group"])
@pytest.mark.parametrize("steps", [1, 3])
@on_each_rank(RANKS)
def test_gradients_that_have_a_graph_are_reduced(steps: int, kind: str) -> None:
    """Run backwards whose gradients have a graph, which autograd stores."""
    rank, net, wanted = dist.get_rank(), network(), network()
    with small_buckets():
        called, told = given(net, kind)
        optimizer = wrap(net, steps, data_parallel=told)
        for index in range(3 * steps):
            loss_of(called, index, rank).backward(create_graph=True)
            optimizer.step(), optimizer.zero_grad()
    stock = inner_of(wanted)
    for index in range(3 * steps):
        for each in range(RANKS):
            (loss_of(wanted, index, each) / (steps * RANKS)).backward()
        if (index + 1) % steps == 0:
            stock.step(), stock.zero_grad()
    assert_nets_close(net, wanted)
    assert_ranks_equal(net)


@on_each_rank(RANKS)
def test_what_a_failed_backward_has_delivered_is_no_rule() -> None:
    """Two backwards that fail at the same place do not predict the next one."""
    rank, net = dist.get_rank(), network()
    parallel = DistributedDataParallel(net)
    with small_buckets():
        optimizer = wrap(net, 1, data_parallel=parallel)
        for _ in range(2):
            with failing(net[2].weight):
                loss_of(parallel, 0, rank).backward()
            optimizer.discard()
        loss_of(parallel, 0, rank).backward()
        optimizer.step(), optimizer.zero_grad()
    assert optimizer.num_updates == 1
    assert_ranks_equal(net)


#: The layer that is frozen in each window.
FROZEN = (2, 2, None, None, None, 0, None, None)


@pytest.mark.parametrize("kind", ["ddp", "group"])
@on_each_rank(RANKS)
def test_a_layer_is_thawed_between_windows_of_one(kind: str) -> None:
    """The first window after unfreezing a layer equals earlier windows. The layer has no hook then."""
    rank, net, wanted = dist.get_rank(), network(), network()
    stock = inner_of(wanted)
    with small_buckets():
        called, told = given(net, kind)
        optimizer = wrap(net, 1, data_parallel=told)
        for window, frozen in enumerate(FROZEN):
            for each in (net, wanted):
                for index in (0, 2, 4):
                    each[index].requires_grad_(index != frozen)
            loss_of(called, window, rank).backward()
            optimizer.step(), optimizer.zero_grad()
            for each in range(RANKS):
                (loss_of(wanted, window, each) / RANKS).backward()
            stock.step(), stock.zero_grad()
    assert_nets_close(net, wanted)
    assert_ranks_equal(net)
