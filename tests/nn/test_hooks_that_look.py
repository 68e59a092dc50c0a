"""A hook with the attribute `only_looks`, as an audit's, gets a weight's gradient and changes no result."""

import pytest
import torch
from loops import wrap
from torch import Tensor, nn

from fusedacc.nn.functional import linear_cross_entropy


class Experts(nn.Module):
    """Reads one matrix after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 160, 120) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return sum(
            (nn.functional.linear(x[index::3], self.weight[index]).sum(0) for index in range(3)), x.sum()
        )


class Grouped(Experts):
    """Multiplies by all matrices in one call."""

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([2, 5, len(x)], dtype=torch.int32)
        return nn.functional.grouped_mm(x, self.weight.transpose(-2, -1), offs=ends)


class Head(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return linear_cross_entropy(x, self.weight, torch.arange(len(x)))


MODULES = {
    "linear": lambda: nn.Linear(120, 160),
    "embedding": lambda: nn.Embedding(50, 120),
    "experts": Experts,
    "grouped": Grouped,
    "head": lambda: Head(120, 160, bias=False),
}


class Look:
    """A hook that adds up the gradients of each backward pass.

    Modules call it for each part of a gradient that they have added, and autograd calls it with None.
    """

    only_looks = True

    def __init__(self) -> None:
        self.sum: Tensor | float = 0.0

    def __call__(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            self.sum = self.sum + gradient


def inputs(kind: str, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    if kind == "embedding":
        return torch.randint(0, 50, (9,), generator=generator)
    return torch.randn(9, 120, generator=generator)


@pytest.mark.parametrize("choice", ["", "0"])
@pytest.mark.parametrize("kind", MODULES)
def test_it_gets_the_gradients_and_changes_no_bit(kind, choice, monkeypatch):
    monkeypatch.setenv("FUSEDACC_ENGINE", choice)
    results = []
    for hook in (None, Look()):
        torch.manual_seed(0)
        model = MODULES[kind]()
        optimizer = wrap(model, 3, model=model)
        if hook is not None:
            model.weight.register_hook(hook)
        for number in range(6):
            x = inputs(kind, number)
            (expected,) = torch.autograd.grad((model(x) * 1.5).sum(), model.weight)
            if hook is not None:
                hook.sum = 0.0
            (model(x) * 1.5).sum().backward()
            if hook is not None:
                torch.testing.assert_close(hook.sum, expected, rtol=1e-5, atol=1e-5)
            optimizer.step(), optimizer.zero_grad()
        results.append(model.weight.detach())
    assert torch.equal(*results)


def test_other_hooks_beside_it_act():
    model = nn.Linear(120, 160, bias=False)
    optimizer = wrap(model, 1, lr=1.0, model=model)
    model.weight.register_hook(Look())
    model.weight.register_hook(torch.zeros_like)
    before = model.weight.detach().clone()
    model(inputs("linear", 0)).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight, before)
