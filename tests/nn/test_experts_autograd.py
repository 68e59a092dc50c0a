"""Experts and autograd: checkpoints, hooks, frozen weights, second derivatives, means of all kinds."""

from __future__ import annotations

import pytest
import torch
from experts_models import TWINS, WIDTH, Experts, assert_same_gradients, batch, loss_of, pair, wrapped
from torch import nn
from torch.utils.checkpoint import checkpoint


@pytest.mark.parametrize("how", TWINS)
def test_both_kinds_of_checkpoint(how):
    for reentrant in (True, False):
        model, _optimizer, twin = pair(how)
        for index in range(3):
            for each in (model, twin):
                x, experts = batch(index)
                hidden = each.enter(x)
                out = checkpoint(each.experts, hidden, experts, use_reentrant=reentrant)
                each.leave(out).pow(2).mean().backward()
        assert_same_gradients(model, twin)


@pytest.mark.parametrize("how", TWINS)
def test_a_weight_that_two_modules_share(how):
    class Shared(nn.Module):
        def __init__(self, how):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = Experts(how), Experts(how)
            self.second.up = self.first.up

        def forward(self, x, experts):
            return self.second(self.first(x, experts), experts.flip(0))

    model, twin = Shared(how), Shared(TWINS[how])
    _optimizer = wrapped(model, None)
    for index in range(3):
        _, experts = batch(index)
        x = torch.randn(len(experts), WIDTH, generator=torch.Generator().manual_seed(index))
        for each in (model, twin):
            each(x, experts).pow(2).mean().backward()
    assert_same_gradients(model, twin, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", TWINS)
def test_frozen_and_trained_again(how):
    model, optimizer, twin = pair(how)
    for index in range(4):
        for each in (model, twin):
            each.experts.up.requires_grad_(index % 2 == 0)
            loss_of(each, index).backward()
    assert_same_gradients(model, twin)
    assert optimizer.explain()


@pytest.mark.parametrize("how", TWINS)
def test_a_hook_on_the_weight_sees_its_gradient(how):
    model, _optimizer, twin = pair(how)
    for each in (model, twin):
        each.experts.up.register_hook(lambda gradient: gradient * 2)
    for index in range(2):
        for each in (model, twin):
            loss_of(each, index).backward()
    assert_same_gradients(model, twin)


@pytest.mark.parametrize("how", TWINS)
def test_grad_by_the_weight_adds_nothing(how):
    model, _optimizer, twin = pair(how)
    ours, theirs = (torch.autograd.grad(loss_of(each, 0), each.experts.up)[0] for each in (model, twin))
    torch.testing.assert_close(ours, theirs)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("how", TWINS)
def test_a_second_derivative(how):
    model, _optimizer, twin = pair(how)
    for each in (model, twin):
        weights = [each.experts.up, each.experts.down]
        first = torch.autograd.grad(loss_of(each, 0), weights, create_graph=True)
        sum(gradient.pow(2).sum() for gradient in first).backward()
    assert_same_gradients(model, twin, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("how", TWINS)
def test_evaluation_and_ignored_backwards(how):
    model, optimizer, twin = pair(how)
    with torch.no_grad():
        torch.testing.assert_close(model(*batch(0)), twin(*batch(0)), rtol=0, atol=0)
    with optimizer.ignore():
        loss_of(model, 7).backward()
    model.zero_grad()
    for each in (model, twin):
        loss_of(each, 0).backward()
    assert_same_gradients(model, twin)


@pytest.mark.parametrize("how", TWINS)
def test_parameters_that_stand_in_for_the_modules_own(how):
    model, _optimizer, twin = pair(how)
    others = {name: p.detach() * 2 for name, p in model.named_parameters()}
    ours, theirs = (torch.func.functional_call(each, others, batch(0)) for each in (model, twin))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("how", TWINS)
def test_weighted_means(how):
    model, optimizer, twin = pair(how, steps=3, reduction="weighted")
    for index in range(3):
        with optimizer.accumulate(weight=index + 1):
            loss_of(model, index).backward()
        (loss_of(twin, index) * (index + 1) / 6).backward()
        if index < 2:
            optimizer.step()
    assert_same_gradients(model, twin, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("how", TWINS)
def test_a_mean_by_flush(how):
    """The unit of a window's sums changes at its end: all experts' with it."""
    model, optimizer, twin = pair(how, steps=4)
    stock = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for index in range(3):
        loss_of(model, index).backward()
        optimizer.step()
        (loss_of(twin, index) / 3).backward()
    optimizer.flush()
    stock.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
