"""The norm that a window's last additions leave: the bits of reading the sums, and never a stale one."""

from __future__ import annotations

import pytest
import torch
from loops import LOW, loss_of, network
from torch import nn

import fusedacc
from fusedacc.functional import total_norm
from fusedacc.traffic import TrafficMeter

F32 = torch.float32


def build(model, steps=2, **options):
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    return fusedacc.AccumulatingOptimizer(inner, steps, max_grad_norm=1e9, **options)


def norm_of_grads(model: nn.Module) -> torch.Tensor:
    return total_norm([p.grad for p in model.parameters() if p.grad is not None])


def reads(optimizer) -> int:
    """Calls that read sums for their norm in the next step."""
    with TrafficMeter() as meter:
        optimizer.step()
    ops = meter.as_dict()["by_op"]
    return sum(op["calls"] for name, op in ops.items() if "norm_partials" in name)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("dtype", [F32, LOW, torch.float64])
@pytest.mark.parametrize("steps", [2, 3])
def test_the_bits_are_those_of_reading_the_sums(dtype, steps, norm_type, cpu_backend):
    model = network(dtype)
    optimizer = build(model, steps, backend=cpu_backend, norm_type=norm_type)
    for window in range(4):
        for step in range(steps):
            loss_of(model, steps * window + step).backward()
            if step < steps - 1:
                optimizer.step()
        wanted = total_norm([p.grad for p in model.parameters()], norm_type, backend=cpu_backend)
        optimizer.step()
        if dtype == torch.float64:  # the chunks are joined in another order, which float32 does not show
            torch.testing.assert_close(optimizer.grad_norm, wanted, rtol=1e-14, atol=0)
        else:
            assert torch.equal(optimizer.grad_norm, wanted)
        optimizer.zero_grad()


def test_nothing_is_read_where_the_last_addition_left_all():
    model = network()
    optimizer = build(model)
    for seed in (0, 1):
        loss_of(model, seed).backward()
        if seed == 0:
            optimizer.step()
    assert reads(optimizer) == 0


CHANGES = {
    "in place": lambda model: model[0].weight.grad.mul_(3.0),
    "clipped by value": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3),
    "replaced": lambda model: setattr(model[0].weight, "grad", torch.ones_like(model[0].weight)),
    "removed": lambda model: setattr(model[0].weight, "grad", None),
    "through a view": lambda model: model[0].weight.grad.view(-1)[:3].zero_(),
    "by clip_grad_norm_": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_user_does_to_the_gradients_counts(change):
    model = network()
    optimizer = build(model)
    for seed in (0, 1):
        loss_of(model, seed).backward()
        if seed == 0:
            optimizer.step()
    CHANGES[change](model)
    wanted = norm_of_grads(model)
    optimizer.step()
    assert torch.equal(optimizer.grad_norm, wanted)


def test_several_backwards_in_the_last_micro_batch():
    model = network()
    optimizer = build(model)
    loss_of(model, 0).backward()
    optimizer.step()
    loss_of(model, 1).backward()
    model[0](torch.randn(3, 4)).square().mean().backward()  # a part of the parameters once more
    wanted = norm_of_grads(model)
    optimizer.step()
    assert torch.equal(optimizer.grad_norm, wanted)


@pytest.mark.parametrize("steps", [2, 3])
def test_parameters_that_the_last_micro_batch_does_not_touch(steps):
    model = network()
    optimizer = build(model, steps)
    for seed in range(steps - 1):
        loss_of(model, seed).backward()
        optimizer.step()
    model[0](torch.randn(3, 4)).square().mean().backward()
    wanted = norm_of_grads(model)
    # Added to once only, they are scaled at the end, which leaves their norm too.
    assert reads(optimizer) == (0 if steps == 2 else 1)
    assert torch.equal(optimizer.grad_norm, wanted)


def test_gradients_that_autograd_stores():
    model = network()
    model[0].bias.register_post_accumulate_grad_hook(lambda p: None)
    optimizer = build(model)
    for seed in (0, 1):
        loss_of(model, seed).backward()
        if seed == 0:
            optimizer.step()
    wanted = norm_of_grads(model)
    optimizer.step()
    assert torch.equal(optimizer.grad_norm, wanted)


@pytest.mark.parametrize("clears", [True, False])
def test_an_update_that_fails_leaves_no_stale_norm(clears):
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = fusedacc.AccumulatingOptimizer(inner, 2, max_grad_norm=1e9)
    fails = inner.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
    for seed in (0, 1):
        loss_of(model, seed).backward()
        if seed == 0:
            optimizer.step()
    with pytest.raises(RuntimeError, match="broken"):
        optimizer.step()
    fails.remove()
    if clears:
        optimizer.zero_grad()
    loss_of(model, 2).backward()  # touches every sum
    optimizer.step()
    model[0](torch.randn(3, 4)).square().mean().backward()  # and this one a part
    wanted = norm_of_grads(model)
    optimizer.step()
    assert torch.equal(optimizer.grad_norm, wanted)


@pytest.mark.parametrize("reduction", ["weighted", "normalized"])
def test_sums_that_are_rescaled_are_read(reduction):
    model = network()
    optimizer = build(model, reduction=reduction)
    for seed in (0, 1):
        with optimizer.accumulate(weight=3.0 + seed):
            loss_of(model, seed).backward()
        optimizer.step()
    wanted = norm_of_grads(model)
    assert torch.equal(optimizer.grad_norm, wanted)


def test_a_flushed_window():
    model = network()
    optimizer = build(model, steps=4)
    for seed in (0, 1):
        loss_of(model, seed).backward()
        optimizer.step()
    optimizer.flush()
    assert torch.equal(optimizer.grad_norm, norm_of_grads(model))
    optimizer.zero_grad()
    optimizer.discard()


def test_mixed_dtypes_and_many_parameters():
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(8, 8).to(LOW if index % 2 else F32) for index in range(40))
    optimizer = build(model, steps=2)

    def loss():
        return sum(layer(torch.randn(2, 8).to(layer.weight.dtype)).float().square().mean() for layer in model)

    for step in range(6):
        loss().backward()
        if step % 2:
            wanted = norm_of_grads(model)
            assert reads(optimizer) == 0
            torch.testing.assert_close(optimizer.grad_norm, wanted, rtol=1e-6, atol=0)
            optimizer.zero_grad()
        else:
            optimizer.step()
