"""The casts for an update leave every gradient that the user holds as it was, and are freed after it."""

import pytest
import torch
from loops import LOW
from torch import nn

import fusedacc


def wrap(net: nn.Module, steps, **options) -> fusedacc.AccumulatingOptimizer:
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    return fusedacc.AccumulatingOptimizer(inner, steps, max_grad_norm=1.0, **options)


def layers(widths) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(*pair) for pair in widths)).to(LOW)


LOOKS = {
    "itself": lambda gradient: gradient,
    "detach": lambda gradient: gradient.detach(),
    "row": lambda gradient: gradient[0],
    "data": lambda gradient: gradient.data,
    "graph": lambda gradient: (gradient * torch.ones((), requires_grad=True)).grad_fn,
}


@pytest.mark.sweep
@pytest.mark.parametrize("steps", [None, 1])
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("width", [64, 1024])
def test_a_cast_does_not_overwrite_a_gradient_that_the_user_holds(width, look, steps):
    net = layers([(width, width)] * 2)
    optimizer = wrap(net, steps)
    for _ in range(2):
        net(torch.randn(2, width, dtype=LOW)).float().square().sum().backward()
        seen = [LOOKS[look](p.grad) for p in net.parameters()]
        values = [p.grad.clone() for p in net.parameters()]
        optimizer.step()
        for view, value in zip(seen, values, strict=True):
            expected = LOOKS[look](value) if look != "graph" else value
            assert torch.equal(view._saved_self if look == "graph" else view, expected)
        optimizer.zero_grad()
