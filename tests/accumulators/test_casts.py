"""The casts for an update reuse the memory of the accumulators, unless the user still holds it."""

import pytest
import torch
from loops import LOW
from memory import peak_of
from torch import nn

import fusedacc
from fusedacc.accumulators import accumulators

SHAPES = {
    "one": [(1500, 1000)],
    "small": [(7, 3), (33,), (1,), (5, 3), (0, 2), ()],
    "equal": [(300, 301)] * 12 + [(301,)] * 12,
    "all sizes": [(n, n) for n in range(1, 700, 50)] + [(1,), (0, 3), ()],
    "one outweighs all": [(400, 10), (2000, 500), (10,), (64, 64)],
}


class Net(nn.Module):
    """A parameter of each shape. The first matrix is stored column by column."""

    def __init__(self, shapes, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        start = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        start[0] = start[0].t().contiguous().t()
        self.weights = nn.ParameterList(start)

    def run(self, seed: int) -> None:
        """Run a backward that gives each parameter a gradient with many digits."""
        generator = torch.Generator().manual_seed(seed)
        for p in self.weights:
            gradient = torch.randn(p.shape, generator=generator).to(p.dtype)
            p.backward(torch.empty_like(p).copy_(gradient))


def wrap(net: nn.Module, steps, **options) -> fusedacc.AccumulatingOptimizer:
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    return fusedacc.AccumulatingOptimizer(inner, steps, max_grad_norm=1.0, **options)


@pytest.mark.sweep
@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("dtype", [LOW, torch.float16])
def test_casts_have_the_same_bits_when_they_reuse_memory(cpu_backend, dtype, shapes, steps, monkeypatch):
    if cpu_backend == "triton" and shapes != "small":
        pytest.skip("the other backends cover these lists, which take Triton's interpreter minutes")
    monkeypatch.setattr(accumulators, "FRESH", 1 << 16)
    beside, over = (Net(SHAPES[shapes], dtype) for _ in range(2))
    optimizers = [wrap(net, steps, backend=cpu_backend) for net in (beside, over)]
    kept = []
    for window in range(3):
        for net, optimizer in zip((beside, over), optimizers, strict=True):
            for micro_batch in range(2):
                net.run(2 * window + micro_batch)
                if steps and micro_batch == 0:
                    optimizer.step()
            if net is beside:
                held = [p.grad for p in net.parameters()]
                values = [gradient.clone() for gradient in held]
            optimizer.step()
        assert all(map(torch.equal, held, values))
        for expected, found in zip(beside.parameters(), over.parameters(), strict=True):
            assert torch.equal(found, expected)
            assert found.grad.dtype == expected.grad.dtype == dtype
            assert found.grad.stride() == expected.grad.stride()
            assert torch.equal(found.grad, expected.grad)
        if window == 0:
            kept = [(p.grad, p.grad.clone()) for p in over.parameters()]
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert all(torch.equal(gradient, value) for gradient, value in kept)


def layers(widths) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(*pair) for pair in widths)).to(LOW)


@pytest.mark.sweep
@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("widths", [[(384, 384)] * 16, [(384, 3840), (3840, 384), (384, 10)]], ids=len)
def test_accumulators_and_all_their_casts_are_not_alive_together(widths, inside, steps):
    net = layers(widths)
    optimizer = wrap(net, steps, model=net if inside else None)
    total = sum(p.numel() for p in net.parameters())
    most = max(accumulators.FRESH, *(p.nbytes for p in net.parameters())) + 2**17
    assert most < 1.5 * total
    for window in range(2):
        for micro_batch in range(2):
            net(torch.randn(2, 384, dtype=LOW)).float().square().mean().backward()
            if steps and micro_batch == 0:
                optimizer.step()
        assert peak_of(optimizer.step) < most, window
        assert 0 <= optimizer.accumulator_bytes - 4 * total < most
        assert all(p.grad.dtype == LOW and p.grad.abs().sum() > 0 for p in net.parameters())
        optimizer.zero_grad()


LOOKS = {
    "itself": lambda gradient: gradient,
    "detach": lambda gradient: gradient.detach(),
    "row": lambda gradient: gradient[0],
    "data": lambda gradient: gradient.data,
    "graph": lambda gradient: (gradient * torch.ones((), requires_grad=True)).grad_fn,
}


@pytest.mark.sweep
@pytest.mark.parametrize("steps", [None, 1])
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("width", [64, 1024])
def test_a_cast_does_not_overwrite_a_gradient_that_the_user_holds(width, look, steps):
    net = layers([(width, width)] * 2)
    optimizer = wrap(net, steps)
    for _ in range(2):
        net(torch.randn(2, width, dtype=LOW)).float().square().sum().backward()
        seen = [LOOKS[look](p.grad) for p in net.parameters()]
        values = [p.grad.clone() for p in net.parameters()]
        optimizer.step()
        for view, value in zip(seen, values, strict=True):
            expected = LOOKS[look](value) if look != "graph" else value
            assert torch.equal(view._saved_self if look == "graph" else view, expected)
        optimizer.zero_grad()
