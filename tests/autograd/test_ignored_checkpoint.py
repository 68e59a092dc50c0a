"""A backward inside `ignore()` that runs another inside it, as reentrant checkpoints do, does not count."""

from __future__ import annotations

import pytest
import torch
from loops import wrap
from torch import nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.block, self.down = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x, reentrant=True):
        x = self.up(x)
        x = checkpoint(self.block, x, use_reentrant=True) if reentrant else self.block(x)
        return self.down(x).pow(2).mean()


def inputs(seed: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("micro", [0, 1])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("private", [True, False])
def test_an_ignored_backward_inside_an_ignored_one(private, before, micro):
    model = Net()
    optimizer = wrap(model, 2, private_gradients=private)
    wanted = [p.detach().clone() for p in model.parameters()]
    for seed in (0, 1):
        loss = model(inputs(seed), reentrant=False) / 2
        for each, gradient in zip(wanted, torch.autograd.grad(loss, list(model.parameters())), strict=True):
            each.sub_(gradient, alpha=0.1)
    for seed in (0, 1):
        if before and seed == micro:
            with optimizer.ignore():
                model(inputs(7)).backward()
            optimizer.zero_grad()
        model(inputs(seed)).backward()
        if not before and seed == micro:
            with optimizer.ignore():
                model(inputs(7)).backward()
        optimizer.step(), optimizer.zero_grad()
    for p, each in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.detach(), each)
