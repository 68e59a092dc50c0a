"""On a GPU, what modules add to `main_grad` by themselves is in order with fusedacc's own launches."""

import pytest
import torch
from main_grad_modules import AddingLinear
from torch import nn

import fusedacc
from fusedacc.accumulators import engine

pytestmark = pytest.mark.cuda

STEPS = 3
CYCLES = 20_000_000  # some milliseconds


class Late(torch.autograd.Function):
    """The gradient comes after the stream has slept."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        torch.cuda._sleep(CYCLES)
        return gradient * 1.0


class Net(nn.Module):
    """A module adds the gradient of the tied weight's last use, and autograd those of the others."""

    def __init__(self, protocol: str | None, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)
        self.last = nn.Linear(64, 64) if protocol is None else AddingLinear(64, 64, protocol=protocol)
        self.last.weight = self.first.weight
        self.to(dtype)

    def forward(self, x):
        return self.last(Late.apply(torch.tanh(self.norm(self.first(x)))))


def batch(index: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(index)).to(dtype)


def train(protocol: str | None, steps: int | None, dtype: torch.dtype, backward, flagged: bool = False):
    """Return the parameters after three updates, and the last final gradients.

    Args:
        protocol: of the module that adds; None for plain PyTorch, without a wrapper.
        steps: of the wrapper.
        dtype: of the parameters.
        backward: the stream of backward passes.
        flagged: whether the tied weight has Megatron-Core's flags.
    """
    net = Net(protocol, dtype).cuda()
    if flagged:
        net.last.weight.grad_added_to_main_grad = False
        net.last.weight.zero_out_wgrad = True
    inner = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    optimizer = inner
    if protocol is not None:
        optimizer = fusedacc.AccumulatingOptimizer(inner, steps, main_grad=True)
    final = None
    for index in range(3 * STEPS):
        loss = net(batch(index, dtype).cuda()).float().square().mean()
        backward.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(backward):
            (loss if steps else loss / STEPS).backward()
        torch.cuda.current_stream().wait_stream(backward)
        is_last = index % STEPS == STEPS - 1
        if is_last:
            final = [p.grad.float().clone() for p in net.parameters()]
        if steps or is_last:
            optimizer.step()
        if is_last:
            optimizer.zero_grad()
    torch.cuda.synchronize()
    return [p.detach().float() for p in net.parameters()], final


@pytest.mark.parametrize("large", [True, False], ids=["at once", "in buckets"])
@pytest.mark.parametrize("steps", [None, STEPS], ids=["manual", "counted"])
@pytest.mark.parametrize("flagged", [False, True], ids=["no gradient", "dummy gradient"])
@pytest.mark.parametrize("where", ["default", "side"])
def test_training_equals_plain_pytorch(steps, flagged, where, large, monkeypatch):
    monkeypatch.setattr(engine, "LAUNCH_BYTES", 1 if large else 2**24)
    stream = torch.cuda.default_stream() if where == "default" else torch.cuda.Stream()
    wanted = train(None, None, torch.float32, torch.cuda.default_stream())
    found = train("megatron", steps, torch.float32, stream, flagged)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_16_bit_parameters_have_float32_sums():
    wanted = train(None, None, torch.bfloat16, torch.cuda.default_stream())
    found = train("transformer_engine", STEPS, torch.bfloat16, torch.cuda.default_stream())
    torch.testing.assert_close(found, wanted, rtol=5e-2, atol=5e-2)


def test_a_module_on_another_stream_is_waited_for_if_it_returns_a_gradient():
    """Autograd orders streams for gradients that it passes on, and dummy gradients are such."""
    weight = nn.Parameter(torch.zeros(64, 64, device="cuda"))
    weight.grad_added_to_main_grad = False
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), 2, main_grad=True)
    layer = AddingLinear(64, 64, bias=False, protocol="megatron").cuda()
    layer.weight = weight
    side = torch.cuda.Stream()
    total = torch.zeros(64, 64, device="cuda")
    for index in range(2):
        x = batch(index, torch.float32).cuda()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            output = Late.apply(layer(x))
        torch.cuda.current_stream().wait_stream(side)
        output.sum().backward()
        optimizer.step()
        total += x.sum(0, keepdim=True).expand(64, 64) / 2
    torch.testing.assert_close(weight.detach(), -total, rtol=1e-4, atol=1e-5)


def test_a_captured_window_is_replayed():
    layer = AddingLinear(64, 64, bias=False, protocol="apex").cuda()
    nn.init.zeros_(layer.weight)
    inner = torch.optim.SGD(layer.parameters(), lr=1.0)
    optimizer = fusedacc.AccumulatingOptimizer(inner, 2, main_grad=True)
    inputs = [batch(index, torch.float32).cuda() for index in range(2)]

    def window():
        for x in inputs:
            layer(x).sum().backward()
            optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        optimizer.zero_grad()
        window()
        optimizer.zero_grad()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.zero_grad()
        window()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    each = sum(x.sum(0) for x in inputs).expand(64, 64) / 2
    torch.testing.assert_close(layer.weight.detach(), -3 * each, rtol=1e-4, atol=1e-5)
