"""While a kernel in `Sink.write` runs, other threads wait before they read or write sums."""

import threading
import time

import pytest
import torch
from sink_functions import Model, Product, loss_of, twin_of
from torch import nn

import fusedacc
from fusedacc.kernels import native_module

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
        thread = threading.Thread(target=Slow.apply(x, weight).backward)
        thread.start()
        assert Slow.entered.wait(60)
        return thread


def test_other_threads_wait_until_a_kernel_has_been_launched():
    model = Model()
    slow = nn.Parameter(torch.randn(3))
    inner = torch.optim.SGD([*model.parameters(), slow], lr=0.0)
    optimizer = fusedacc.AccumulatingOptimizer(inner, 100, reduction="sum")
    for seed in range(2):
        (loss_of(model, seed) + slow.sum()).backward()
        optimizer.step()
    x = torch.randn(3)
    thread = Slow.begin(x, slow)
    optimizer.step()
    loss_of(model, 2).backward()
    thread.join()
    optimizer.flush()
    twin = twin_of(model)
    for seed in range(3):
        loss_of(twin, seed).backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad.double(), q.grad, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(slow.grad, 2 + x)


WAYS = {
    "gradient": lambda x, weight: nn.functional.linear(x, weight),
    "product": lambda x, weight: fusedacc.nn.functional.linear(x, weight),
    "add_product": Product.apply,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("steps", [None, 100])
def test_no_gradient_is_lost_while_a_kernel_of_another_thread_adds(way, steps):
    weight = nn.Parameter(torch.randn(4, 3))
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=0.0), steps, reduction="sum")
    x = torch.randn(5, 3)
    for _ in range(2):
        WAYS[way](x, weight).sum().backward()
        if steps:
            optimizer.step()
    for _ in range(2):
        thread = Slow.begin(torch.full((4, 3), 10.0), weight)
        WAYS[way](x, weight).sum().backward()
        thread.join()
        if steps:
            optimizer.step()
    optimizer.flush() if steps else optimizer.step()
    torch.testing.assert_close(weight.grad, (4 * x.sum(0) + 20).expand(4, 3))
