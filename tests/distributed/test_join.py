"""Ranks with different numbers of micro-batches in torch's `Join` equal one process."""

import torch
import torch.distributed as dist
from ranks import on_each_rank
from ranks_setting import assert_ranks_equal, inner_of, refused, small_loss, wrap
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import fusedacc

K, EPOCHS = 2, 2


def network(buffers=False):
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(5, momentum=0.5) if buffers else nn.Identity()
    return nn.Sequential(nn.Linear(4, 5), norm, nn.Tanh(), nn.Linear(5, 2))


def weight(index, of_rank):
    return index + 2 * of_rank + 1


def one_process(windows, weighted=False):
    """Train one process.

    A window is a list of (index, rank). The learning rate is halved after each update.
    """
    model = network()
    optimizer = inner_of(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for window in windows * EPOCHS:
        shares = [weight(*each) if weighted else 1 for each in window]
        for each, share in zip(window, shares, strict=True):
            (small_loss(model, *each) * (share / sum(shares))).backward()
        optimizer.step(), scheduler.step(), optimizer.zero_grad()
    return model


def trained(lengths, flushes, attach, weighted=False, buffers=False, fused=False, **options):
    model = network(buffers)
    parallel = model if attach == "group" else DistributedDataParallel(model)
    ranks = {"group": dist.group.WORLD, "ddp": parallel, "late": None}[attach]
    reduction = "weighted" if weighted else "mean"
    options |= {"reduction": reduction, "data_parallel": ranks, "model": model if fused else None}
    optimizer = wrap(model, K, **options)
    if attach == "late":
        optimizer.attach(parallel)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(EPOCHS):
        with Join([optimizer], after_update=scheduler.step):
            for index in range(lengths[dist.get_rank()]):
                with optimizer.accumulate(weight=weight(index, dist.get_rank()) if weighted else None):
                    small_loss(parallel, index).backward()
                optimizer.step()
                if optimizer.has_updated:
                    scheduler.step()
                optimizer.zero_grad()
        if flushes:
            optimizer.flush()
            if optimizer.has_updated:
                scheduler.step()
    return model, optimizer, scheduler


def pairs(of_0, of_1):
    return [(i, 0) for i in of_0] + [(i, 1) for i in of_1]


@on_each_rank(2)
def test_equal_to_one_process() -> None:
    """Test with DDP, with DDP that is found late, and with a group; weighted, clipped, with model=."""
    five_two = [pairs([0, 1], [0, 1]), pairs([2, 3], []), pairs([4], [])]
    none = [pairs([], [0, 1]), pairs([], [2])]
    # Rank 0's remaining micro-batches belong to the next window of rank 1.
    three_five = [pairs([0, 1], [0, 1]), pairs([2], [2, 3]), pairs([], [4])]
    for lengths, windows in (((5, 2), five_two), ((0, 3), none), ((3, 5), three_five)):
        for attach, options in (
            ("ddp", {}),
            ("late", {"weighted": True}),
            ("group", {"max_grad_norm": 1e9}),
            ("ddp", {"fused": True}),
        ):
            what = f"{lengths}, {attach}, {options}: "
            model, optimizer, scheduler = trained(lengths, True, attach, **options)
            wanted = one_process(windows, "weighted" in options)
            torch.testing.assert_close(
                [*model.parameters()], [*wanted.parameters()], rtol=3e-7, atol=3e-7, msg=what.__add__
            )
            assert optimizer.num_updates == scheduler.last_epoch == len(windows) * EPOCHS, what
            assert_ranks_equal(model, what)


@on_each_rank(2)
def test_windows_without_a_flush() -> None:
    """The micro-batches stay for the next epoch, and Join leaves nothing behind."""
    _, optimizer, _ = trained((3, 3), False, "ddp")
    assert (optimizer.num_updates, optimizer.micro_step) == (3, 0)
    assert optimizer._join_config.enable is False


@on_each_rank(2)
def test_buffers_are_those_of_the_first_rank() -> None:
    """This also holds after forward passes of the second rank only."""
    model, *_ = trained((5, 2), True, "ddp", buffers=True)
    assert_ranks_equal(model, buffers=True)


@on_each_rank(2)
def test_an_exception_on_every_rank() -> None:
    """An exception on every rank ends the uneven inputs."""
    model = network()
    parallel = DistributedDataParallel(model)
    optimizer = wrap(model, 1, data_parallel=parallel)

    def until_one_has_none():
        with Join([optimizer], throw_on_early_termination=True):
            for index in range((3, 1)[dist.get_rank()]):
                small_loss(parallel, index).backward()
                optimizer.step(), optimizer.zero_grad()

    refused(RuntimeError, "exhausted", until_one_has_none)
    assert optimizer.num_updates == 1
    optimizer.discard()


@on_each_rank(2)
def test_what_is_refused() -> None:
    """The error comes before a collective."""
    model = network()
    parallel = DistributedDataParallel(model)
    optimizer = wrap(model, 1, data_parallel=parallel)

    def forward_in_its_join():
        with Join([parallel]):
            small_loss(parallel, 0)

    refused(RuntimeError, "Join([optimizer])", parallel.join)
    with parallel.join(enable=False):
        pass
    refused(RuntimeError, "Join([optimizer])", forward_in_its_join)
    again = network()
    enabled = DistributedDataParallel(again)
    enabled._join_config = parallel._join_config
    third = wrap(again, 1)
    refused(ValueError, "inside its own join()", lambda: third.attach(enabled))
    refused(RuntimeError, "data_parallel=", lambda: Join([third]))
    optimizer.close()
    assert "join" not in parallel.__dict__
    assert parallel.require_backward_grad_sync
    manual = wrap(model, None, data_parallel=dist.group.WORLD)
    refused(RuntimeError, "needs a counted loop", lambda: Join([manual]))


@on_each_rank(2)
def test_a_scale_that_changes() -> None:
    """A rank without losses does not know the scale."""
    model = network()
    scaler = fusedacc.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = wrap(model, 1, data_parallel=dist.group.WORLD)

    def scaled():
        with Join([optimizer]):
            scaler.scale(small_loss(model, 0)).backward()
            scaler.step(optimizer)

    refused(RuntimeError, "GradScaler", scaled)
    assert optimizer.num_updates == 0
