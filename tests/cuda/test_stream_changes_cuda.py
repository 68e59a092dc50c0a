"""The stream that trains is not the one on which the wrapper was made."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fusedacc

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("model", [True, False], ids=["model", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_of_the_former_stream_is_not_used_again_too_early(dtype, model):
    """Sums of later windows belong to the stream that trains, as PyTorch's own gradients do.

    Else `zero_grad()` gives their memory back to the default stream, where a prefetch may write into it while
    the optimizer on the side stream still reads.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda().to(dtype)
    inner = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    optimizer = fusedacc.AccumulatingOptimizer(inner, 2, model=net if model else None, max_grad_norm=1.0)
    expected = [parameter.detach().clone() for parameter in net.parameters()]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    batches = [torch.randn(8, 64, device="cuda", dtype=dtype) for _ in range(8)]
    side.wait_stream(torch.cuda.current_stream())
    for number, batch in enumerate(batches):
        with torch.cuda.stream(side):
            net(batch).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if number == 1:
            torch.cuda.synchronize()  # the first window's nodes are those of the default stream
        # A prefetch that nothing orders after the side stream.
        torch.full((64, 64), 7.0, device="cuda", dtype=dtype)
    torch.cuda.synchronize()
    for parameter, before in zip(net.parameters(), expected, strict=True):
        assert bool(parameter.isfinite().all())
        assert not torch.equal(parameter, before)
