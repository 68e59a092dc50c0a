"""Clipping uses the norm of p.grad at `step()`, even if the user changed it."""

import pytest
import torch
from loops import Failure, fail, loss_of, micro_batch, network, wrap
from torch import nn
from torch.utils.dlpack import from_dlpack, to_dlpack

import fusedacc
from fusedacc.functional import total_norm


def build(model, steps=2, **options):
    return wrap(model, steps, max_grad_norm=1e9, lr=0.0, **options)


def norm_of_grads(model: nn.Module) -> torch.Tensor:
    return total_norm([p.grad for p in model.parameters() if p.grad is not None])


def run_last(optimizer, model, seeds=(0, 1)) -> None:
    """Run a window without its last `step()`."""
    for seed in seeds:
        loss_of(model, seed).backward()
        if seed != seeds[-1]:
            optimizer.step()


def times(array, factor: float) -> None:
    array *= factor


CHANGES = {
    "in place": lambda model: model[0].weight.grad.mul_(3.0),
    "clipped by value": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3),
    "replaced": lambda model: setattr(model[0].weight, "grad", torch.ones_like(model[0].weight)),
    "removed": lambda model: setattr(model[0].weight, "grad", None),
    "through a view": lambda model: model[0].weight.grad.view(-1)[:3].zero_(),
    "by clip_grad_norm_": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "through .data": lambda model: model[0].weight.grad.data.mul_(3.0),
    ".data, as the tutorial divides": lambda model: [times(p.grad.data, 1 / 64) for p in model.parameters()],
    ".data replaced": lambda model: setattr(model[0].weight.grad, "data", torch.ones(5, 4)),
    "through numpy": lambda model: times(model[0].weight.grad.numpy(), 3.0),
    "through dlpack": lambda model: from_dlpack(to_dlpack(model[0].weight.grad)).mul_(3.0),
    "through its storage": lambda model: model[0].weight.grad.untyped_storage().fill_(0),
}


@pytest.mark.sweep
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("in_closure", [False, True])
def test_the_norm_includes_what_the_user_changed(change, steps, in_closure):
    model = network()
    optimizer = build(model, steps)
    for seed in range(steps - 1):
        micro_batch(model, optimizer, seed)
    wanted = []

    def last_micro_batch():
        loss_of(model, steps).backward()
        CHANGES[change](model)
        wanted.append(norm_of_grads(model))

    if not in_closure:
        last_micro_batch()
    optimizer.step(last_micro_batch if in_closure else None)
    assert torch.equal(optimizer.grad_norm, wanted[0])


def part(model: nn.Module) -> None:
    """Run a backward through some of the parameters."""
    model[0](torch.randn(3, 4)).square().mean().backward()


@pytest.mark.parametrize("stored", [False, True], ids=["", "autograd stores one"])
@pytest.mark.parametrize(("steps", "whole"), [(2, 2), (2, 1), (3, 2)])
def test_the_norm_is_right_after_a_last_backward_through_some_parameters(steps, whole, stored):
    """`whole` backwards through all parameters come before it, in the same micro-batch or in earlier ones."""
    model = network()
    if stored:
        model[0].bias.register_post_accumulate_grad_hook(lambda p: None)
    optimizer = build(model, steps)
    for seed in range(whole):
        loss_of(model, seed).backward()
        if seed < steps - 1:
            optimizer.step()
    part(model)
    wanted = norm_of_grads(model)
    optimizer.step()
    assert torch.equal(optimizer.grad_norm, wanted)


@pytest.mark.parametrize("reduction", ["weighted", "normalized", "flushed"])
def test_the_norm_is_right_if_the_scale_is_known_late(reduction):
    model = network()
    flushes = reduction == "flushed"
    given = {} if flushes else {"reduction": reduction}
    optimizer = build(model, 4 if flushes else 2, **given)
    for seed in (0, 1):
        with optimizer.accumulate(weight=None if flushes else 3.0 + seed):
            loss_of(model, seed).backward()
        optimizer.step()
    if flushes:
        optimizer.flush()
    assert torch.equal(optimizer.grad_norm, norm_of_grads(model))


@pytest.mark.parametrize("then", ["clears", "continues", "writes and repeats the step"])
def test_the_norm_is_right_after_an_update_that_failed(then):
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)  # it scales: a second try is allowed
    optimizer = fusedacc.AccumulatingOptimizer(inner, 2, max_grad_norm=1e9)
    fails = inner.register_step_pre_hook(fail)
    run_last(optimizer, model)
    with pytest.raises(Failure):
        optimizer.step()
    fails.remove()
    if then == "writes and repeats the step":
        model[0].weight.grad.data.mul_(3.0)
        wanted = norm_of_grads(model)
        optimizer.step()
        assert torch.equal(optimizer.grad_norm, wanted)
        return
    if then == "clears":
        optimizer.zero_grad()
    loss_of(model, 2).backward()  # touches every sum
    optimizer.step()
    part(model)  # and this one a part
    wanted = norm_of_grads(model)
    optimizer.step()
    assert torch.equal(optimizer.grad_norm, wanted)


def test_the_norm_includes_changes_after_unscaling():
    model = network()
    optimizer = build(model)
    scaler = fusedacc.amp.GradScaler("cpu", init_scale=8.0)
    for seed in (0, 1):
        scaler.scale(loss_of(model, seed)).backward()
        if seed == 0:
            scaler.step(optimizer), scaler.update()
    scaler.unscale_(optimizer)
    model[0].weight.grad.data.mul_(3.0)
    wanted = norm_of_grads(model)
    scaler.step(optimizer)
    assert torch.equal(optimizer.grad_norm, wanted)
