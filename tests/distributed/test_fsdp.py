"""FSDP2 on two ranks: sums of shards, deferred synchronisation, masters, norms and what is refused.

Each script runs twice at once, on gloo over loopback, and makes many checks: two processes are dear.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap

import pytest
from example_scripts import EXAMPLES
from ranks import run_on_two_ranks

SETUP = textwrap.dedent(
    """
    import datetime, gc, math, sys, warnings
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor
    import fusedacc

    rank, rendezvous = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    WORLD = init_device_mesh("cpu", (2,))

    def network(dtype=torch.float32):
        torch.manual_seed(0)  # a bias of 5 and one of 1: uneven shards, and an empty one
        layers = nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1)
        return nn.Sequential(*layers).to(dtype)

    def sharded(dtype=torch.float32, mesh=WORLD, **options):
        model = network(dtype)
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options)

    def batch(index, of_rank, dtype=torch.float32):
        generator = torch.Generator().manual_seed(10 * index + of_rank)
        return torch.randn(3, 4, generator=generator).to(dtype)

    def loss_of(model, index, of_rank=rank):
        dtype = next(model.parameters()).dtype
        return model(batch(index, of_rank, dtype)).float().pow(2).mean()

    def adam(model, **options):
        return torch.optim.AdamW(model.parameters(), lr=0.01, **options)

    def wrap(model, steps, inner=adam, /, **options):
        return fusedacc.AccumulatingOptimizer(inner(model), steps, **options)

    def alone(steps, updates, inner=adam, clip=None):
        "One process on the data of both ranks; the norms of its updates' gradients."
        model, norms = network(), []
        optimizer = inner(model)
        for update in range(updates):
            for index in range(steps * update, steps * (update + 1)):
                for of_rank in (0, 1):
                    (loss_of(model, index, of_rank) / (2 * steps)).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf).item())
            optimizer.step(), optimizer.zero_grad()
        return model, norms

    def whole(tensor):
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def far(model, reference):
        "The largest difference, relative to the largest number of each parameter."
        return max(
            ((whole(p) - whole(q)).abs().max() / whole(q).abs().max()).item()
            for p, q in zip(model.parameters(), reference.parameters(), strict=True)
        )

    def raises(kind, words, act):
        try:
            act()
        except kind as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"nothing was raised that says {words!r}")

    def same_on_both(value):
        value = torch.as_tensor(value).double().reshape(1)
        found = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(found, value)
        assert torch.equal(*found), found
    """
)
END = textwrap.dedent(
    """
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    """
)

COUNTED = textwrap.dedent(
    """
    K, UPDATES = 3, 3
    wanted, norms = alone(K, UPDATES)

    # Synchronised in every micro-batch, deferred by hand, deferred by accumulate(); with and without
    # zero_grad(), private or not; clipping by hand sees the norm of the whole window.
    for way, clears, private in (
        ("every", True, False),
        ("every", False, False),
        ("every", False, True),
        ("by hand", False, False),
        ("by hand", True, True),
        ("accumulate", True, False),
    ):
        model = sharded()
        optimizer = wrap(model, K, private_gradients=private)
        for index in range(K * UPDATES):
            last = optimizer.will_update
            assert last == ((index + 1) % K == 0)
            if way == "by hand":
                model.set_requires_gradient_sync(last)
            if way == "accumulate":
                with optimizer.accumulate(model):
                    loss_of(model, index).backward()
            else:
                loss_of(model, index).backward()
            shown = [p.grad for p in model.parameters()]
            if last and not private:
                norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf)
                assert abs(whole(norm).item() / norms[index // K] - 1) < 1e-6, (way, norm, norms)
                assert all(isinstance(g, DTensor) for g in shown)
            else:
                assert shown == [None] * len(shown), (way, index)
            assert optimizer.micro_step == index % K
            optimizer.step()
            if clears:
                optimizer.zero_grad()
        assert optimizer.num_updates == UPDATES and optimizer.micro_step == 0
        assert far(model, wanted) < 3e-7, (way, clears, private, far(model, wanted))
        optimizer.close()
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())

    # Against stock FSDP2.
    model, stock = sharded(), sharded()
    optimizer, inner = wrap(model, K), adam(stock)
    for index in range(K * UPDATES):
        loss_of(model, index).backward()
        optimizer.step(), optimizer.zero_grad()
        (loss_of(stock, index) / K).backward()
        if (index + 1) % K == 0:
            inner.step(), inner.zero_grad()
    assert far(model, stock) < 3e-7
    optimizer.close()

    # A window that ends early: the mean over what it holds.
    wanted, _ = alone(2, 1)
    model = sharded()
    optimizer = wrap(model, 4)
    for index in range(2):
        loss_of(model, index).backward()
        optimizer.step()
    optimizer.flush()
    assert optimizer.num_updates == 1 and far(model, wanted) < 3e-7
    optimizer.flush()
    assert optimizer.num_updates == 1
    # Another number of micro-batches on each rank is refused on both, and changes nothing.
    before = [p.to_local().clone() for p in model.parameters()]
    with optimizer.ignore():
        loss_of(model, 5).backward()
    optimizer.zero_grad()
    if rank == 0:  # no collective is in a backward that reaches no shard
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    raises(RuntimeError, "0 to 1 on all", optimizer.flush)
    for p, q in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.to_local(), q)
    optimizer.discard()
    assert optimizer.micro_step == 0
    # What a backward inside ignore() leaves does not count, in mid-window either.
    wanted, _ = alone(2, 1)
    model.load_state_dict({n: v for n, v in sharded().state_dict().items()})
    optimizer.close()
    optimizer = wrap(model, 2)
    for index in range(2):
        with optimizer.ignore():
            loss_of(model, 7).backward()
        optimizer.zero_grad()
        loss_of(model, index).backward()
        optimizer.step()
    assert optimizer.num_updates == 1 and far(model, wanted) < 3e-7
    optimizer.close()
    """
)


def test_a_counted_loop(tmp_path):
    run_on_two_ranks(tmp_path, SETUP + COUNTED + END)


MANUAL = textwrap.dedent(
    """
    K, UPDATES = 2, 2
    # p.grad is the sum, as in stock, bit for bit; also where synchronisation is deferred.
    for deferred in (False, True):
        models = [sharded(), sharded()]
        optimizer, inner = wrap(models[0], None), adam(models[1])
        for index in range(K * UPDATES):
            last = (index + 1) % K == 0
            for model in models:
                model.set_requires_gradient_sync(last or not deferred)
                (loss_of(model, index) / K).backward()
            for p, q in zip(*(model.parameters() for model in models), strict=True):
                assert (p.grad is None) == (q.grad is None) == (deferred and not last)
                assert p.grad is None or torch.equal(p.grad.to_local(), q.grad.to_local())
            if deferred and not last:
                raises(RuntimeError, "set_requires_gradient_sync(True)", optimizer.state_dict)
            if last:
                optimizer.step(), optimizer.zero_grad()
                inner.step(), inner.zero_grad()
        for p, q in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(p.to_local(), q.to_local())
        optimizer.close()

    # bfloat16 shards have float32 sums: of the same gradients as stock's, without its rounding.
    for steps, clip in ((None, None), (4, None), (4, 1e-3)):
        model, stock = sharded(torch.bfloat16), sharded(torch.bfloat16)
        optimizer = wrap(model, steps, max_grad_norm=clip)
        sums = [torch.zeros(p.to_local().shape, dtype=torch.float64) for p in stock.parameters()]
        for index in range(4):
            loss_of(model, index).backward()
            loss_of(stock, index).backward()
            for p, total in zip(stock.parameters(), sums, strict=True):
                total += p.grad.to_local().double() / (steps or 1)
                p.grad = None
            if index < 3:
                optimizer.step() if steps else None
        for p, total in zip(model.parameters(), sums, strict=True):
            assert p.grad.dtype == torch.float32 == p.grad.to_local().dtype
            torch.testing.assert_close(p.grad.to_local().double(), total, rtol=3e-7, atol=1e-9)
        inner, square = adam(stock), sum(whole(p.grad).square().sum() for p in model.parameters())
        for p, q in zip(model.parameters(), stock.parameters(), strict=True):
            q.grad = (p.grad * (clip / (square.sqrt().item() + 1e-6) if clip else 1.0)).bfloat16()
        inner.step()
        held = optimizer.accumulator_bytes
        assert held == sum(4 * p.to_local().numel() for p in model.parameters()), held
        optimizer.step()
        assert optimizer.num_updates == 1
        for p, q in zip(model.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(p.to_local(), q.to_local(), rtol=0.01 if clip else 0, atol=0)
            assert p.grad.dtype == (torch.bfloat16 if clip else torch.float32) == p.grad.to_local().dtype
        optimizer.zero_grad()
        optimizer.close()
        assert all(p.grad_dtype == torch.bfloat16 for p in model.parameters())
    """
)


def test_a_manual_loop_and_bfloat16_shards(tmp_path):
    run_on_two_ranks(tmp_path, SETUP + MANUAL + END)


WITHHELD = textwrap.dedent(
    """
    # What FSDP2 keeps is counted, is not saved, and does not end a window.
    model = sharded()
    optimizer = wrap(model, 2)
    model.set_requires_gradient_sync(False)
    loss_of(model, 0).backward()
    raises(RuntimeError, "set_requires_gradient_sync(True)", optimizer.state_dict)
    optimizer.step()
    assert optimizer.micro_step == 1
    raises(RuntimeError, "set_requires_gradient_sync(True)", optimizer.state_dict)
    optimizer.state_dict(include_partial=False)
    def ignored():
        with optimizer.ignore():
            loss_of(model, 7).backward()
    raises(RuntimeError, "ignore()", ignored)
    model.reset_iter_state()
    optimizer.discard()
    for index in (0, 1):
        loss_of(model, index).backward()
        if index == 0:
            optimizer.step()
    raises(RuntimeError, "step() would update without them", optimizer.step)
    # discard() throws away what FSDP2 keeps, too.
    optimizer.discard()
    assert (optimizer.micro_step, optimizer.num_updates) == (0, 0)
    wanted, _ = alone(2, 1)
    for index in (0, 1):
        with optimizer.accumulate(model):
            loss_of(model, index).backward()
        optimizer.step()
    assert optimizer.num_updates == 1 and far(model, wanted) < 3e-7
    optimizer.close()

    # flush() synchronises what FSDP2 keeps, with a micro-batch that no step() has ended or without.
    wanted, _ = alone(3, 1)
    for ends in (True, False):
        for synchronised in ((), (1,)):
            model = sharded()
            optimizer = wrap(model, 5)
            for index in range(3):
                model.set_requires_gradient_sync(index in synchronised)
                loss_of(model, index).backward()
                if ends or index < 2:
                    optimizer.step(), optimizer.zero_grad()
            optimizer.flush()
            assert (optimizer.num_updates, optimizer.micro_step) == (1, 0)
            assert far(model, wanted) < 3e-7, (ends, synchronised, far(model, wanted))
            optimizer.close()
            model.set_requires_gradient_sync(True)  # FSDP2 goes on as if nothing had been
            model.zero_grad()
            loss_of(model, 3).backward()
            stock = sharded()
            stock.load_state_dict(model.state_dict())
            loss_of(stock, 3).backward()
            for p, q in zip(model.parameters(), stock.parameters(), strict=True):
                torch.testing.assert_close(p.grad.to_local(), q.grad.to_local(), rtol=1e-6, atol=1e-8)

    # A part-filled window whose sums are shards goes through a checkpoint.
    wanted, _ = alone(4, 2)
    model = sharded()
    optimizer = wrap(model, 4)
    for index in range(8):
        loss_of(model, index).backward()
        optimizer.step()
        if index in (1, 4):
            state, values = optimizer.state_dict(), model.state_dict()
            optimizer.close()
            model = sharded()
            model.load_state_dict(values)
            optimizer = wrap(model, 4)
            optimizer.load_state_dict(state)
            assert optimizer.micro_step == (index + 1) % 4
    assert optimizer.num_updates == 2 and far(model, wanted) < 3e-7
    optimizer.close()

    # Weights: FSDP2 averages before they could be applied; sums over the weights of all ranks are right.
    model = sharded()
    raises(ValueError, "reduction='weighted'", lambda: wrap(model, 2, reduction="weighted"))
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    def weight_of(index, of_rank):
        return (3, 1, 2, 5 if late else 0)[(index + 2 * of_rank) % 4]
    for steps, late, micro_batches in ((2, False, 4), (2, True, 4), (4, True, 2), (None, False, 4)):
        reference = network()
        inner = adam(reference)
        model = sharded()
        if late:  # FSDP2 sums instead
            for module in (model, model[0], model[2]):
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
        optimizer = wrap(model, steps, reduction="normalized")
        for index in range(micro_batches):
            total = sum(weight_of(2 * (index // 2) + i, r) for i in (0, 1) for r in (0, 1))
            for of_rank in (0, 1):
                (weight_of(index, of_rank) * loss_of(reference, index, of_rank) / total).backward()
            weight = weight_of(index, rank)
            with optimizer.accumulate(weight=None if late else weight) as micro_batch:
                (weight * loss_of(model, index)).backward()
                if late:
                    micro_batch.weight = weight
            if index % 2:
                if steps == 2 and not late:
                    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                        torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-5, atol=1e-8)
                inner.step(), inner.zero_grad()
            if steps or index % 2:
                optimizer.step(), optimizer.zero_grad()
            if steps == 4 and index % 2:
                optimizer.flush()
                optimizer.zero_grad()
        assert optimizer.num_updates == micro_batches // 2
        assert far(model, reference) < 1e-6, (steps, late, far(model, reference))
        optimizer.close()
    """
)


def test_what_fsdp_keeps_checkpoints_and_weights(tmp_path):
    run_on_two_ranks(tmp_path, SETUP + WITHHELD + END)


NORMS = textwrap.dedent(
    """
    K, UPDATES, CLIP = 2, 3, 0.05
    wanted, norms = alone(K, UPDATES, clip=CLIP)
    MESHES = {
        "fsdp": WORLD,
        "replicas": init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")),
        "shards": init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard")),
    }
    calls = []
    all_reduce = dist.all_reduce
    def counting(values, *args, **kwargs):
        calls.append((values.numel(), values.dtype))
        return all_reduce(values, *args, **kwargs)

    # One norm of the whole, over the shards' dimension alone, the same on both ranks to the bit.
    for name, mesh in MESHES.items():
        for fused in (False, True):
            model = sharded(mesh=mesh)
            inner = lambda model: adam(model, fused=fused)
            optimizer = wrap(model, K, inner, max_grad_norm=CLIP, skip_nonfinite=True)
            for index in range(K * UPDATES):
                loss_of(model, index).backward()
                dist.all_reduce = counting
                optimizer.step(), optimizer.zero_grad()
                dist.all_reduce = all_reduce
                if (index + 1) % K == 0:
                    assert abs(optimizer.grad_norm.item() / norms[index // K] - 1) < 1e-6, (name, norms)
                    same_on_both(optimizer.grad_norm)
            assert calls == [(1, torch.float64)] * (0 if name == "replicas" else UPDATES), (name, calls)
            calls.clear()
            # The clipping itself is in another order than stock's: a few roundings more.
            assert far(model, wanted) < 1e-6, (name, fused, far(model, wanted))
            # An inf in the shard of one rank is seen by both.
            before = [p.to_local().clone() for p in model.parameters()]
            for index in range(K):
                loss_of(model, index).backward()
                if index == K - 1 and rank == 1:
                    model[0].weight.grad.to_local().view(-1)[0] = math.inf if fused else math.nan
                optimizer.step()
            if name != "replicas":  # there FSDP2 itself has left nothing to agree about
                assert int(optimizer.num_skipped) == 1
                for p, q in zip(model.parameters(), before, strict=True):
                    assert torch.equal(p.to_local(), q)
            optimizer.close()

    # The largest element of all, and a nan that a maximum would pass by.
    model = sharded()
    optimizer = wrap(model, 1, max_grad_norm=CLIP, norm_type=math.inf)
    loss_of(model, 0).backward()
    largest = max(whole(p.grad).abs().max().item() for p in model.parameters())
    optimizer.step()
    assert optimizer.grad_norm.item() == torch.tensor(largest).item()
    loss_of(model, 1).backward()
    if rank == 1:
        model[0].weight.grad.to_local()[0, 0] = math.nan
    optimizer.step()
    assert optimizer.grad_norm.isnan().item()
    optimizer.close()

    # GradScalers: an overflow on one rank drops the update and halves the scale on both.
    UPDATES = 2
    wanted, norms = alone(K, UPDATES, clip=CLIP)
    for ours, unscales, fused in (
        (True, True, False), (True, False, True), (False, True, True), (False, False, False)
    ):
        model = sharded()
        start = [p.to_local().clone() for p in model.parameters()]
        optimizer = wrap(model, K if ours else None, lambda model: adam(model, fused=fused))
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
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            if index == K * UPDATES - 1:
                assert scaler.get_scale() == 8.0
                assert not unscales or far(model, wanted) < 1e-6, (ours, fused, far(model, wanted))
        assert scaler.get_scale() == 4.0, (ours, unscales, scaler.get_scale())
        for p, q, r in zip(model.parameters(), before, start, strict=True):
            assert torch.equal(p.to_local(), q) and (p.to_local().numel() == 0 or not torch.equal(q, r))
        optimizer.close()
    """
)


def test_norms_and_scalers_over_shards_and_meshes(tmp_path):
    run_on_two_ranks(tmp_path, SETUP + NORMS + END)


OTHERS = textwrap.dedent(
    """
    # Masters of bfloat16 shards: the same steps as on float32 parameters with these gradients.
    K, UPDATES = 2, 3
    for steps in (None, K):
        for inner in (adam, lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)):
            model = sharded(torch.bfloat16)
            optimizer = wrap(model, steps, inner, master_weights=True)
            masters = sharded(torch.bfloat16).float()
            reference = inner(masters)
            for index in range(K * UPDATES):
                last = (index + 1) % K == 0
                (loss_of(model, index) / (1 if steps else K)).backward()
                if last:
                    for p, q in zip(model.parameters(), masters.parameters(), strict=True):
                        q.grad = p.grad.clone()
                        assert q.grad.dtype == torch.float32
                    reference.step()
                if steps or last:
                    optimizer.step(), optimizer.zero_grad()
                for p, q in zip(model.parameters(), masters.parameters(), strict=True):
                    assert p.dtype == p.to_local().dtype == torch.bfloat16
                    assert torch.equal(p.to_local(), q.to_local().bfloat16()), (steps, index)
            assert all(
                isinstance(value, DTensor) and value.to_local().dtype == torch.float32
                for state in optimizer.state.values()
                for name, value in state.items()
                if name != "step"
            )
            saved = optimizer.state_dict()
            optimizer.load_state_dict(saved)
            for index, entry in saved["state"].items():
                kept = optimizer.state_dict()["state"][index]["fusedacc_master"]
                assert torch.equal(kept.to_local(), entry["fusedacc_master"].to_local())
            optimizer.close()

    # Mixed precision of FSDP2's: float32 shards, bfloat16 inside.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, stock = sharded(mp_policy=policy), sharded(mp_policy=policy)
    optimizer, inner = wrap(model, K), adam(stock)
    for index in range(K * UPDATES):
        with optimizer.accumulate(model):
            loss_of(model, index).backward()
        optimizer.step(), optimizer.zero_grad()
        (loss_of(stock, index) / K).backward()
        if (index + 1) % K == 0:
            inner.step(), inner.zero_grad()
    assert far(model, stock) < 2e-2  # the losses are divided before they are rounded to 16 bits
    text = optimizer.explain()
    from fusedacc.autograd import eligibility

    assert eligibility.SHARDED.why in text
    assert text.count("fsdp2") >= 6 and "set_requires_gradient_sync(False)" in text, text
    assert f"{4 * sum(p.numel() for p in model.parameters()):,} bytes" in text, text
    optimizer.close()

    # The meter counts what this rank has.
    model = sharded()
    optimizer = wrap(model, 1, lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    loss_of(model, 0).backward()
    with fusedacc.traffic.TrafficMeter(model) as meter:
        optimizer.step()
    own = sum(4 * p.to_local().numel() for p in model.parameters())
    figures = meter.as_dict()
    assert figures["by_phase"] == {"update": 3 * own}, (figures, own)
    assert figures["by_kind"] == {"weights": 2 * own, "gradients": own}, figures["by_kind"]
    with fusedacc.traffic.TrafficMeter(optimizer) as meter:
        loss_of(model, 1).backward()
        optimizer.step()
    assert meter.total_bytes > 3 * own
    optimizer.close()

    # A hook of the user's on a shard still sees p.grad, and the sums are right.
    wanted, _ = alone(K, 1)
    model, seen = sharded(), []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.to_local().clone()))
    optimizer = wrap(model, K)
    for index in range(K):
        loss_of(model, index).backward()
        assert len(seen) == index + 1
        optimizer.step()
    assert far(model, wanted) < 3e-7
    optimizer.close()
    assert len(model[0].weight._post_accumulate_grad_hooks) == 1

    # Tensor-parallel DTensors, with a plain parameter beside: by autograd, and right.
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def parallel():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2), nn.Linear(2, 1))
        return model

    for options in ({}, {"max_grad_norm": 0.01}):
        model, reference = parallel(), parallel()
        parallelize_module(model, WORLD, {"0": ColwiseParallel(), "2": RowwiseParallel()})
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
        assert "process group" in optimizer.explain()
        optimizer.close()
    """
)


def test_masters_the_meter_and_tensor_parallel_parameters(tmp_path):
    run_on_two_ranks(tmp_path, SETUP + OTHERS + END)


EDGES = textwrap.dedent(
    """
    from torch.utils.checkpoint import checkpoint

    K, UPDATES = 2, 2
    wanted, _ = alone(K, UPDATES)

    class Checkpointed(nn.Module):
        def __init__(self, model, reentrant):
            super().__init__()
            self.model, self.reentrant = model, reentrant

        def forward(self, x):
            x = x.detach().requires_grad_()
            for layer in (self.model[:2], self.model[2:4]):
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
            return self.model[4](x)

    def forward_of(kind, model):
        if kind.startswith("checkpoint"):
            layers = nn.Sequential(*model)
            return fully_shard(Checkpointed(layers, kind == "checkpoint, re-entrant"))
        return model

    # Both kinds of checkpointing, a module's own modules, several backwards in a micro-batch, model=.
    for kind in ("checkpoint", "checkpoint, re-entrant", "pieces", "model="):
        model = network()
        for layer in (model[0], model[2]):
            fully_shard(layer)
        model = forward_of(kind, model) if kind.startswith("checkpoint") else fully_shard(model)
        options = {"model": model} if kind == "model=" else {}
        optimizer = wrap(model, K, **options)
        for index in range(K * UPDATES):
            if kind == "pieces":
                losses = model(batch(index, rank)).pow(2).div(3).sum(1)
                for number, loss in enumerate(losses):
                    loss.backward(retain_graph=number < 2)
                assert (model[0].weight.grad is None) == (index % K == 0)
            else:
                loss_of(model, index).backward()
            optimizer.step()
            if index % K == 0:
                assert all(p.grad is None for p in model.parameters())
        assert optimizer.num_updates == UPDATES
        assert far(model, wanted) < 6e-7, (kind, far(model, wanted))
        optimizer.close()

    # Zeros that stay visible, in both loops.
    for steps in (None, K):
        model = sharded()
        optimizer = wrap(model, steps)
        for index in range(K * UPDATES):
            (loss_of(model, index) / (1 if steps else K)).backward()
            if steps or (index + 1) % K == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
        assert far(model, wanted) < 3e-7, (steps, far(model, wanted))
        assert all(isinstance(p.grad, DTensor) and not p.grad.to_local().any() for p in model.parameters())
        optimizer.close()

    # A frozen layer, unfrozen between windows.
    model, reference = sharded(), network()
    optimizer, inner = wrap(model, K), adam(reference)
    for index in range(K * UPDATES):
        for each in (model, reference):
            each[2].requires_grad_(index >= K)
        loss_of(model, index).backward()
        optimizer.step(), optimizer.zero_grad()
        for of_rank in (0, 1):
            (loss_of(reference, index, of_rank) / (2 * K)).backward()
        if (index + 1) % K == 0:
            inner.step(), inner.zero_grad()
    assert far(model, reference) < 3e-7, far(model, reference)
    optimizer.close()

    # Two wrappers of one model's parameters, one of which gets a group later, between windows.
    model = sharded()
    first = fusedacc.AccumulatingOptimizer(torch.optim.AdamW(model[0].parameters(), lr=0.01), K)
    second = fusedacc.AccumulatingOptimizer(torch.optim.AdamW(model[2].parameters(), lr=0.01), K)
    second.add_param_group({"params": list(model[4].parameters())})
    for index in range(K * UPDATES):
        model.set_requires_gradient_sync(first.will_update)
        loss_of(model, index).backward()
        for optimizer in (first, second):
            optimizer.step(), optimizer.zero_grad()
    assert far(model, wanted) < 3e-7, far(model, wanted)
    first.close(), second.close()

    # HSDP whose replicas are synchronised once a window.
    model = sharded(mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    optimizer = wrap(model, K)
    for index in range(K * UPDATES):
        model.set_requires_all_reduce(optimizer.will_update)
        loss_of(model, index).backward()
        if index % K == 0:
            raises(RuntimeError, "FSDP2 keeps", optimizer.state_dict)
            raises(RuntimeError, "set_requires_all_reduce(True)", optimizer.flush)
        optimizer.step(), optimizer.zero_grad()
    assert optimizer.num_updates == UPDATES and far(model, wanted) < 3e-7
    optimizer.close()

    # An exception on both ranks taints the window until discard(); one in a forward does not.
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ArithmeticError("in mid-backward")

    model = sharded()
    optimizer = wrap(model, K)
    loss_of(model, 0).backward()
    optimizer.step()
    handle = model[0].register_forward_hook(lambda module, args, output: Failing.apply(output))
    raises(ArithmeticError, "in mid-backward", lambda: loss_of(model, 1).backward())
    handle.remove()
    raises(RuntimeError, "discard()", optimizer.step)
    optimizer.discard()
    model.reset_iter_state()
    for index in range(K * UPDATES):
        loss_of(model, index).backward()
        optimizer.step()
    assert far(model, wanted) < 3e-7

    # Distributed checkpoint's way of making an optimizer's state, and its form.
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    fresh = wrap(other := sharded(), K)
    state = get_optimizer_state_dict(other, fresh)
    assert all(isinstance(entry["exp_avg"], DTensor) for entry in state["state"].values())
    set_optimizer_state_dict(other, fresh, get_optimizer_state_dict(model, optimizer))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        ours, its = (o.state[r]["exp_avg"].to_local() for o, r in ((optimizer, p), (fresh, q)))
        assert torch.equal(ours, its)
    fresh.close()

    # A part-filled window of shards through a distributed checkpoint, bit for bit.
    import torch.distributed.checkpoint as dcp
    from fusedacc.integrations.distributed_checkpoint import make_room

    for dtype, masters in ((torch.float32, False), (torch.bfloat16, True)):
        folder, ends = f"{rendezvous}-{dtype}", []
        for resumes in (False, True):
            for index in range(6):
                if index in (0, 4 if resumes else 0):
                    other = sharded(dtype)
                    fresh = wrap(other, 3, master_weights=masters)
                if resumes and index == 4:
                    found = {"model": other.state_dict(), "optim": get_optimizer_state_dict(other, fresh)}
                    make_room(found, folder)
                    dcp.load(found, checkpoint_id=folder)
                    other.load_state_dict(found["model"])
                    set_optimizer_state_dict(other, fresh, found["optim"])
                    assert (fresh.num_updates, fresh.micro_step) == (1, 1)
                loss_of(other, index).backward()
                fresh.step(), fresh.zero_grad()
                if resumes and index == 3:
                    saved = {"model": other.state_dict(), "optim": get_optimizer_state_dict(other, fresh)}
                    dcp.save(saved, checkpoint_id=folder)
            ends.append([p.to_local().clone() for p in other.parameters()])
            fresh.close()
        assert all(map(torch.equal, *ends)), dtype

    # A wrapper that nobody refers to any more leaves nothing on the parameters, and stock goes on.
    del optimizer
    gc.collect()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    loss_of(model, 0).backward()
    assert all(p.grad is not None for p in model.parameters())

    # A backward that came through no hooked module may have been added to what is spent: refused.
    model = sharded()
    optimizer = wrap(model, 1)
    for module in model.modules():
        for key, hook in list(module._forward_hooks.items()):
            if "Shards" in str(getattr(hook, "args", "")):
                del module._forward_hooks[key]
    loss_of(model, 0).backward()
    optimizer.step()
    raises(RuntimeError, "optimizer.zero_grad()", lambda: loss_of(model, 1).backward())
    optimizer.discard()
    model.reset_iter_state()
    for index in range(2):
        loss_of(model, index).backward()
        optimizer.step(), optimizer.zero_grad()
    assert optimizer.num_updates == 3
    optimizer.close()
    """
)


def test_edges(tmp_path):
    run_on_two_ranks(tmp_path, SETUP + EDGES + END)


def test_the_example_runs_under_torchrun(tmp_path):
    pytest.importorskip("sklearn", reason="the examples read scikit-learn's digits")
    paths = os.pathsep.join(filter(None, [str(EXAMPLES.parent), os.environ.get("PYTHONPATH")]))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(EXAMPLES / "fsdp2.py")],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    updates, accuracy = re.search(r"(\d+) updates, accuracy .*: ([\d.]+)%", done.stdout).groups()
    assert int(updates) == 10 * 12  # 750 images of a rank are 23 micro-batches of 32 and one of 14
    assert float(accuracy) > 85
