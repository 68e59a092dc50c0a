"""A counted loop synchronizes in the last micro-batch with `accumulate(ddp)`; `ddp.no_sync()` is an error."""

import contextlib
import functools
import gc
import itertools

import torch
import torch.distributed as dist
from loops import network
from one_rank import process_group
from ranks import on_each_rank
from ranks_setting import assert_nets_close, one_process, refused, small_loss, train, wrap
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel

import fusedacc


def refuses(parallel: nn.Module, forward_only: bool = False) -> None:
    """Check that a micro-batch without synchronization raises an error that names the alternative."""
    with parallel.no_sync():
        loss = small_loss(parallel, 1)
        if not forward_only:
            refused(RuntimeError, "optimizer.accumulate(ddp)", loss.backward)
    if forward_only:
        refused(RuntimeError, "optimizer.accumulate(ddp)", loss.backward)


def trains_after_a_refusal(steps: int, options: dict, kind: str, before: bool, begun: bool) -> None:
    """The error changes nothing, and the window after `discard()` equals plain PyTorch's.

    Args:
        kind: "model" for `model=`, "forward" if only the forward is in `no_sync()`.
        before: whether DDP is made before the wrapper.
        begun: whether the window already has a micro-batch.
    """
    net = network()
    parallel = DistributedDataParallel(net, **options) if before else None
    optimizer = wrap(net, steps, **({"model": net} if kind == "model" else {}))
    if parallel is None:
        parallel = DistributedDataParallel(net, **options)
    start = [p.clone() for p in net.parameters()]
    if begun:
        small_loss(parallel, 0).backward()
        optimizer.step()
    refuses(parallel, kind == "forward")
    assert all(map(torch.equal, net.parameters(), start))
    refused(RuntimeError, "discard()", optimizer.step)
    assert optimizer.micro_step == begun
    optimizer.discard()
    for index in range(2 * steps):
        with optimizer.accumulate(parallel):
            small_loss(parallel, index).backward()
        optimizer.step(), optimizer.zero_grad()
    assert_nets_close(net, one_process(steps, range(2 * steps)))


def in_any_micro_batch() -> None:
    """Test the window's last micro-batch, which takes gradients in by itself, and one after many others."""
    for micro_batches in (1, 8):
        net = network()
        parallel = DistributedDataParallel(net)
        optimizer = wrap(net, 2)
        for index in range(micro_batches):
            small_loss(parallel, index).backward()
            optimizer.step()
        refuses(parallel)


@on_each_rank(2)
def test_two_ranks_are_refused_alike() -> None:
    for kind, before, begun in itertools.product(("", "forward", "model"), (True, False), (False, True)):
        trains_after_a_refusal(2, {}, kind, before, begun)
    trains_after_a_refusal(1, {}, "", True, False)
    for option in ("gradient_as_bucket_view", "find_unused_parameters", "static_graph"):
        trains_after_a_refusal(2, {option: True}, "", True, True)
    in_any_micro_batch()


def made(steps: int, **options: bool) -> tuple[nn.Module, nn.Module, fusedacc.AccumulatingOptimizer]:
    net = network()
    return net, DistributedDataParallel(net, **options), wrap(net, steps)


@on_each_rank(2)
def test_a_forward_between_forward_and_backward() -> None:
    """A forward without gradients sets the same flag in DDP as `no_sync()`."""
    for options in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
        net, parallel, optimizer = made(2, **options)
        for index in range(4):
            loss = small_loss(parallel, index)
            with torch.no_grad():
                small_loss(parallel, 7)
            loss.backward()
            optimizer.step(), optimizer.zero_grad()
        assert optimizer.num_updates == 2
        assert_nets_close(net, one_process(2, range(4)))


@on_each_rank(2)
def test_a_penalty_in_a_separate_backward() -> None:
    """The penalty is equal on all ranks."""
    net, parallel, optimizer = made(1)
    small_loss(parallel, 0).backward()
    (0.0 * net[0].weight.square().sum()).backward()
    optimizer.step(), optimizer.zero_grad()
    assert_nets_close(net, one_process(1, range(1)))


@on_each_rank(2)
def test_micro_batches_outside_accumulate() -> None:
    """A micro-batch outside `accumulate(ddp)` synchronizes, too. The last one leaves the final p.grad."""
    for outside in ([1], [2], [0, 2], [0, 2, 3, 5]):
        net, parallel, optimizer = made(3)
        for index in range(6):
            with contextlib.nullcontext() if index in outside else optimizer.accumulate(parallel):
                small_loss(parallel, index).backward()
            if optimizer.will_update:
                assert all(param.grad is not None for param in net.parameters())
            optimizer.step(), optimizer.zero_grad()
        assert optimizer.num_updates == 2
        assert_nets_close(net, one_process(3, range(6)))


@on_each_rank(2)
def test_two_reducers_of_one_model() -> None:
    """The reducer that is not used does not matter."""
    net = network()
    other, parallel = DistributedDataParallel(net), DistributedDataParallel(net)
    with other.no_sync(), torch.no_grad():
        small_loss(other, 0)
    optimizer = wrap(net, 2)
    train(parallel, optimizer, range(4))
    assert_nets_close(net, one_process(2, range(4)))


