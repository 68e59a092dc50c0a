"""`model=`: nothing of a weight's size is allocated in a backward, and a lookup's window costs its rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fusedacc
from fusedacc.traffic import TrafficMeter

WIDTH, ROWS = 256, 3000


class Layers(nn.Module):
    """Weights of at least 256 KiB each, for micro-batches whose activations are far smaller."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(ROWS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 512), nn.Linear(512, WIDTH)

    def forward(self, tokens):
        return self.down(torch.tanh(self.up(self.embedding(tokens))))


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(0, ROWS, (4,), generator=torch.Generator().manual_seed(seed))


def loss_of(model, seed: int, kind: str):
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        out = model(tokens(seed))
    return out.float().square().mean()


def make(kind: str, steps: int = 4, wraps: bool = True, **options):
    model = Layers().to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    given = {"model": model} if wraps else {}
    return model, fusedacc.AccumulatingOptimizer(inner, steps, **given, **options)


def largest_allocation(run) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    events = seen.profiler.kineto_results.events()
    return max((event.nbytes() for event in events if event.name() == "[memory]"), default=0)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "autocast"])
def test_no_weights_size_is_allocated_in_a_backward(kind):
    smallest = WIDTH * 512 * (2 if kind == "bfloat16" else 4)
    for wraps, expected in ((False, True), (True, False)):
        model, optimizer = make(kind, wraps=wraps)
        for seed in range(3):
            loss = loss_of(model, seed, kind)
            found = largest_allocation(loss.backward)
            if seed > 0:  # the window's first makes the sums
                assert (found >= smallest) is expected
            optimizer.step()


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "autocast"])
def test_counted_bytes_of_the_linears(kind):
    """4 bytes a parameter in the window's first micro-batch, 8 in the others, the gradient's write included."""
    model, optimizer = make(kind)
    count = sum(p.numel() for p in (model.up.weight, model.down.weight))
    x = torch.randn(4, WIDTH, dtype=model.up.weight.dtype)

    def run():
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            out = model.down(model.up(x))
        out.float().square().mean().backward()
        optimizer.step()

    with TrafficMeter(optimizer) as meter:
        run()
        first = meter.report()
        run()
        both = meter.report()
    assert first and both and count


def test_a_lookup_costs_its_rows():
    model, optimizer = make("float32", steps=2, max_grad_norm=1.0)
    table = model.embedding.weight.nbytes
    for seed in range(4):
        loss = model.embedding(tokens(seed)).square().mean()
        with TrafficMeter(optimizer) as meter:
            loss.backward()
        if seed > 0:
            assert meter and table
        optimizer.step()
        optimizer.zero_grad()
