"""FSDP2 on two ranks: norms, clipping, skipping and scalers over shards, meshes and tensor parallelism."""

import functools
import math
from unittest import mock

import sweeps
import torch
import torch.distributed as dist
from fsdp_setting import adam, alone, far, hybrid, loss_of, same_on_both, sharded, whole, world, wrap
from ranks import on_each_rank
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fusedacc


@on_each_rank(2)
def test_one_norm_of_the_whole() -> None:
    """The norm is reduced over the dimension of the shards only, and is bitwise equal on both ranks."""
    rank = dist.get_rank()
    K, UPDATES, CLIP = 2, 3, 0.05
    wanted, norms = alone(K, UPDATES, clip=CLIP)
    meshes = {"fsdp": world(), "replicas": hybrid(2, 1), "shards": hybrid(1, 2)}
    calls, all_reduce = [], dist.all_reduce

    def counting(values, *args, **kwargs):
        calls.append((values.numel(), values.dtype))
        return all_reduce(values, *args, **kwargs)

    for number, (name, mesh) in enumerate(meshes.items()):
        for fused in (False, True) if sweeps.FULL else (number % 2 == 0,):
            model = sharded(mesh=mesh)
            inner = functools.partial(adam, fused=fused)
            optimizer = wrap(model, K, inner, max_grad_norm=CLIP, skip_nonfinite=True)
            for index in range(K * UPDATES):
                loss_of(model, index).backward()
                with mock.patch.object(dist, "all_reduce", counting):
                    optimizer.step(), optimizer.zero_grad()
                if (index + 1) % K == 0:
                    assert abs(optimizer.grad_norm.item() / norms[index // K] - 1) < 1e-6, (name, norms)
                    same_on_both(optimizer.grad_norm)
            assert calls == [(1, torch.float64)] * (0 if name == "replicas" else UPDATES), (name, calls)
            calls.clear()
            # The clipping runs in another order than plain PyTorch's, which costs a few roundings.
            assert far(model, wanted) < 1e-6, (name, fused, far(model, wanted))
            # Both ranks see an inf in the shard of one rank.
            before = [p.to_local().clone() for p in model.parameters()]
            for index in range(K):
                loss_of(model, index).backward()
                if index == K - 1 and rank == 1:
                    model[0].weight.grad.to_local().view(-1)[0] = math.inf if fused else math.nan
                optimizer.step()
            if name != "replicas":  # replicas have nothing left to agree about
                assert int(optimizer.num_skipped) == 1
                for p, q in zip(model.parameters(), before, strict=True):
                    assert torch.equal(p.to_local(), q)


@on_each_rank(2)
def test_the_largest_element_of_all() -> None:
    """The norm is also correct with a NaN, which a maximum could miss."""
    rank = dist.get_rank()
    model = sharded()
    optimizer = wrap(model, 1, max_grad_norm=0.05, norm_type=math.inf)
    loss_of(model, 0).backward()
    largest = max(whole(p.grad).abs().max().item() for p in model.parameters())
    optimizer.step()
    assert optimizer.grad_norm.item() == torch.tensor(largest).item()
    loss_of(model, 1).backward()
    if rank == 1:
        model[0].weight.grad.to_local()[0, 0] = math.nan
    optimizer.step()
    assert optimizer.grad_norm.isnan().item()


@on_each_rank(2)
def test_an_overflow_on_one_rank() -> None:
    """Both ranks skip the update and halve the scale."""
    rank = dist.get_rank()
    K, UPDATES, CLIP = 2, 2, 0.05
    wanted, norms = alone(K, UPDATES, clip=CLIP)
    for ours, unscales, fused in (
        (True, True, False),
        (True, False, True),
        (False, True, True),
        (False, False, False),
    ):
        model = sharded()
        start = [p.to_local().clone() for p in model.parameters()]
        optimizer = wrap(model, K if ours else None, functools.partial(adam, fused=fused))
        scaler = (fusedacc.amp.GradScaler if ours else torch.amp.GradScaler)("cpu", init_scale=8.0)
        for index in range(K * (UPDATES + 1)):
            window, last = index // K, (index + 1) % K == 0
            scaler.scale(loss_of(model, index) / (1 if ours else K)).backward()
            if last and window == UPDATES:
                before = [p.to_local().clone() for p in model.parameters()]
                if rank == 1:
                    model[0].weight.grad.to_local()[0, 0] = math.inf
            if ours or last:
                if unscales:
                    scaler.unscale_(optimizer)
                    if last and window < UPDATES:
                        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                        assert abs(whole(norm).item() / norms[window] - 1) < 1e-6
                scaler.step(optimizer), scaler.update(), optimizer.zero_grad()
            if index == K * UPDATES - 1:
                assert scaler.get_scale() == 8.0
                assert not unscales or far(model, wanted) < 1e-6, (ours, fused, far(model, wanted))
        assert scaler.get_scale() == 4.0, (ours, unscales, scaler.get_scale())
        for p, q, r in zip(model.parameters(), before, start, strict=True):
            assert torch.equal(p.to_local(), q)
            assert p.to_local().numel() == 0 or not torch.equal(q, r)


@on_each_rank(2)
def test_tensor_parallel() -> None:
    """With DTensors that are not FSDP2's and a plain parameter, PyTorch computes the correct norm."""
    K, UPDATES = 2, 3

    def parallel():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2), nn.Linear(2, 1))

    for options in ({}, {"max_grad_norm": 0.01}):
        model, reference = parallel(), parallel()
        parallelize_module(model, world(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer, stock = wrap(model, K, **options), adam(reference)
        for index in range(K * UPDATES):
            loss_of(model, index, 0).backward()
            optimizer.step(), optimizer.zero_grad()
            (loss_of(reference, index, 0) / K).backward()
            if (index + 1) % K == 0:
                limit = options.get("max_grad_norm", math.inf)
                norm = nn.utils.clip_grad_norm_(reference.parameters(), limit)
                if options:
                    assert abs(optimizer.grad_norm.item() / norm.item() - 1) < 1e-6
                    same_on_both(optimizer.grad_norm)
                stock.step(), stock.zero_grad()
        assert optimizer.num_updates == UPDATES
        assert far(model, reference) < 1e-6, far(model, reference)
        explained = optimizer.explain()
        assert all(said in explained for said in ("of a subclass", "multi_tensor")), explained
