"""FSDP2 on two ranks: counted and manual loops equal one process and plain PyTorch."""

import contextlib
import math

import torch
import torch.distributed as dist
from fsdp_setting import adam, alone, far, loss_of, sharded, whole, wrap
from ranks import on_each_rank
from ranks_setting import refused
from torch import nn
from torch.distributed.tensor import DTensor


@on_each_rank(2)
def test_every_way_of_synchronising() -> None:
    """Synchronize in each micro-batch, or defer by hand or with accumulate(). Clip by hand."""
    K, UPDATES = 3, 3
    wanted, norms = alone(K, UPDATES)
    for way, clears in (
        ("every", True),
        ("every", False),
        ("by hand", False),
        ("by hand", True),
        ("accumulate", True),
    ):
        model = sharded()
        optimizer = wrap(model, K)
        for index in range(K * UPDATES):
            last = optimizer.will_update
            assert last == ((index + 1) % K == 0)
            if way == "by hand":
                model.set_requires_gradient_sync(last)
            with optimizer.accumulate(model) if way == "accumulate" else contextlib.nullcontext():
                loss_of(model, index).backward()
            shown = [p.grad for p in model.parameters()]
            if last:
                norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf)
                assert abs(whole(norm).item() / norms[index // K] - 1) < 1e-6, (way, norm, norms)
                assert all(isinstance(g, DTensor) for g in shown)
            else:
                assert shown == [None] * len(shown), (way, index)
            assert optimizer.micro_step == index % K
            optimizer.step()
            if clears:
                optimizer.zero_grad()
        assert optimizer.num_updates == UPDATES
        assert optimizer.micro_step == 0
        assert far(model, wanted) < 3e-7, (way, clears, far(model, wanted))
        optimizer.close()
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


@on_each_rank(2)
def test_a_window_that_ends_early() -> None:
    """The update uses the mean over the window. Different numbers of micro-batches are an error."""
    wanted, _ = alone(2, 1)
    model = sharded()
    optimizer = wrap(model, 4)
    for index in range(2):
        loss_of(model, index).backward()
        optimizer.step()
    optimizer.flush()
    assert optimizer.num_updates == 1
    assert far(model, wanted) < 3e-7
    optimizer.flush()
    assert optimizer.num_updates == 1
    before = [p.to_local().clone() for p in model.parameters()]
    with optimizer.ignore():
        loss_of(model, 5).backward()
    optimizer.zero_grad()
    if dist.get_rank() == 0:  # a backward that reaches no shard has no collective
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    refused(RuntimeError, "0 to 1 on all", optimizer.flush)
    for p, q in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.to_local(), q)
    optimizer.discard()
    assert optimizer.micro_step == 0


@on_each_rank(2)
def test_what_is_ignored() -> None:
    """Backwards inside ignore() do not count, before, between and after those that do."""
    wanted, _ = alone(2, 1)
    for steps in (2, None):
        model = sharded()
        wrap(model, 4).close()
        optimizer = wrap(model, steps)
        for index in range(2):
            with optimizer.ignore():
                loss_of(model, 7).backward()
            if steps:
                optimizer.zero_grad()
            (loss_of(model, index) * (1.0 if steps else 0.5)).backward()
            with optimizer.ignore():
                loss_of(model, 7).backward()
            if steps or index == 1:
                optimizer.step()
        assert optimizer.num_updates == 1
        assert far(model, wanted) < 3e-7


@on_each_rank(2)
def test_the_sum_is_in_grad() -> None:
    """p.grad equals plain PyTorch's bit for bit, also when synchronization is deferred."""
    K, UPDATES = 2, 2
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
                refused(RuntimeError, "set_requires_gradient_sync(True)", optimizer.state_dict)
            if last:
                optimizer.step(), optimizer.zero_grad(), inner.step(), inner.zero_grad()
        for p, q in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(p.to_local(), q.to_local())


@on_each_rank(2)
def test_sums_of_bfloat16_shards() -> None:
    """The sums are float32 sums of the same gradients as plain PyTorch's, without its rounding."""
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