@on_each_rank(2)
def test_a_backward_that_does_not_count() -> None:
    net, parallel, optimizer = made(2)
    for index in range(2):
        train(parallel, optimizer, [index])
        with optimizer.ignore(), parallel.no_sync():
            small_loss(parallel, 9).backward()
        optimizer.zero_grad()
    assert_nets_close(net, one_process(2, range(2)))


@on_each_rank(2)
def test_a_manual_loop() -> None:
    """A manual loop uses `no_sync()` to defer the reduction."""
    net = network()
    parallel = DistributedDataParallel(net)
    optimizer = wrap(net, None)
    for index in range(4):
        with contextlib.nullcontext() if index % 2 else parallel.no_sync():
            (small_loss(parallel, index) / 2).backward()
        if index % 2:
            optimizer.step(), optimizer.zero_grad()
    assert_nets_close(net, one_process(2, range(4)))


@on_each_rank(2)
def test_each_rank_for_itself() -> None:
    """Without DDP nothing reduces the gradients, and the wrapper captures them."""
    net = network()
    optimizer = wrap(net, 2)
    train(net, optimizer, range(4))
    assert_nets_close(net, one_process(2, range(4), [dist.get_rank()]))
    assert "stock" not in optimizer.explain()


@on_each_rank(2)
def test_a_static_graph_whose_reducer_stays_unarmed() -> None:
    for steps in (1, 3):
        net, parallel, optimizer = made(steps, static_graph=True)
        for index in range(3 * steps):
            with optimizer.accumulate(parallel):
                assert not parallel.require_backward_grad_sync, "the wrapper reduces"
                small_loss(parallel, index).backward()
            optimizer.step(), optimizer.zero_grad()
        assert optimizer.num_updates == 3
        assert_nets_close(net, one_process(steps, range(3 * steps)))


def test_one_rank_has_no_other_to_drift_from(tmp_path):
    with process_group("gloo", tmp_path):
        net, parallel, optimizer = made(2)
        for index in range(4):
            with parallel.no_sync():
                small_loss(parallel, index).backward()
            optimizer.step(), optimizer.zero_grad()
        assert_nets_close(net, one_process(2, range(4), [0]))


def is_replaced() -> bool:
    return hasattr(DistributedDataParallel._pre_forward, "__wrapped__")


def test_the_last_wrapper_of_a_counted_loop_restores_ddp():
    gc.collect()
    optimizers = [wrap(network(), steps) for steps in (2, 2, None)]
    assert is_replaced()
    for optimizer in optimizers[:2]:
        assert is_replaced()
        optimizer.close()
    assert not is_replaced()
    optimizers.append(wrap(network(), 2))
    assert is_replaced()
    del optimizers, optimizer
    gc.collect()
    assert not is_replaced()


def test_a_forward_that_other_code_has_replaced_stays(monkeypatch):
    gc.collect()
    optimizer = wrap(network(), 2)
    ours = DistributedDataParallel._pre_forward
    with monkeypatch.context() as patches:
        patches.setattr(DistributedDataParallel, "_pre_forward", lambda *inputs: ours(*inputs))
        theirs = DistributedDataParallel._pre_forward
        optimizer.close()
        assert DistributedDataParallel._pre_forward is theirs
    assert is_replaced()
    wrap(network(), 2).close()
    assert not is_replaced()


def test_ddp_is_noted_again_after_other_code_has_restored_torchs_own(monkeypatch):
    gc.collect()
    with monkeypatch.context() as patches:
        theirs = functools.wraps(DistributedDataParallel._pre_forward)(lambda *inputs, **options: None)
        patches.setattr(DistributedDataParallel, "_pre_forward", theirs)
        optimizer = wrap(network(), 2)
    optimizer.close()
    assert not is_replaced()
    optimizer = wrap(network(), 2)
    assert is_replaced()
    optimizer.close()
    assert not is_replaced()


@on_each_rank(2)
def test_replicate_never_calls_the_forward_of_ddp() -> None:
    net = replicate(network())
    optimizer = wrap(net, 2)
    net.set_requires_gradient_sync(False)
    refused(RuntimeError, "optimizer.accumulate(ddp)", small_loss(net, 0).backward)
    optimizer.discard()
    net.set_requires_gradient_sync(True)
    for index in range(4):
        small_loss(net, index).backward()
        optimizer.step(), optimizer.zero_grad()
    assert_nets_close(net, one_process(2, range(4)))


@on_each_rank(2)
def test_a_forward_in_no_sync_beside_one_that_synchronises() -> None:
    """DDP reduces in the backward of both, because the first forward has prepared the reducer."""
    net, parallel, optimizer = made(1)
    first = small_loss(parallel, 0)
    with parallel.no_sync():
        second = small_loss(parallel, 1)
    ((first + second) / 2).backward()
    optimizer.step(), optimizer.zero_grad()
    assert optimizer.num_updates == 1
    values = torch.cat([param.detach().flatten() for param in net.parameters()])
    others = [torch.empty_like(values) for _ in range(2)]
    dist.all_gather(others, values)
    assert torch.equal(*others)
