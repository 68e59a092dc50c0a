"""Sinks of a wrapper with `main_grad=True`: functions and modules add to the same sums."""

import pytest
import torch
from main_grad_modules import PROTOCOLS, _Product
from sink_functions import Model, Product, Written, loss_of, twin_of
from torch import Tensor, nn

import fusedacc
from fusedacc.kernels import native_module

pytestmark = pytest.mark.skipif(not native_module.loaded(), reason="sinks need the native engine")
STEPS = pytest.mark.parametrize("steps", [None, 2], ids=["manual", "counted"])


def wrap(params, steps, **options) -> fusedacc.AccumulatingOptimizer:
    inner = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    return fusedacc.AccumulatingOptimizer(inner, steps, reduction="sum", main_grad=True, **options)


@STEPS
def test_training_equals_plain_torch(steps):
    model = Model()
    twin = twin_of(model)
    optimizer = wrap(model.parameters(), steps)
    inner = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    addresses = [param.main_grad.data_ptr() for param in model.parameters()]
    for window in range(3):
        for index in range(2):
            loss_of(model, 2 * window + index).backward()
            loss_of(twin, 2 * window + index).backward()
            with optimizer.ignore():
                loss_of(model, 100).backward()
            if index == 1 or steps is not None:
                optimizer.step()
                optimizer.zero_grad()
        inner.step()
        inner.zero_grad()
        for param, expected in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(param.double(), expected, rtol=1e-5, atol=1e-6)
    assert addresses == [param.main_grad.data_ptr() for param in model.parameters()]


class Wide(torch.autograd.Function):
    """x @ weight.T. No product adds the operands of its backward, which are float64."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        x, weight = ctx.saved_tensors
        fusedacc.sink(weight).add_product(grad.double(), x.double())
        return grad @ weight, None


@STEPS
@pytest.mark.parametrize("function", [Product, Written, Wide])
@pytest.mark.parametrize("module_first", [False, True])
def test_a_module_with_a_flag_adds_to_the_weight_too(steps, function, module_first):
    weight, x = nn.Parameter(torch.randn(4, 3)), torch.randn(5, 3)
    weight.grad_added_to_main_grad = False
    optimizer = wrap([weight], steps)
    for index in range(2):
        outputs = []
        for adds in (not module_first, module_first):  # the last is the first in the backward
            add = _Product.apply(x, weight, PROTOCOLS["megatron"]) if adds else function.apply(x, weight)
            outputs.append(add.sum())
        sum(outputs).backward()
        if steps is not None and index == 0:
            optimizer.step()
    expected = 4 * torch.ones(5, 4, dtype=torch.float64).t() @ x.double()
    torch.testing.assert_close(weight.grad.double(), expected, rtol=1e-5, atol=1e-6)


class FromSum(torch.autograd.Function):
    """0 * weight. Its backward adds terms that are computed from `main_grad`."""

    @staticmethod
    def forward(ctx, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return weight * 0

    @staticmethod
    def backward(ctx, grad: Tensor) -> None:
        (weight,) = ctx.saved_tensors
        sink = fusedacc.sink(weight)
        sink.add(weight.main_grad)
        sink.add_product(weight.main_grad, weight.main_grad)
        sink.add_rows(torch.arange(8).flip(0), weight.main_grad)


@STEPS
def test_operands_may_be_main_grad(steps):
    weight, x = nn.Parameter(torch.randn(8, 8)), torch.randn(5, 8)
    optimizer = wrap([weight], steps)
    Product.apply(x, weight).sum().backward()
    if steps is not None:
        optimizer.step()
    expected = 2 * weight.main_grad.double()
    expected += expected.t() @ expected
    expected += expected.flip(0)
    FromSum.apply(weight).sum().backward()
    torch.testing.assert_close(weight.grad.double(), expected, rtol=1e-5, atol=1e-4)
