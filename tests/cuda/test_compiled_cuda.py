"""Compiled models on a GPU, in the modes of torch.compile that replay CUDA graphs."""

import copy

import pytest
import torch
from torch import nn

import fusedacc

pytestmark = pytest.mark.cuda
STEPS = 2


@pytest.mark.parametrize("mode", ["reduce-overhead", "default"])
def test_modes_with_cuda_graphs_train_as_plain_pytorch(mode):
    """The operators that add gradients are left out of the graphs, and each replay adds a new gradient."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256)).cuda()
    twin = copy.deepcopy(model)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = fusedacc.AccumulatingOptimizer(inner, STEPS, model=model)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    call = torch.compile(model, mode=mode)
    for step in range(4 * STEPS):
        x = torch.randn(16, 256, generator=torch.Generator().manual_seed(step)).cuda()
        torch.compiler.cudagraph_mark_step_begin()
        call(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        (twin(x).square().mean() / STEPS).backward()
        if step % STEPS == STEPS - 1:
            plain.step()
            plain.zero_grad()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert all(slot.compiled for slot in optimizer._slots if slot.param.dim() == 2)
