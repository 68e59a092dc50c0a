"""Errors on one rank: the other ranks soon raise an error too, or all ranks decide alike."""

import itertools
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loops import failing, network
from ranks import Pool, on_each_rank, on_ranks
from ranks_setting import (
    assert_nets_close,
    assert_ranks_equal,
    error_of,
    given,
    inner_of,
    refused,
    small_buckets,
    small_loss,
    train,
    wrap,
)
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _set_pg_timeout

import fusedacc

K = 3
#: Parts of gloo's message about a collective that not all ranks join in time.
TIMED_OUT = re.compile("timed out|timeout", re.IGNORECASE)


def made(kind: str = "ddp", **options: Any) -> tuple[nn.Module, nn.Module, fusedacc.AccumulatingOptimizer]:
    """Return a network, what the loop calls, and an optimizer that sends each gradient at once."""
    net = network()
    called, parallel = given(net, kind)
    with small_buckets(1):
        optimizer = wrap(net, K, **{"data_parallel": parallel} | options)
    assert len(optimizer._accumulation.ranks.parallel.reducer.buckets()) == 4
    return net, called, optimizer


def values(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def say(path: Path, value: object) -> None:
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(str(value))
    unfinished.rename(path)


def hear(path: Path) -> str:
    while not path.exists():
        time.sleep(0.01)
    return path.read_text()


def assert_over(called: nn.Module, optimizer: fusedacc.AccumulatingOptimizer, updates: int) -> None:
    """Check that a window whose last backward failed cannot continue."""
    before = values(called)
    for act in (optimizer.step, optimizer.flush, optimizer.state_dict):
        refused(RuntimeError, "discard()", act)
    assert torch.equal(before, values(called))
    optimizer.discard()
    assert (optimizer.micro_step, optimizer.num_updates) == (0, updates)
    train(called, optimizer, range(K - 1))  # sends nothing
    refused(RuntimeError, "restart from a checkpoint", lambda: small_loss(called, 0).backward())
    assert torch.equal(before, values(called))


def fails_by_a_closed_connection(backward: Callable[[], None]) -> None:
    """Check that the function fails without waiting for the timeout of the process group."""
    message = error_of(RuntimeError, backward)
    assert not TIMED_OUT.search(message), message


def is_killed(folder: Path) -> None:
    _, called, optimizer = made()
    train(called, optimizer, range(4 * K))
    torch.save(values(called), folder / f"never-killed-{dist.get_rank()}")

    net, called, optimizer = made()
    train(called, optimizer, range(2 * K + 1))
    torch.save((net.state_dict(), optimizer.state_dict()), folder / f"saved-{dist.get_rank()}")
    train(called, optimizer, [2 * K + 1])
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(0.1)  # the other rank probably waits by now
        os.kill(os.getpid(), signal.SIGKILL)
    fails_by_a_closed_connection(lambda: small_loss(called, 2 * K + 2).backward())
    assert_over(called, optimizer, updates=2)


def restarts(folder: Path) -> None:
    net, called, optimizer = made()
    model, saved = torch.load(folder / f"saved-{dist.get_rank()}")
    net.load_state_dict(model)
    optimizer.load_state_dict(saved)
    assert optimizer.micro_step == 1
    train(called, optimizer, range(2 * K + 1, 4 * K))
    assert torch.equal(values(called), torch.load(folder / f"never-killed-{dist.get_rank()}"))


def test_a_killed_rank_ends_the_others_and_a_restart_is_as_if_it_had_lived(tmp_path):
    assert Pool(2).run_last(is_killed, (tmp_path,)) == [0, -signal.SIGKILL]
    on_ranks(2, restarts, tmp_path)


def is_stopped(folder: Path) -> None:
    """Set a short timeout only after some training, because training on a busy machine may exceed it."""
    group = dist.new_group()
    _, called, optimizer = made("group", data_parallel=group)
    train(called, optimizer, range(2 * K - 1))
    _set_pg_timeout(timedelta(seconds=1), group)
    dist.barrier()
    if dist.get_rank() == 1:
        say(folder / "pid", os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP)
    with ExitStack() as stack:
        stack.callback(os.kill, int(hear(folder / "pid")), signal.SIGKILL)
        message = error_of(RuntimeError, lambda: small_loss(called, 2 * K - 1).backward())
        assert TIMED_OUT.search(message), message
        assert_over(called, optimizer, updates=1)


def test_a_stopped_rank_is_waited_for_no_longer_than_the_timeout(tmp_path):
    assert Pool(2).run_last(is_stopped, (tmp_path,)) == [0, -signal.SIGKILL]


def raises_between_two_buckets() -> None:
    net, called, optimizer = made()
    train(called, optimizer, range(2 * K - 1))
    dist.barrier()
    if dist.get_rank() == 1:
        with failing(net[0].weight):
            small_loss(called, 2 * K - 1).backward()
        optimizer.discard()
        train(called, optimizer, range(K - 1))
        given_up = "abandoned after some buckets were sent"
        refused(RuntimeError, given_up, lambda: small_loss(called, K - 1).backward())
        os._exit(7)
    fails_by_a_closed_connection(lambda: small_loss(called, 2 * K - 1).backward())
    assert_over(called, optimizer, updates=1)


def test_an_exception_between_two_buckets_is_the_end():
    """A rank that discards the window must not send again. The others would expect the next bucket."""
    assert Pool(2).run_last(raises_between_two_buckets, ()) == [0, 7]


@on_each_rank(2)
def test_another_list() -> None:
    """Each option differs on rank 1. Both ranks report the difference before anything changes."""
    for change, *told in (
        (lambda params: params[:-1], "4", "3"),
        (lambda params: [*params[:2], nn.Parameter(torch.zeros(4, 9)), params[3]], "(4, 9)", "(4, 3)"),
        (lambda params: [*params[:3], nn.Parameter(params[3].detach().double())], "float64", "'1.bias'"),
        (lambda params: [params[1], params[0], *params[2:]], "0.weight", "0.bias"),
    ):
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
        params = list(model.parameters())
        params = change(params) if dist.get_rank() == 1 else params
        inner = torch.optim.SGD(params, lr=0.1)
        before = [p.detach().clone() for p in params]
        options = {"model": model, "data_parallel": dist.group.WORLD}
        message = error_of(ValueError, lambda: fusedacc.AccumulatingOptimizer(inner, 2, **options))  # noqa: B023
        assert all(word in message for word in ("rank 1 has other parameters than rank 0", *told)), message
        assert all(map(torch.equal, before, params))
        inner.zero_grad()
        fusedacc.AccumulatingOptimizer(inner, 2).close()  # the failed wrapper leaves nothing behind


@on_each_rank(2)
def test_an_exception_that_a_rank_outlives() -> None:
    """The rank discards its window and starts it again."""
    for kind in ("ddp", "group"):
        wanted, called, optimizer = made(kind)
        train(called, optimizer, range(2 * K))
        net, called, optimizer = made(kind)
        train(called, optimizer, range(K + 1))
        if dist.get_rank() == 1:
            with failing(net[0].weight):
                small_loss(called, K + 1).backward()
            optimizer.discard()
            train(called, optimizer, [K])
        train(called, optimizer, range(K + 1, 2 * K))
        assert torch.equal(values(net), values(wanted))


@on_each_rank(2)
def test_weights_of_0() -> None:
    """Use weights of 0 on one rank, in one micro-batch, in all, and on both ranks."""
    for reduction, weights in itertools.product(
        ("weighted", "normalized"),
        (([2, 1, 3], [0, 0, 0]), ([0, 1, 0], [2, 0, 5]), ([0, 0, 0], [0, 0, 4]), ([0] * K, [0] * K)),
    ):
        net, called, optimizer = made(reduction=reduction)
        wanted, total = network(), sum(map(sum, weights))
        stock = inner_of(wanted)
        for index in range(2 * K):
            with optimizer.accumulate(weight=weights[dist.get_rank()][index % K]):
                small_loss(called, index).backward()
            optimizer.step(), optimizer.zero_grad()
            for rank in (0, 1):
                if weight := weights[rank][index % K]:
                    factor = weight if reduction == "weighted" else 1.0
                    (factor / total * small_loss(wanted, index, rank)).backward()
            if index % K == K - 1:
                stock.step(), stock.zero_grad()
        assert (optimizer.num_updates, optimizer.num_skipped) == (2, 0 if total else 2)
        assert_nets_close(net, wanted)
        assert_ranks_equal(net)


@on_each_rank(2)
def test_not_finite() -> None:
    """Use non-finite gradients on one rank, in the first, a middle or the last micro-batch, with clipping."""
    for kind in ("ddp", "group"):
        net, called, optimizer = made(kind, skip_nonfinite=True, max_grad_norm=1e-2)
        decisions = []
        for window, (where, value) in enumerate([(None, 0), (0, "nan"), (1, "inf"), (2, "nan"), (None, 0)]):
            before = values(net)
            for index in range(K):
                loss = small_loss(called, window * K + index)
                if dist.get_rank() == 1 and index == where:
                    loss = loss * float(value)
                loss.backward()
                optimizer.step(), optimizer.zero_grad()
            assert torch.equal(before, values(net)) == (where is not None)
            norms = [torch.zeros_like(optimizer.grad_norm) for _ in range(2)]
            dist.all_gather(norms, optimizer.grad_norm)
            assert torch.equal(*norms) or all(not norm.isfinite() for norm in norms)
            decisions.append((optimizer.num_updates, int(optimizer.num_skipped)))
        assert decisions == [(1, 0), (2, 1), (3, 2), (4, 3), (5, 3)], decisions
        assert_ranks_equal(net)
