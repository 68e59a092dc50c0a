"""A compiled model, and step() inside and outside a compiled region, against the eager loop."""

from __future__ import annotations

import copy
import itertools

import pytest
import sweeps
import torch
from loops import LOW, assert_close_weights, assert_equal_weights, network

import fusedacc

F32 = torch.float32


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def build(dtype, steps, **options):
    model = network(dtype)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    return model, fusedacc.AccumulatingOptimizer(inner, steps, **options)


def batch(seed, dtype):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)


def loss_of(model, x):
    return model(x).float().square().mean()


OPTIONS = {
    "plain": {},
    "clip": {"max_grad_norm": 0.05},
    "masters": {"master_weights": True, "max_grad_norm": 0.05},
}


CASES = [
    ("plain", "inductor", "model"),
    ("plain", "aot_eager", "step outside"),
    ("clip", "aot_eager", "step inside"),
    ("masters", "inductor", "step inside"),
]
if sweeps.FULL:
    CASES = list(
        itertools.product(OPTIONS, ("aot_eager", "inductor"), ("model", "step outside", "step inside"))
    )


@pytest.mark.parametrize(("options", "compiler", "where"), CASES)
def test_equals_the_eager_loop(options, compiler, where):
    dtype = LOW if options == "masters" else F32
    eager, reference = build(dtype, 2, **OPTIONS[options])
    for seed in range(4):
        loss_of(eager, batch(seed, dtype)).backward()
        reference.step()
        reference.zero_grad()

    model, optimizer = build(dtype, 2, **OPTIONS[options])
    compiled = torch.compile(model, backend=compiler) if where == "model" else model

    def forward_backward(x):
        loss_of(compiled, x).backward()

    def whole(x):
        forward_backward(x)
        optimizer.step()
        optimizer.zero_grad()

    if where == "step outside":
        forward_backward = torch.compile(forward_backward, backend=compiler)
    if where == "step inside":
        whole = torch.compile(whole, backend=compiler)
    for seed in range(4):
        whole(batch(seed, dtype))
    assert (optimizer.num_updates, optimizer.micro_step) == (2, 0)
    tolerance = 1e-5 if dtype == F32 else 2e-2
    assert_close_weights(model, eager, tolerance, tolerance / 10)


def test_only_the_update_is_compiled():
    eager, reference = build(F32, 1)
    model, optimizer = build(F32, 1)
    step = torch.compile(lambda: optimizer.step(), backend="aot_eager")
    for seed in range(3):
        for m, o, run in ((eager, reference, reference.step), (model, optimizer, step)):
            loss_of(m, batch(seed, F32)).backward()
            run()
            o.zero_grad()
    assert_equal_weights(model, eager)
    assert optimizer.num_updates == 3
    assert copy.deepcopy(optimizer).num_updates == 3
