"""A gradient that an update has used stays in p.grad and is not counted again."""

import copy
from contextlib import nullcontext

import pytest
import torch
from loops import scalar, wrap
from torch import nn

import fusedacc


def test_a_gradient_assigned_after_an_update_counts_with_the_next_backward():
    weight, optimizer = scalar(1)
    (3 * weight).backward()
    optimizer.step()
    weight.grad = torch.tensor(7.0)
    (5 * weight).backward()
    optimizer.step()
    assert weight.item() == -15.0


@pytest.mark.parametrize("native_hooks", ["0", ""])
def test_gradients_are_added_to_the_new_memory_of_p_grad(native_hooks, monkeypatch):
    """`p.grad.data = other` gives the same tensor another address."""
    monkeypatch.setenv("FUSEDACC_ENGINE", native_hooks)
    weight = nn.Parameter(torch.ones(300, dtype=torch.bfloat16))
    _optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=0.0))
    for _ in range(3):
        weight.sum().backward()
    former = weight.grad.data
    weight.grad.data = torch.full_like(former, 10.0)
    weight.sum().backward()
    assert torch.equal(weight.grad, torch.full_like(former, 11.0))
    assert torch.equal(former, torch.full_like(former, 3.0))


def test_zeros_from_zero_grad_count():
    """As in stock, a parameter with zeros in p.grad is updated: weight decay acts on it."""
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([used, unused], lr=0.5, weight_decay=1.0)
    optimizer = fusedacc.AccumulatingOptimizer(inner, 2)
    for _ in range(2):
        (used.sum() + unused.sum()).backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    before = unused.detach().clone()
    for _ in range(2):
        used.sum().backward()
        optimizer.step()
    assert torch.equal(unused, before * 0.5)


def test_with_compiled_autograd_p_grad_holds_the_last_micro_batch_and_step_warns():
    weight, optimizer = scalar(2)
    said = "p.grad holds the gradient of the last micro-batch alone"
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", dynamic=False)):
        for slope in (3.0, 5.0, 7.0, 9.0):
            with optimizer.ignore():
                (100 * weight).backward()
            (slope * weight).backward()
            assert weight.grad == slope
            with pytest.warns(UserWarning, match=said) if slope == 3.0 else nullcontext():
                optimizer.step()
    assert weight.item() == -12.0


@pytest.mark.parametrize("leaf", [True, False])
def test_a_copy_of_the_optimizer_does_not_count_a_used_gradient(leaf):
    weight = torch.zeros((), requires_grad=True)
    weight = weight if leaf else nn.Parameter(weight.detach())
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), 1)
    (3 * weight).backward()
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    (other,) = twin.param_groups[0]["params"]
    twin.step()
    assert other.item() == -3.0
    (5 * other).backward()
    twin.step()
    assert other.item() == -8.0


def swap(layer: nn.Module) -> None:
    layer.weight.data = layer.weight.data.clone()


@pytest.mark.parametrize("change", [swap, lambda m: m.to(torch.float64), lambda m: m.half()])
@pytest.mark.parametrize("clipped", [True, False])
@pytest.mark.parametrize("tells", [True, False])
def test_after_a_move_a_used_gradient_is_not_counted_or_step_refuses(change, clipped, tells):
    """`step()` refuses if a node without our hook may have added to the used gradient."""
    layer = nn.Linear(2, 2, bias=False)
    optimizer = wrap(layer, 2, max_grad_norm=0.5 if clipped else None, lr=0.0)

    def window() -> None:
        for _ in range(2):
            layer(torch.ones(1, 2, dtype=layer.weight.dtype)).sum().backward()
            optimizer.step()

    window()
    change(layer)
    if tells:
        optimizer.explain()
    if change is not swap and not tells:
        with pytest.raises(
            RuntimeError, match=r"'0.0' was cast, moved or unfrozen .* call optimizer.zero_grad"
        ):
            window()
        optimizer.zero_grad()
    window()
    wanted = torch.full((2, 2), 0.25 if clipped else 1.0)
    torch.testing.assert_close(layer.weight.grad.float(), wanted, rtol=1e-3, atol=0)


def test_flush_after_a_cast_of_a_sparse_table_inside_a_window():
    table = torch.nn.Embedding(3, 2, sparse=True, dtype=torch.float64)
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), 4)
    table(torch.tensor([0, 0])).sum().backward()
    optimizer.step()
    table.to(torch.bfloat16)
    before = table.weight.detach().clone()
    optimizer.flush()
    assert torch.equal(
        before - table.weight, (before - (before - torch.tensor([[2.0], [0], [0]]).bfloat16()))
    )


def test_a_used_gradient_with_other_memory_is_not_counted():
    """`p.grad.data = other` leaves the same tensor in p.grad."""
    weight, optimizer = scalar(1)
    (3 * weight).backward()
    optimizer.step()
    weight.grad.data = torch.tensor(7.0)
    (5 * weight).backward()
    optimizer.step()
    assert weight.item() == -8.0


def test_a_used_gradient_has_no_graph():
    """So the parameter can be copied, as with any other used gradient."""
    weight, optimizer = scalar(1)
    (3 * weight).square().backward(create_graph=True)
    optimizer.step()
    assert not weight.grad.requires_grad
    copy.deepcopy(weight)


def test_a_gradient_that_the_inner_optimizer_has_replaced_is_not_counted():
    class Replacing(torch.optim.SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.grad = p.grad * 1.0
            return super().step(closure)

    weight = nn.Parameter(torch.zeros(()))
    optimizer = fusedacc.AccumulatingOptimizer(Replacing([weight], lr=1.0), 1)
    for factor in (3, 5):
        (factor * weight).backward()
        optimizer.step()
    assert weight.item() == -8.0


@pytest.mark.parametrize("steps", [None, 2])
def test_a_lazily_negated_gradient_of_the_user_counts(steps):
    weight, optimizer = scalar(steps, reduction="sum")
    weight.grad = torch._neg_view(torch.tensor(2.0))
    for _ in range(steps or 1):
        weight.backward()
        optimizer.step()
    assert weight.item() == (1 if steps is None else 0)


def test_a_graph_that_has_saved_p_grad_notices_the_next_addition():
    weight, factor = nn.Parameter(torch.ones(300)), torch.ones(300, requires_grad=True)
    _optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=0.0))
    for _ in range(3):
        weight.sum().backward()
    product = (factor * weight.grad).sum()
    weight.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
