"""Replays of a captured window give the bits of the eager loop."""

import pytest
import torch
from gpu import side_stream
from torch import nn

import fusedacc

pytestmark = pytest.mark.cuda
STEPS, WINDOWS, WARM = 3, 4, 2


def build(dtype, backend, options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).to("cuda", dtype)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True, capturable=True)
    return model, fusedacc.AccumulatingOptimizer(inner, STEPS, backend=backend, **options)


def window(model, optimizer, inputs) -> None:
    for x in inputs:
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()


OPTIONS = {
    "plain": {},
    "clip": {"max_grad_norm": 0.01},
    "skip": {"max_grad_norm": 0.01, "skip_nonfinite": True},
    "masters": {"master_weights": True, "max_grad_norm": 0.01},
}


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS)
def test_replays_equal_the_eager_loop(options, dtype, backend):
    if options == "masters" and dtype == torch.float32:
        pytest.skip("float32 parameters have no master weights")
    data = torch.randn(WINDOWS + WARM, STEPS, 16, 64, device="cuda").to(dtype)
    eager, reference = build(dtype, backend, OPTIONS[options])
    for inputs in data:
        window(eager, reference, inputs)

    model, optimizer = build(dtype, backend, OPTIONS[options])
    static = data[0].clone()
    with side_stream():
        for inputs in data[:WARM]:
            static.copy_(inputs)
            window(model, optimizer, static)
    before = [p.detach().clone() for p in model.parameters()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        window(model, optimizer, static)
    assert all(map(torch.equal, before, model.parameters())), "the capture changed the weights"
    for inputs in data[WARM:]:
        static.copy_(inputs)
        graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, eager.parameters(), model.parameters()))
    if OPTIONS[options].get("max_grad_norm"):
        assert torch.equal(reference.grad_norm, optimizer.grad_norm)
