"""Sinks on a GPU: every method, the Triton kernel of docs/sinks.md, side streams, graphs, and no waits."""

import contextlib

import pages
import pytest
import torch
from gpu import needs, nothing_waits, side_stream
from sink_functions import Model, count_sinks, loss_of, twin_of
from torch import nn

import fusedacc
from fusedacc.nn.functional import linear

pytestmark = pytest.mark.cuda


def wrap(params, steps=None, **options):
    return fusedacc.AccumulatingOptimizer(torch.optim.SGD(params, lr=0.1, fused=True), steps, **options)


def assert_close(params, twins, tolerance: float, scale: float = 1.0) -> None:
    for ours, theirs in zip(params, twins, strict=True):
        wanted = theirs.grad.to(ours.device) * scale
        error = (ours.grad.double() - wanted).abs().max() / wanted.abs().max()
        assert error < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [3, None])
def test_gradients_are_those_of_pytorch_in_float64(monkeypatch, dtype, steps, backend):
    found = count_sinks(monkeypatch)
    model = Model(grouped=False).cuda().to(dtype)
    optimizer = wrap(model.parameters(), steps, reduction="sum", backend=backend)
    twin = twin_of(model)
    for seed in range(3):
        loss_of(model, seed).backward()
        loss_of(twin, seed).backward()
        if steps:
            optimizer.step() if seed < 2 else None
    assert_close(model.parameters(), twin.parameters(), 1e-4 if dtype is torch.float32 else 0.05)
    assert found
    assert all(found)


def test_streams(monkeypatch):
    """The forward runs on another stream than the training, and so does this part of the backward."""
    found = count_sinks(monkeypatch)
    model = Model(grouped=False).cuda()
    optimizer = wrap(model.parameters(), 4, reduction="sum")
    twin = twin_of(model)
    for seed in range(4):
        loss = loss_of(model, seed)
        with side_stream():
            other = loss_of(model, seed + 10)
        (loss + other).backward()
        (loss_of(twin, seed) + loss_of(twin, seed + 10)).backward()
        optimizer.step() if seed < 3 else None
    assert_close(model.parameters(), twin.parameters(), 1e-4)
    assert found
    assert all(found)


@pytest.fixture
def page(tmp_path):
    needs("triton")
    return pages.load("../sinks", tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("on_device", [False, True])
def test_the_kernel_of_the_page(page, dtype, on_device):
    gain = nn.Parameter((torch.rand(300) + 0.5).cuda().to(dtype))
    optimizer = wrap([gain], 3, reduction="normalized" if on_device else "sum")
    weights = torch.ones(3, device="cuda").unbind()
    for window in range(2):
        twin = gain.detach().cpu().double().requires_grad_()
        batches = [torch.randn(5, 300).to(dtype) for _ in range(3)]
        on_gpu = [batch.cuda() for batch in batches]
        before = gain.detach().clone()
        with nothing_waits() if window else contextlib.nullcontext():
            for index, batch in enumerate(on_gpu):
                given = {"weight": weights[index]} if on_device else {}
                with optimizer.accumulate(**given):
                    with side_stream() if index == 1 else contextlib.nullcontext():
                        page.Scale.apply(batch, gain).square().sum().backward()
                    optimizer.step()
                    optimizer.zero_grad() if index < 2 else None
        for batch in batches:
            ((batch.double() * twin).square().sum() / (3 if on_device else 1)).backward()
        assert_close([gain], [twin], 1e-5 if dtype is torch.float32 else 0.03)
        gain.data.copy_(before)
        optimizer.zero_grad()


def test_a_captured_window_equals_the_eager_one(page):
    gains = [nn.Parameter(torch.linspace(0.5, 1.5, 300).cuda()) for _ in range(2)]
    optimizers = [wrap([gain], 2) for gain in gains]
    static = [torch.randn(5, 300).cuda() for _ in range(2)]

    def window(gain, optimizer, batches):
        optimizer.zero_grad()
        for batch in batches:
            page.Scale.apply(batch, gain).square().mean().backward()
            optimizer.step()

    with side_stream() as stream:
        window(gains[0], optimizers[0], static)
    gains[0].data.copy_(gains[1].detach())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        window(gains[0], optimizers[0], static)
    for _ in range(3):
        batches = [torch.randn(5, 300).cuda() for _ in range(2)]
        for memory, batch in zip(static, batches, strict=True):
            memory.copy_(batch)
        graph.replay()
        window(gains[1], optimizers[1], batches)
        assert torch.equal(*gains)


def test_functional_linear():
    weight = nn.Parameter(torch.randn(64, 32).cuda())
    twin = weight.detach().cpu().double().requires_grad_()
    optimizer = wrap([weight], 3, reduction="sum")
    for seed in range(3):
        x = torch.randn(9, 32, generator=torch.Generator().manual_seed(seed))
        linear(x.cuda(), weight).square().sum().backward()
        nn.functional.linear(x.double(), twin).square().sum().backward()
        optimizer.step() if seed < 2 else None
    assert_close([weight], [twin], 1e-3)
    assert " gemm " in optimizer.explain()
