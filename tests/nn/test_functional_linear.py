"""`fusedacc.nn.functional.linear`: the weight's gradient goes into the sum, with or without `model=`."""

import contextlib

import pytest
import torch
from loops import Operators
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusedacc
from fusedacc.kernels import native_module
from fusedacc.nn.functional import linear

pytestmark = pytest.mark.skipif(not native_module.loaded(), reason="only the native engine adds products")


def weights(dtype=torch.float32) -> nn.ParameterList:
    torch.manual_seed(0)
    values = [torch.randn(12, 6) / 3, torch.randn(12), torch.randn(6, 12) / 4]
    return nn.ParameterList([nn.Parameter(value.to(dtype)) for value in values])


def loss_of(params, x, function):
    up, bias, down = params
    for _ in range(2):
        x = x + function(torch.tanh(function(x, up, bias)), down)
    return x.double().square().mean()


def wrap(params, steps=None, **options):
    return fusedacc.AccumulatingOptimizer(torch.optim.SGD(params, lr=0.1), steps, **options)


@pytest.mark.parametrize("how", ["", "reentrant", "not reentrant"])
@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_are_the_mean_of_pytorchs(dtype, with_model, how):
    params = weights(dtype)
    twin = [param.detach().double().requires_grad_() for param in params]
    layers = nn.ModuleList([nn.Linear(2, 2), params])
    options = {"model": layers} if with_model else {}
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(layers.parameters(), lr=0.1), 3, **options)
    for seed in range(3):
        x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()
        if how:
            loss = checkpoint(loss_of, params, x, linear, use_reentrant=how == "reentrant")
        else:
            loss = loss_of(params, x, linear)
        loss.backward()
        other = x.detach().double().requires_grad_()
        (loss_of(twin, other, F.linear) / 3).backward()
        assert (x.grad.double() / 3 - other.grad).abs().max() < 0.05 * other.grad.abs().max()
        if seed < 2:
            assert all(param.grad is None for param in params)
            optimizer.step()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float64: 1e-12}[dtype]
    for ours, theirs in zip(params, twin, strict=True):
        error = (ours.grad.double() - theirs.grad).abs().max() / theirs.grad.abs().max()
        assert error < tolerance
    assert optimizer.explain().count(" gemm ") == (3 if with_model else 2)


@pytest.mark.parametrize("autocast", [False, True])
def test_output_and_input_gradient_have_pytorchs_bits(autocast):
    params = weights()
    _optimizer = wrap(params)
    results = []
    for function in (linear, F.linear):
        x = torch.linspace(-1, 1, 30).view(5, 6).clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            output = function(x, params[0], params[1])
        output.backward(torch.ones_like(output))
        results.append((output, x.grad))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_no_weight_gradient_is_computed():
    params = weights()
    _optimizer = wrap(params)
    x = torch.randn(5, 6)
    linear(x, params[0]).sum().backward()  # the first selects a product
    output = linear(x, params[0])
    with Operators() as operators:
        output.sum().backward()
    assert not any("aten.mm" in name for name in operators.names)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Parameter(torch.randn(12, 6)),
        lambda: nn.Parameter(torch.randn(12, 6), requires_grad=False),
        lambda: torch.randn(12, 6),
    ],
    ids=["not in a wrapper", "frozen", "a tensor"],
)
def test_other_weights_are_left_to_pytorch(make):
    weight = make()
    x = torch.randn(5, 6, requires_grad=True)
    assert torch.equal(linear(x, weight), F.linear(x, weight))
    linear(x, weight).sum().backward()
    if weight.requires_grad:
        torch.testing.assert_close(weight.grad, torch.ones(12, 5) @ x.detach())


def test_stochastic_rounding_takes_whole_gradients():
    params = weights(torch.bfloat16)
    optimizer = wrap(params, 2, accumulate_dtype=torch.bfloat16, rounding="stochastic", seed=1)
    linear(torch.randn(5, 6).bfloat16(), params[0]).sum().backward()
    optimizer.step()
    assert "takes whole gradients" in optimizer.explain()
    assert " gemm " not in optimizer.explain()


def test_hooks_autograd_grad_and_second_derivatives():
    params = weights()
    _optimizer = wrap(params)
    twin = [param.detach().double().requires_grad_() for param in params]
    for used, function in ((params, linear), (twin, F.linear)):
        x = torch.linspace(-1, 1, 30).view(5, 6).to(used[0].dtype).requires_grad_()
        handle = used[0].register_hook(lambda gradient: gradient * 2)
        loss_of(used, x, function).backward()
        handle.remove()
        used[0].grad += torch.autograd.grad(loss_of(used, x, function), [used[0]])[0]
        (slope,) = torch.autograd.grad(loss_of(used, x, function), [x], create_graph=True)
        slope.square().sum().backward()
    for ours, theirs in zip(params, twin, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-6)


def test_wrong_arguments_raise_pytorchs_errors():
    params = weights()
    _optimizer = wrap(params)
    for arguments in (
        (torch.ones(5, 7), params[0]),
        (torch.ones(5, 6).half(), params[0]),
        (torch.ones(5, 6), params[0], torch.ones(5)),
    ):
        with pytest.raises(RuntimeError) as theirs:
            F.linear(*arguments)
        with pytest.raises(RuntimeError) as ours:
            linear(*arguments)
        assert str(ours.value) == str(theirs.value)
