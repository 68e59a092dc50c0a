"""Experts and autograd: checkpoints, hooks, frozen weights, second derivatives and all kinds of means."""

import functools

import pytest
import torch
from experts_models import TWINS, WIDTH, Experts, batch, loss_of, pair, wrapped
from loops import assert_close_weights, assert_same_gradients
from torch import nn
from torch.utils.checkpoint import checkpoint


def through_a_checkpoint(net, reentrant: bool) -> None:
    for index in range(3):
        x, experts = batch(index)
        out = checkpoint(net.experts, net.enter(x), experts, use_reentrant=reentrant)
        net.leave(out).pow(2).mean().backward()


def frozen_and_trained_again(net) -> None:
    for index in range(4):
        net.experts.up.requires_grad_(index % 2 == 0)
        loss_of(net, index).backward()


def with_a_hook_on_the_weight(net) -> None:
    net.experts.up.register_hook(lambda gradient: gradient * 2)
    for index in range(2):
        loss_of(net, index).backward()


def second_derivative(net) -> None:
    first = torch.autograd.grad(loss_of(net, 0), [net.experts.up, net.experts.down], create_graph=True)
    sum(gradient.pow(2).sum() for gradient in first).backward()


USES = {
    "reentrant checkpoint": functools.partial(through_a_checkpoint, reentrant=True),
    "checkpoint": functools.partial(through_a_checkpoint, reentrant=False),
    "frozen": frozen_and_trained_again,
    "hook": with_a_hook_on_the_weight,
    "second derivative": second_derivative,
}


@pytest.mark.parametrize("how", TWINS)
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_gradients_equal_plain_pytorchs(use, how):
    model, optimizer, twin = pair(how)
    for each in (model, twin):
        use(each)
    assert_same_gradients(model, twin, rtol=1e-4, atol=1e-6)
    assert optimizer.explain()


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
def test_what_adds_nothing(how):
    """Check autograd.grad, evaluation, parameters that replace the module's, and ignored backwards."""
    model, optimizer, twin = pair(how)
    ours, theirs = (torch.autograd.grad(loss_of(each, 0), each.experts.up)[0] for each in (model, twin))
    torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        assert torch.equal(model(*batch(0)), twin(*batch(0)))
    others = {name: p.detach() * 2 for name, p in model.named_parameters()}
    assert torch.equal(*(torch.func.functional_call(each, others, batch(0)) for each in (model, twin)))
    assert all(p.grad is None for p in model.parameters())
    with optimizer.ignore():
        loss_of(model, 7).backward()
    model.zero_grad()
    for each in (model, twin):
        loss_of(each, 0).backward()
    assert_same_gradients(model, twin)


@pytest.mark.parametrize("how", TWINS)
@pytest.mark.parametrize("reduction", ["mean", "weighted"])
def test_means_that_end_with_flush(how, reduction):
    """The scale of a window's sums changes at its end, for all experts."""
    model, optimizer, twin = pair(how, steps=4, reduction=reduction)
    stock = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for index in range(3):
        weight, share = (index + 1, (index + 1) / 6) if reduction == "weighted" else (None, 1 / 3)
        with optimizer.accumulate(weight=weight):
            loss_of(model, index).backward()
        optimizer.step()
        (loss_of(twin, index) * share).backward()
    optimizer.flush()
    stock.step()
    assert_close_weights(model, twin)
