"""Unusual tensors that users put into p.grad in a manual loop. Backward passes add to them as in PyTorch."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fusedacc

SIZE = 40


def in_a_larger_tensor(gradient: Tensor) -> Tensor:
    """Return the same values with gaps in their memory."""
    return gradient.new_zeros(SIZE, 2 * SIZE + 1)[:, : 2 * SIZE : 2].copy_(gradient)


def lazily_negated(gradient: Tensor) -> Tensor:
    return torch._neg_view(-gradient)


def double(gradient: Tensor) -> Tensor:
    return gradient.double()


def half(gradient: Tensor) -> Tensor:
    return gradient.to(torch.bfloat16)


def transposed(gradient: Tensor) -> Tensor:
    return gradient.t().contiguous().t()


def pair(
    uses_model: bool, dtype: torch.dtype = torch.float32, grad_dtype: torch.dtype | None = None
) -> tuple[nn.Linear, nn.Linear, fusedacc.AccumulatingOptimizer]:
    """Return a layer with a wrapper, a copy of it for PyTorch, and the wrapper. grad_dtype: None for any."""
    torch.manual_seed(0)
    layer = nn.Linear(SIZE, SIZE, bias=False, dtype=dtype)
    twin = copy.deepcopy(layer)
    for each in (layer, twin):
        each.weight.grad_dtype = grad_dtype
    inner = torch.optim.SGD(layer.parameters(), lr=0.1)
    return layer, twin, fusedacc.AccumulatingOptimizer(inner, model=layer if uses_model else None)


def backward(layer: nn.Linear, seed: int) -> None:
    x = torch.randn(5, SIZE, generator=torch.Generator().manual_seed(seed))
    layer(x.to(layer.weight.dtype)).square().mean().backward()


def assert_same_sums(layer: nn.Linear, twin: nn.Linear, change: Callable[[Tensor], Tensor]) -> None:
    """Add three gradients before and three after a change of p.grad, and compare."""
    for each in (layer, twin):
        for seed in range(3):
            backward(each, seed)
        each.weight.grad = change(each.weight.grad)
        for seed in range(3, 6):
            backward(each, seed)
    ours, theirs = layer.weight.grad, twin.weight.grad
    assert ours.dtype == theirs.dtype
    eps = max(torch.finfo(dtype).eps for dtype in (ours.dtype, layer.weight.dtype))
    torch.testing.assert_close(ours, theirs, rtol=8 * eps, atol=8 * eps * theirs.abs().max().item())


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.parametrize("uses_model", [False, True])
@pytest.mark.parametrize("change", [in_a_larger_tensor, lazily_negated, double, half, transposed])
def test_backward_passes_add_to_a_tensor_of_the_user(change, uses_model):
    layer, twin, _optimizer = pair(uses_model)
    assert_same_sums(layer, twin, change)


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.parametrize("uses_model", [False, True])
@pytest.mark.parametrize("change", [in_a_larger_tensor, lazily_negated, transposed])
def test_backward_passes_of_a_16_bit_weight_add_to_a_float32_tensor_of_the_user(change, uses_model):
    layer, twin, _optimizer = pair(uses_model, torch.bfloat16, torch.float32)
    assert_same_sums(layer, twin, change)


class GradientOfItself(torch.autograd.Function):
    """Its backward returns elements of p.grad as the gradient of the weight."""

    @staticmethod
    def forward(ctx, weight: Tensor, gradient: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.weight, ctx.gradient = weight, gradient
        return weight.sum()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient(ctx.weight.grad), None


def elements_before(gradient: Tensor) -> Tensor:
    """Return a gradient of the same strides that begins one element before this one."""
    return gradient.as_strided(gradient.shape, gradient.stride(), gradient.storage_offset() - 1)


@pytest.mark.parametrize("gradient", [Tensor.t, elements_before])
def test_a_gradient_that_shares_elements_with_the_sum_raises_as_in_pytorch(gradient):
    layer, twin, _optimizer = pair(False)
    for each in (layer, twin):
        backward(each, 0)
        each.weight.grad = torch.randn(SIZE * SIZE + 1)[1:].view(SIZE, SIZE)
        before = each.weight.grad.clone()
        with pytest.raises(RuntimeError, match=r"overlap|single memory location"):
            GradientOfItself.apply(each.weight, gradient).backward()
        assert torch.equal(each.weight.grad, before)
