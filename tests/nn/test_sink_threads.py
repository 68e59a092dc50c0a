"""While a kernel in `Sink.write` runs, other threads wait before they read or write sums."""

import copy
import threading
import time
from typing import ClassVar

import pytest
import torch
from sink_functions import Model, Product, loss_of, twin_of
from torch import nn

import fusedacc
from fusedacc.kernels import native_module
from fusedacc.nn.functional import linear, linear_cross_entropy

pytestmark = pytest.mark.skipif(not native_module.loaded(), reason="sinks need the native engine")


class Slow(torch.autograd.Function):
    """The sum of weight * x. Its kernel reads the accumulator, and writes it only after a while."""

    entered = threading.Event()

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return (x * weight).sum()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        with fusedacc.sink(weight).write() as (accumulator, scale, beta):
            total = accumulator * beta + scale * grad * x
            Slow.entered.set()
            time.sleep(0.2)  # gives the GIL to other threads
            accumulator.copy_(total)
        return grad * weight, None

    @staticmethod
    def begin(x, weight):
        """Start a thread that runs a backward. Return it when it has entered the kernel."""
        Slow.entered.clear()
        with torch.enable_grad():
            loss = Slow.apply(x, weight)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        assert Slow.entered.wait(60)
        return thread


class BeginSlow(torch.autograd.Function):
    """The identity, whose backward begins that of `Slow` in another thread and waits for its kernel."""

    threads: ClassVar[list[threading.Thread]] = []

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        BeginSlow.threads.append(Slow.begin(torch.full_like(ctx.weight, 10.0), ctx.weight))
        return grad, None


def test_other_threads_wait_until_a_kernel_has_been_launched():
    model = Model()
    slow, head = nn.Parameter(torch.randn(3)), nn.Linear(4, 5, bias=False)
    inner = torch.optim.SGD([*model.parameters(), slow, head.weight], lr=0.0)
    optimizer = fusedacc.AccumulatingOptimizer(inner, 100, reduction="sum", model=head)

    def head_loss(weight):
        return linear_cross_entropy(torch.ones(2, 4, dtype=weight.dtype), weight, torch.tensor([1, 3]))

    for seed in range(2):
        (loss_of(model, seed) + slow.sum()).backward()
        optimizer.step()
    x = torch.randn(3)
    for each in (optimizer.step, head_loss(head.weight).backward, loss_of(model, 2).backward):
        thread = Slow.begin(x, slow)
        each()
        thread.join()
    optimizer.flush()
    twin, twin_head = twin_of(model), copy.deepcopy(head).double()
    for seed in range(3):
        loss_of(twin, seed).backward()
    nn.functional.cross_entropy(
        torch.ones(2, 4, dtype=torch.float64) @ twin_head.weight.t(), torch.tensor([1, 3])
    ).backward()
    for ours, wanted in ((model, twin), (head, twin_head)):
        for p, q in zip(ours.parameters(), wanted.parameters(), strict=True):
            torch.testing.assert_close(p.grad.double(), q.grad, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(slow.grad, 2 + 3 * x)


WAYS = {"gradient": nn.functional.linear, "product": linear, "add_product": Product.apply}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("steps", [None, 100])
def test_no_gradient_is_lost_while_a_kernel_of_another_thread_adds(way, steps):
    """The engine has begun the backward pass before that of the other thread."""
    weight, factor = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.ones(()))
    inner = torch.optim.SGD([weight, factor], lr=0.0)
    optimizer = fusedacc.AccumulatingOptimizer(inner, steps, reduction="sum")
    x = torch.randn(5, 3)
    for number in range(5):
        y = WAYS[way](x, weight)
        if number >= 2:
            y = BeginSlow.apply(y, weight)
        (y * factor).sum().backward()
        while BeginSlow.threads:
            BeginSlow.threads.pop().join()
        if steps:
            optimizer.step()
    optimizer.flush() if steps else optimizer.step()
    torch.testing.assert_close(weight.grad, (5 * x.sum(0) + 30).expand(4, 3))


@pytest.mark.parametrize("way", WAYS)
def test_no_addition_is_lost_if_two_threads_add_at_once(way):
    weight, x = nn.Parameter(torch.ones(512, 512)), torch.ones(32, 512)
    _optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=0.0))
    WAYS[way](x, weight).sum().backward()
    together = threading.Barrier(2)

    def add() -> None:
        for _ in range(100):
            loss = WAYS[way](x, weight).sum()
            together.wait(60)
            loss.backward()

    threads = [threading.Thread(target=add) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(weight.grad, torch.full_like(weight, 32 * 201))
