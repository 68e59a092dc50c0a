"""The number of calls grows linearly with the number of parameters."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import fusedacc

OURS = str(Path(fusedacc.__file__).parent)
FEW, TIMES = 30, 4


def calls(work: Callable[[], object]) -> int:
    """Return how many Python and C functions the package calls, without those that torch's functions call."""
    count = 0

    def profile(frame, event: str, argument: object) -> None:
        nonlocal count
        if event in ("call", "c_call") and frame.f_code.co_filename.startswith(OURS):
            count += 1

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


class Many(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x) for layer in self.layers]).sum()


def one_group(net: Many, **options):
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    return lambda: fusedacc.AccumulatingOptimizer(inner, 2, **options)


def many_groups(net: Many, **options):
    inner = torch.optim.SGD([{"params": [p]} for p in net.parameters()], lr=0.1)
    return lambda: fusedacc.AccumulatingOptimizer(inner, 2, **options)


def groups_added(net: Many, **options):
    first, *others = net.parameters()
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([first], lr=0.1), 2, **options)

    def add() -> None:
        for param in others:
            optimizer.add_param_group({"params": [param]})

    return add


def groups_appended(net: Many, **options):
    first, *others = net.parameters()
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([first], lr=0.1), 2, **options)
    for param in others:
        optimizer.param_groups.append(optimizer.param_groups[0] | {"params": [param]})
    return optimizer.zero_grad


def replaced(net: Many, **options):
    optimizer = one_group(net, **options)()
    params = optimizer.param_groups[0]["params"]
    params[:] = [nn.Parameter(param.detach().clone()) for param in params]
    for layer, param in zip(net.layers, params, strict=True):
        layer.weight = param
    return optimizer.zero_grad


def reshaped(net: Many, **options):
    optimizer = one_group(net, **options)()
    for layer in net.layers:
        layer.weight.data = torch.zeros(3, 2)
    return optimizer.zero_grad


def window(net: Many, **options):
    optimizer = many_groups(net, **options)()

    def train() -> None:
        for _ in range(2):
            net(torch.ones(1, 2)).backward()
            optimizer.step(), optimizer.zero_grad()

    train()
    return train


@pytest.mark.parametrize("given", [False, True], ids=["plain", "model"])
@pytest.mark.parametrize(
    "prepare", [one_group, many_groups, groups_added, groups_appended, replaced, reshaped, window]
)
def test_calls_grow_linearly_with_parameters(prepare, given):
    counts = []
    for number in (FEW, FEW * TIMES):
        model = Many(number)
        counts.append(calls(prepare(model, **({"model": model} if given else {}))))
    few, many = counts
    assert 0 < few <= many
    assert many <= 1.05 * TIMES * few


def test_the_search_for_edited_groups_makes_no_call_per_parameter():
    """`step()` runs it in every micro-batch. It compares lists by identity, in C."""
    counts = []
    for number in (FEW, FEW * TIMES):
        roster = one_group(Many(number))()._parameter_set
        assert roster.in_step
        counts.append(calls(lambda roster=roster: roster.in_step))
    assert counts[0] == counts[1] < 20
