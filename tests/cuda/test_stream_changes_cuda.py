"""Training on another stream than the one on which the wrapper was created."""

import pytest
import torch
from torch import nn

import fusedacc
from fusedacc.accumulators.add import Adder

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_later_windows_are_added_on_the_stream_that_trains(dtype, monkeypatch):
    """PyTorch does the same with its gradients. The sums must not stay on the former stream."""
    seen: list[torch.cuda.Stream] = []
    add = Adder.add

    def noted(self: Adder, *arguments, **options):
        seen.append(torch.cuda.current_stream())
        return add(self, *arguments, **options)

    monkeypatch.setattr(Adder, "add", noted)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda().to(dtype)
    inner = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    optimizer = fusedacc.AccumulatingOptimizer(inner, 2, max_grad_norm=1.0, backend="eager")
    batches = [torch.randn(8, 64, device="cuda", dtype=dtype) for _ in range(12)]
    sides = [torch.cuda.Stream(), torch.cuda.Stream()]
    for number, batch in enumerate(batches):
        side = sides[number // 6]  # it changes again after three windows
        side.wait_stream(sides[1 - number // 6])
        side.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(side):
            net(batch).float().square().mean().backward()
            optimizer.step(), optimizer.zero_grad()
        if number % 6 < 2:
            seen.clear()  # the window in which the stream changes belongs to the former one
        assert all(stream == side for stream in seen)
    torch.cuda.synchronize()
    assert seen
    assert all(bool(parameter.isfinite().all()) for parameter in net.parameters())


def test_a_graph_that_lives_while_the_stream_changes():
    """It keeps the parameters' nodes, so the hooks must come back on the same nodes."""
    net = nn.Linear(8, 8).cuda()
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), 2)
    x = torch.randn(4, 8, device="cuda")
    kept = net(x).sum()
    sides = [torch.cuda.Stream(), torch.cuda.Stream()]
    for side in sides:
        side.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(side):
            for micro_batch in range(4):
                net(x).square().mean().backward()
                if micro_batch % 2 == 0:
                    assert all(parameter.grad is None for parameter in net.parameters())
                optimizer.step()
                optimizer.zero_grad()
        torch.cuda.default_stream().wait_stream(side)
    torch.cuda.synchronize()
    del kept
