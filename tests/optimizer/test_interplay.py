"""Two wrappers beside each other, and what one says of itself."""

from __future__ import annotations

import pytest
import torch
from loops import assert_equal_weights, loss_of, network
from loops import cleared_micro_batch as micro_batch
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
    assert_equal_weights(second, alone)


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
