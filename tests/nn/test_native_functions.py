"""`model=` by the native functions, by Python's, and stock: where the three may come apart."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from test_autograd import assert_same_gradients, wrap
from torch import nn

from fusedacc.autograd import python_hooks


@pytest.fixture(autouse=True, params=["0", "1"], ids=["python", "native"])
def choice(request, monkeypatch):
    monkeypatch.setenv("FUSEDACC_NATIVE_HOOKS", request.param)


def nets(*layers: nn.Module):
    """A wrapped model, its wrapper, and a stock twin."""
    torch.manual_seed(0)
    model = nn.Sequential(*layers)
    twin = copy.deepcopy(model)
    return model, wrap(model), twin


@pytest.mark.parametrize("bucket", [1, 200, 400, 700, 10**6])
def test_a_bucket_that_fills_up_after_a_first_product(bucket, monkeypatch):
    """The product is in memory that held nothing, and another gradient of the weight in the bucket."""
    monkeypatch.setattr(python_hooks, "BUCKET_BYTES", bucket)
    model, optimizer, twin = nets(*(nn.Linear(9, 9) for _ in range(6)))
    for window in range(4):
        for net in (model, twin):
            generator = torch.Generator().manual_seed(window)
            loss = net(torch.randn(4, 9, generator=generator)).square().sum()
            for k, layer in enumerate(net):
                loss = loss + (k + 1) * layer.weight.sum() + 3 * layer.bias.sum()
            loss.backward()
        assert_same_gradients(model, twin)
        optimizer.zero_grad()
        twin.zero_grad()


@pytest.mark.parametrize("shape", [(1,), (1, 4), (3, 4)])
def test_a_bias_of_another_shape(shape):
    layer = nn.Linear(5, 4)
    layer.bias = nn.Parameter(torch.randn(shape))
    model, _optimizer, twin = nets(layer)
    for net in (model, twin):
        net(torch.ones(3, 5)).square().sum().backward()
    assert_same_gradients(model, twin)


def test_options_changed_between_forward_and_backward_do_not_count():
    model, _optimizer, twin = nets(nn.Embedding(9, 6, padding_idx=1), nn.Embedding(9, 6))
    for net in (model, twin):
        for padding, by_frequency in ((2, True), (None, False), (1, True)):
            loss = sum(table(torch.tensor([1, 2, 2, 3])).square().sum() for table in net)
            net[0].padding_idx, net[1].scale_grad_by_freq = padding, by_frequency
            loss.backward()
    assert_same_gradients(model, twin)


def test_weights_on_the_meta_device():
    model, _optimizer, twin = nets(nn.Linear(3, 4, device="meta"), nn.Embedding(3, 4, device="meta"))
    index = torch.zeros(2, dtype=torch.int64, device="meta")
    for net in (model, twin):
        assert net[0](torch.ones(2, 3, device="meta")).shape == (2, 4)
        assert net[1](index).shape == (2, 4)


@pytest.mark.filterwarnings("ignore")
def test_compiled_autograd():
    model, _optimizer, twin = nets(nn.Embedding(9, 6, padding_idx=2), nn.Linear(6, 6), nn.Linear(6, 6))
    model[2].weight.requires_grad_(False)
    twin[2].weight.requires_grad_(False)
    for net in (model, twin):
        for compiled in (False, True, False):
            loss = net(torch.tensor([[1, 2, 2], [3, 4, 4]])).square().sum()
            if compiled and net is model:
                with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", dynamic=False)):
                    loss.backward()
            else:
                loss.backward()
    assert_same_gradients(model, twin)


def test_other_threads_run_during_a_forward():
    """The product, like torch's own, is made without the GIL. On a busy machine a thread may have to wait."""
    model, _optimizer, _twin = nets(nn.Linear(1000, 1000))
    x = torch.randn(1000, 1000)
    turns, over = 0, threading.Event()

    def spin() -> None:
        nonlocal turns
        while not over.wait(1e-4):
            turns += 1

    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    during = 0
    for _ in range(100):
        before = turns
        model(x)
        during = max(during, turns - before)
        if during > 5:
            break
    over.set()
    thread.join()
    assert during > 5
