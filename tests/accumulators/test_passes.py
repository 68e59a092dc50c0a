"""Lists of accumulators are prepared once and used in every micro-batch."""

import pytest
import torch
from torch import nn

import fusedacc
from fusedacc.autograd import python_hooks
from fusedacc.kernels import registry

LAYERS = 100


@pytest.fixture
def each_alone(monkeypatch):
    """Make every gradient a large one that arrives at a hook in Python, as on a GPU."""
    monkeypatch.setenv("FUSEDACC_NATIVE_HOOKS", "0")
    monkeypatch.setitem(python_hooks.LARGE_BYTES, "cpu", 1)


@pytest.fixture
def prepared(monkeypatch):
    """Return a list with the number of accumulators of each list that was prepared."""
    found: list[int] = []
    prepare = registry.get("cpu").prepare

    def counted(accumulators):
        found.append(len(accumulators))
        return prepare(accumulators)

    monkeypatch.setattr(registry.get("cpu"), "prepare", counted, raising=False)
    return found


def model() -> nn.ParameterList:
    return nn.ParameterList(torch.ones(3, dtype=torch.bfloat16) for _ in range(LAYERS))


@pytest.mark.usefixtures("each_alone")
def test_all_lists_stay_prepared_however_many_there_are(prepared):
    weights = model()
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(weights, lr=0.0), 3, backend="cpu")
    for _ in range(9):
        sum(weight.sum() for weight in weights).backward()
        optimizer.step(), optimizer.zero_grad()
    assert prepared == [1] * LAYERS * 3  # each window has new sums


def test_unused_lists_are_dropped(monkeypatch):
    monkeypatch.setenv("FUSEDACC_NATIVE_HOOKS", "0")
    weights = model()
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(weights, lr=0.0), None, backend="cpu")
    sum(weight.sum() for weight in weights).backward()
    passes = optimizer._accumulators.passes
    seen = []
    for first in range(0, LAYERS - 30):
        sum(weight.sum() for weight in weights[first : first + 30]).backward()
        seen.append(sum(len(binding.slots) for binding in passes.prepared.values()))
    assert seen[:3] == [30, 60, 90]
    assert max(seen) <= 2 * LAYERS
    assert passes.prepared


def test_an_addition_uses_the_new_memory_of_a_prepared_accumulator(monkeypatch):
    """`p.grad.data = other` gives the same tensor another address."""
    monkeypatch.setenv("FUSEDACC_NATIVE_HOOKS", "0")
    weight = nn.Parameter(torch.ones(300, dtype=torch.bfloat16))
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=0.0), None, backend="cpu")
    for _ in range(3):
        weight.sum().backward()
    prepared = optimizer._accumulators.passes.prepared
    assert [each.run is not None for each in prepared.values()] == [True]
    former = weight.grad.data
    weight.grad.data = torch.full_like(former, 10.0)
    weight.sum().backward()
    assert torch.equal(weight.grad, torch.full_like(former, 11.0))
    assert torch.equal(former, torch.full_like(former, 3.0))
