"""DDP in a process group of one rank: its reducer fills p.grad as with many ranks."""

import contextlib
import gc
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from loops import assert_gradients, expected, loss_of, network, wrap
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedacc

pytestmark = pytest.mark.usefixtures("group")


@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("replaces", [False, True])
def test_gradients_are_those_of_stock(replaces, steps, silent, bucket_view):
    model = network()
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
    given = {"model": model} if replaces else {}
    optimizer = wrap(model, steps, reduction="sum", lr=0.0, **given)
    for window in range(2):
        seeds = range(2 * window, 2 * window + 2)
        wanted = expected(model, seeds)
        for seed in seeds:
            with optimizer.accumulate(model=parallel) if silent else contextlib.nullcontext():
                loss_of(parallel, seed).backward()
            if steps:
                optimizer.step()
        if not steps:
            optimizer.step()
        assert_gradients(model, wanted)
        optimizer.zero_grad()
    assert optimizer.num_updates == 2


@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("synchronises", [False, True])
@pytest.mark.parametrize("steps", [None, 2])
def test_an_ignored_backward_by_the_reducer_leaves_the_window_alone(steps, synchronises, bucket_view):
    """If p.grad is a view of the reducer's bucket, the reducer changes every view of it."""
    model = network()
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
    optimizer = wrap(model, steps, reduction="sum", lr=0.0)
    wanted = expected(model, (0, 1))
    for seed in (0, 1):
        with optimizer.ignore(), nullcontext() if synchronises else parallel.no_sync():
            loss_of(parallel, 7).backward()
        loss_of(parallel, seed).backward()
        with optimizer.ignore(), nullcontext() if synchronises else parallel.no_sync():
            loss_of(parallel, 7).backward()
        if steps is not None:
            optimizer.step()
    assert_gradients(model, wanted)
    optimizer.step()
    if steps is None:
        assert_gradients(model, wanted)


class Deferring:
    """A module with `no_sync()` that is not a DDP, so the wrapper cannot replace its reducer."""

    def __init__(self, parallel):
        self.parallel = parallel

    def __call__(self, *inputs):
        return self.parallel(*inputs)

    def parameters(self):
        return self.parallel.parameters()

    def no_sync(self):
        return self.parallel.no_sync()


def test_an_ignored_backward_is_refused_where_gradients_wait():
    model = network()
    parallel = Deferring(DistributedDataParallel(model))
    optimizer = wrap(model, 2)
    wanted = expected(model, (0, 1), 0.5)
    for seed in (0, 1):
        with optimizer.accumulate(model=parallel):
            loss_of(parallel, seed).backward()
        if seed == 0:
            with pytest.raises(RuntimeError, match="synchronisation"), optimizer.ignore():
                loss_of(model, 7).backward()
        optimizer.step()
    assert optimizer.num_updates == 1
    assert_gradients(model, wanted)


def test_an_unsynchronised_window_is_neither_saved_nor_flushed():
    model = network()
    parallel = Deferring(DistributedDataParallel(model))
    optimizer = wrap(model, 3)
    wanted = expected(model, range(3), 1 / 3)
    with optimizer.accumulate(model=parallel):
        loss_of(parallel, 0).backward()
        with pytest.raises(RuntimeError, match="synchronisation"):
            optimizer.flush()
    optimizer.step()
    for refused in (optimizer.flush, optimizer.state_dict):
        with pytest.raises(RuntimeError, match="synchronisation"):
            refused()
    optimizer.step()  # without a backward, it does not count
    assert optimizer.micro_step == 1
    assert optimizer.state_dict(include_partial=False)["state"] == {}
    for seed in (1, 2):
        with optimizer.accumulate(model=parallel):
            loss_of(parallel, seed).backward()
        optimizer.step()
    assert_gradients(model, wanted)
    assert (optimizer.num_updates, optimizer.state_dict()["fusedacc"]["window"]["micro_step"]) == (1, 0)


class TestAttach:
    def test_the_same_one_stays_and_another_takes_its_place(self):
        model = network()
        first, second = DistributedDataParallel(model), DistributedDataParallel(model)
        optimizer = wrap(model, 2)
        optimizer.attach(first)
        kept = optimizer._accumulation.ranks.parallel
        optimizer.attach(first)
        assert optimizer._accumulation.ranks.parallel is kept
        assert not first.require_backward_grad_sync
        optimizer.attach(nn.ModuleDict({"compiled": second}))  # a module around it
        assert first.require_backward_grad_sync
        assert {"no_sync", "join"}.isdisjoint(first.__dict__)
        assert not second.require_backward_grad_sync
        wanted = expected(model, (0, 1), 0.5)
        for seed in (0, 1):
            loss_of(second, seed).backward()
            if optimizer.will_update:
                assert_gradients(model, wanted)
            optimizer.step()
        optimizer.close()
        assert second.require_backward_grad_sync

    def test_what_does_not_go_is_refused_and_changes_nothing(self):
        model = network()
        parallel = DistributedDataParallel(model)
        optimizer = wrap(model, 2)
        optimizer.attach(parallel)
        kept = optimizer._accumulation.ranks.parallel
        with pytest.raises(TypeError, match=r"data_parallel must be a DistributedDataParallel, .*got Linear"):
            optimizer.attach(nn.Linear(1, 1))
        with pytest.raises(ValueError, match="without parameter"):
            optimizer.attach(DistributedDataParallel(nn.Linear(1, 1)))
        loss_of(parallel, 0).backward()
        with pytest.raises(RuntimeError, match="in mid-window"):
            optimizer.attach(dist.group.WORLD)
        assert optimizer._accumulation.ranks.parallel is kept
        optimizer.close()
        with pytest.raises(RuntimeError, match="closed"):
            optimizer.attach(parallel)
        with optimizer.accumulate(parallel):
            assert optimizer._accumulation.ranks.parallel is None

    @pytest.mark.parametrize("closes", [True, False])
    def test_one_for_two_optimizers_is_given_back_with_the_last(self, closes):
        model = network()
        parallel = DistributedDataParallel(model)
        parts = [list(model.parameters())[:1], list(model.parameters())[1:]]
        both = [
            fusedacc.AccumulatingOptimizer(torch.optim.SGD(part, lr=0.0), 2, data_parallel=parallel)
            for part in parts
        ]
        wanted = expected(model, (0, 1), 0.5)
        for seed in (0, 1):
            loss_of(parallel, seed).backward()
            if both[0].will_update:
                assert_gradients(model, wanted)
            for optimizer in both:
                optimizer.step()
        for left in (1, 0):
            optimizer = both.pop()
            if closes:
                optimizer.close()
            del optimizer
            gc.collect()
            assert parallel.require_backward_grad_sync == (left == 0)


def test_what_no_sync_has_held_back_is_reduced_by_flush():
    model = network()
    parallel = DistributedDataParallel(model)
    optimizer = wrap(model, None, data_parallel=parallel)
    reductions = []
    optimizer._accumulation.ranks.parallel.reducer.announce = lambda: reductions.append(1)
    with parallel.no_sync():
        loss_of(parallel, 0).backward()
    assert reductions == []
    optimizer.flush()
    assert (len(reductions), optimizer.num_updates) == (1, 1)
    loss_of(parallel, 1).backward()
    optimizer.flush()
    assert (len(reductions), optimizer.num_updates) == (2, 2)
