"""Backwards on other streams than the default one: an addition waits for its gradient and its sum."""

import pytest
import torch
from loops import with_backward
from torch import nn

import fusedacc
from fusedacc.accumulators import engine

pytestmark = pytest.mark.cuda

STEPS = 4
CYCLES = 20_000_000  # some milliseconds


def late(gradient):
    """Return the gradient after the stream has slept."""
    torch.cuda._sleep(CYCLES)
    return gradient * 1.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))) * with_backward(self.first.bias, late)


def windows(forward, backward, model: bool, wraps: bool):
    """Return the gradients of a window whose micro-batches alternate between streams."""
    net = Net().cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    if wraps:
        optimizer = fusedacc.AccumulatingOptimizer(optimizer, None, model=net if model else None)
    batches = [
        torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)).cuda() for seed in range(STEPS)
    ]
    torch.cuda.synchronize()
    for turn, batch in enumerate(batches):
        there, back = forward[turn % len(forward)], backward[turn % len(backward)]
        with torch.cuda.stream(there):
            loss = net(batch).square().sum()
        back.wait_stream(there)
        with torch.cuda.stream(back):
            loss.backward()
    torch.cuda.synchronize()
    return [parameter.grad.clone() for parameter in net.parameters()]


@pytest.mark.parametrize("large", [True, False], ids=["at once", "in buckets"])
@pytest.mark.parametrize("model", [True, False], ids=["model", "plain"])
@pytest.mark.parametrize("where", ["default to side", "side to default", "default to sides in turn"])
def test_sums_equal_those_of_one_stream(where, model, large, monkeypatch):
    monkeypatch.setattr(engine, "LAUNCH_BYTES", 1 if large else 2**24)
    default, sides = torch.cuda.default_stream(), [torch.cuda.Stream(), torch.cuda.Stream()]
    forward, backward = {
        "default to side": ([default], sides[:1]),
        "side to default": (sides[:1], [default]),
        "default to sides in turn": ([default], sides),
    }[where]
    expected = windows([default], [default], False, wraps=False)
    found = windows(forward, backward, model, wraps=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
