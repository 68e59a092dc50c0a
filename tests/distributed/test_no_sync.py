"""`ddp.no_sync()` by hand in a counted loop, whose sums would be nobody's, is refused; nothing else is."""

from __future__ import annotations

import textwrap

import pytest
import torch
from loops import loss_of, network, wrap
from ranks import run_on_two_ranks
from torch.nn.parallel import DistributedDataParallel

SETUP = textwrap.dedent(
    """
    import contextlib, gc, sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    import fusedacc

    rank, rendezvous = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)

    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))

    def loss_of(model, index, of_rank=rank):
        generator = torch.Generator().manual_seed(10 * index + of_rank)
        return model(torch.randn(3, 4, generator=generator)).pow(2).mean()

    def wrapped(net, steps, **options):
        inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        return fusedacc.AccumulatingOptimizer(inner, steps, **options)

    def assert_equals_stock(model, steps, indices):
        wanted = network()
        optimizer = torch.optim.SGD(wanted.parameters(), lr=0.1, momentum=0.9)
        for index in indices:
            for of_rank in (0, 1):
                (loss_of(wanted, index, of_rank) / (2 * steps)).backward()
            if (index + 1) % steps == 0:
                optimizer.step(), optimizer.zero_grad()
        for p, q in zip(model.parameters(), wanted.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    """
)
END = textwrap.dedent(
    """
    gc.collect()  # no reducer left, and no rank ahead, when the threads of the group end
    dist.barrier()
    dist.destroy_process_group()
    """
)

REFUSED = textwrap.dedent(
    """
    def refuses(act):
        try:
            act()
        except RuntimeError as error:
            assert "optimizer.accumulate(ddp)" in str(error), error
        else:
            raise AssertionError("a micro-batch of one rank was taken in")

    def both():
        with parallel.no_sync():
            loss_of(parallel, 1).backward()

    def forward():
        with parallel.no_sync():
            loss = loss_of(parallel, 1)
        loss.backward()

    def run(steps, options, kind, before, synchronised_first):
        global parallel
        model = network()
        parallel = DistributedDataParallel(model, **options) if before else None
        optimizer = wrapped(model, steps, **({"model": model} if kind == "model" else {}))
        if not before:
            parallel = DistributedDataParallel(model, **options)
        start = [p.clone() for p in model.parameters()]
        if synchronised_first:
            loss_of(parallel, 0).backward()
            optimizer.step()

        refuses(forward if kind == "forward" else both)
        for p, q in zip(model.parameters(), start, strict=True):
            assert torch.equal(p, q)
        try:
            optimizer.step()
        except RuntimeError as error:
            assert "discard()" in str(error), error
        else:
            raise AssertionError("step() took the micro-batch in")
        assert optimizer.micro_step == synchronised_first
        optimizer.discard()
        for index in range(2 * steps):
            with optimizer.accumulate(parallel):
                loss_of(parallel, index).backward()
            optimizer.step(), optimizer.zero_grad()
        assert_equals_stock(model, steps, range(2 * steps))
        optimizer.close()

    for before in (True, False):
        for synchronised_first in (False, True):
            for kind in ("", "forward", "model"):
                run(3, {}, kind, before, synchronised_first)
    run(1, {}, "", True, False)
    run(2, {"gradient_as_bucket_view": True}, "", True, True)
    run(3, {"find_unused_parameters": True}, "", True, True)
    run(3, {"static_graph": True}, "", True, True)

    # On the window's last micro-batch, whose end takes gradients in by itself; and long after the first.
    for micro_batches in (1, 8):
        model = network()
        parallel = DistributedDataParallel(model)
        optimizer = wrapped(model, 2)
        for index in range(micro_batches):
            loss_of(parallel, index).backward()
            optimizer.step()
        refuses(both)
        optimizer.close()
    del parallel
    """
)


def test_two_ranks_are_refused_alike(tmp_path):
    run_on_two_ranks(tmp_path, SETUP + REFUSED + END)


ALLOWED = textwrap.dedent(
    """
    # A forward without gradients between the forward and the backward says to DDP what no_sync() says.
    for options in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
        model = network()
        parallel = DistributedDataParallel(model, **options)
        optimizer = wrapped(model, 2)
        for index in range(6):
            loss = loss_of(parallel, index)
            with torch.no_grad():
                loss_of(parallel, 7)
            loss.backward()
            optimizer.step(), optimizer.zero_grad()
        assert optimizer.num_updates == 3
        assert_equals_stock(model, 2, range(6))
        optimizer.close()

    # A penalty on the weights in a backward of its own is equal on all ranks.
    model = network()
    parallel = DistributedDataParallel(model)
    optimizer = wrapped(model, 1)
    loss_of(parallel, 0).backward()
    (0.0 * model[0].weight.square().sum()).backward()
    optimizer.step(), optimizer.zero_grad()
    assert_equals_stock(model, 1, range(1))
    optimizer.close()

    # Two reducers of one model: the one that is not used does not matter.
    model = network()
    other, parallel = DistributedDataParallel(model), DistributedDataParallel(model)
    with other.no_sync(), torch.no_grad():
        loss_of(other, 0)
    optimizer = wrapped(model, 2)
    for index in range(4):
        loss_of(parallel, index).backward()
        optimizer.step(), optimizer.zero_grad()
    assert_equals_stock(model, 2, range(4))
    optimizer.close()
    del other

    # A backward that does not count.
    model = network()
    parallel = DistributedDataParallel(model)
    optimizer = wrapped(model, 2)
    for index in range(2):
        loss_of(parallel, index).backward()
        optimizer.step(), optimizer.zero_grad()
        with optimizer.ignore(), parallel.no_sync():
            loss_of(parallel, 9).backward()
        optimizer.zero_grad()
    assert_equals_stock(model, 2, range(2))
    optimizer.close()

    # A static graph has nothing to learn where its reducer stays unarmed.
    for steps in (1, 3):
        model = network()
        parallel = DistributedDataParallel(model, static_graph=True)
        optimizer = wrapped(model, steps)
        synchronised = []
        for index in range(3 * steps):
            with optimizer.accumulate(parallel):
                synchronised.append(parallel.require_backward_grad_sync)
                loss_of(parallel, index).backward()
            optimizer.step(), optimizer.zero_grad()
        assert not any(synchronised), "the wrapper reduces"
        assert optimizer.num_updates == 3
        assert_equals_stock(model, steps, range(3 * steps))
        optimizer.close()
    del parallel
    """
)


def test_what_synchronises_is_not_refused(tmp_path):
    run_on_two_ranks(tmp_path, SETUP + ALLOWED + END)


def test_one_rank_has_no_other_to_drift_from(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        model, wanted = network(), network()
        parallel, optimizer, stock = DistributedDataParallel(model), wrap(model, 2), wrap(wanted).optimizer
        for seed in range(4):
            with parallel.no_sync():
                loss_of(parallel, seed).backward()
            optimizer.step(), optimizer.zero_grad()
            (loss_of(wanted, seed) / 2).backward()
            if seed % 2:
                stock.step(), stock.zero_grad()
        for p, q in zip(model.parameters(), wanted.parameters(), strict=True):
            torch.testing.assert_close(p, q)
    finally:
        torch.distributed.destroy_process_group()


def test_a_loop_without_a_group_looks_for_no_reducer(monkeypatch):
    monkeypatch.setattr("gc.get_objects", lambda: pytest.fail("the hot path has searched for a reducer"))
    optimizer = wrap(model := network(), 2)
    for seed in range(4):
        loss_of(model, seed).backward()
        optimizer.step(), optimizer.zero_grad()
    assert optimizer.num_updates == 2
