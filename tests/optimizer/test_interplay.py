"""The wrapper among others: two models, compiled ones, several ranks, and what it says of itself."""

from __future__ import annotations

import pytest
import torch
from loops import cleared_micro_batch as micro_batch
from loops import loss_of, network
from loops import wrap_momentum as wrap
from torch import nn

import fusedacc


def test_two_models_two_wrappers_one_loss():
    first, second = network(), network()
    a, b = wrap(first, 2), wrap(second, 3)
    for seed in range(6):
        (loss_of(first, seed) + loss_of(second, seed)).backward()
        a.step(), a.zero_grad()
        b.step(), b.zero_grad()
    assert (a.num_updates, b.num_updates) == (3, 2)
    alone = network()
    c = wrap(alone, 3)
    for seed in range(6):
        micro_batch(alone, c, seed)
    for p, q in zip(second.parameters(), alone.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("steps", [None, 2])
def test_a_compiled_model(steps):
    model, reference = network(), network()
    optimizer, other = wrap(model, steps), wrap(reference, steps)
    compiled = torch.compile(model, backend="aot_eager")
    for seed in range(4):
        micro_batch(compiled, optimizer, seed)
        micro_batch(reference, other, seed)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert optimizer.num_updates == other.num_updates


@pytest.mark.parametrize("steps", [None, 2])
def test_explain_lists_every_parameter(steps):
    torch.manual_seed(0)
    model = nn.Module()
    model.plain = nn.Linear(4, 5)
    model.low = nn.Linear(3, 7).bfloat16()
    model.sparse = nn.Embedding(6, 2, sparse=True)
    model.hooked = nn.Parameter(torch.zeros(9))
    model.frozen = nn.Parameter(torch.zeros(8), requires_grad=False)
    model.hooked.register_post_accumulate_grad_hook(lambda p: None)
    optimizer = fusedacc.AccumulatingOptimizer(
        torch.optim.SGD([{"params": list(model.named_parameters())}], lr=0.1), steps
    )
    text = str(optimizer.explain())
    lines = {
        name: [line for line in text.splitlines() if name in line] for name, _ in model.named_parameters()
    }
    assert all(len(found) >= 1 for found in lines.values()), text
    plain, low = lines["plain.weight"][0], lines["low.weight"][0]
    assert "5x4" in plain
    assert "multi_tensor" in plain
    assert any(backend in plain for backend in ("cpu", "triton", "eager"))
    assert "bfloat16" in low
    assert "float32" in low
    assert "hook" in lines["hooked"][0]
    assert "froz" in lines["frozen"][0] or "requires_grad" in lines["frozen"][0]


def test_bytes_of_the_sums():
    weight = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=0.1), 2)
    assert optimizer.accumulator_bytes == 0
    weight.sum().backward()
    assert optimizer.accumulator_bytes == 4000


def test_explicit_backends_agree():
    ends = []
    for backend in ("auto", "eager"):
        model = network()
        optimizer = wrap(model, 2, backend=backend)
        for seed in range(4):
            micro_batch(model, optimizer, seed)
        ends.append(list(model.parameters()))
    for p, q in zip(*ends, strict=True):
        torch.testing.assert_close(p, q, rtol=8 * 2**-23, atol=2**-24)


def test_frozen_and_unfrozen():
    """As stock: what a frozen parameter had summed is still updated from; unfrozen, it goes on."""
    a, b = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
    b.requires_grad_(False)
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([a, b], lr=1.0), 2, reduction="sum")
    (a * 1.0 + b * 1.0).backward()
    optimizer.step()
    a.requires_grad_(False)
    b.requires_grad_(True)
    (a * 10.0 + b * 10.0).backward()
    optimizer.step()
    assert (a.item(), b.item()) == (-1.0, -10.0)
    optimizer.zero_grad()
    a.requires_grad_(True)
    for _ in range(2):
        (a * 2.0 + b * 3.0).backward()
        optimizer.step()
    assert (a.item(), b.item()) == (-5.0, -16.0)
