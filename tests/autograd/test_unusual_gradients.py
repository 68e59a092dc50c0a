"""Gradients that are shared, changed later, assigned, late, or read from another thread."""

import threading
from functools import partial

import pytest
import torch
from loops import assert_gradients, expected, loss_of, micro_batch, network, with_backward, wrap
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedacc


class SharedBuffer(torch.autograd.Function):
    """Computes x * a + x * b for scalars x.

    The backward returns one buffer, which Python keeps, for a and b.
    """

    buffer = torch.empty(3)

    @staticmethod
    def forward(ctx, x, a, b):
        ctx.save_for_backward(x)
        return (x * a + x * b).sum()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        SharedBuffer.buffer.copy_((gradient * x).expand(3))
        return None, SharedBuffer.buffer, SharedBuffer.buffer


CHANGING = {
    "shared buffer": lambda a, b, value: SharedBuffer.apply(torch.tensor(value), a, b),
    # The sum hands one gradient to the leaf `a` first and then to the function that doubles it.
    "changed after the leaf": lambda a, b, value: (
        value * (a + with_backward(b * 1.0, lambda gradient: gradient.mul_(2.0)))
    ).sum(),
}


@pytest.mark.parametrize("build", CHANGING.values(), ids=CHANGING)
@pytest.mark.parametrize("steps", [None, 3])
def test_memory_that_other_code_writes_does_not_become_an_accumulator(build, steps):
    results = []
    for wrapped in (False, True):
        a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([a, b], lr=0.5)
        if wrapped:
            optimizer = fusedacc.AccumulatingOptimizer(optimizer, steps, reduction="sum")
        for value in (1.0, 2.0, 4.0):
            build(a, b, value).backward()
            if wrapped and steps:
                optimizer.step()
        if not (wrapped and steps):
            optimizer.step()
        results.append((a.grad, b.grad, a.detach(), b.detach()))
    assert results[0][0].tolist() == [7.0] * 3
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    ("reduction", "weight", "scale"), [("mean", None, 1), ("weighted", 3, 1), ("normalized", 3, 3)]
)
def test_a_manual_step_inside_accumulate_counts_its_micro_batch(reduction, weight, scale):
    model = network()
    optimizer = wrap(model, reduction=reduction, lr=0.0)
    for window in range(2):
        seeds = range(3 * window, 3 * window + 3)
        for seed in seeds:
            with optimizer.accumulate(weight=weight):
                loss_of(model, seed).backward()
                if seed == seeds[-1]:
                    optimizer.step()
        assert_gradients(model, expected(model, seeds, 1 / (3 * scale)))
        optimizer.zero_grad()
    assert (optimizer.num_updates, optimizer.micro_step) == (2, 0)


def test_a_checkpoint_from_another_thread_during_a_backward_has_whole_micro_batches():
    model = network()
    optimizer = wrap(model, 2, reduction="sum")
    wanted = expected(model, (0, 1))
    micro_batch(model, optimizer, 0)
    inside, saved = threading.Event(), threading.Event()
    states = []

    def save():
        if inside.wait(120):
            try:
                states.append(optimizer.state_dict())
            finally:
                saved.set()

    def hook(gradient):
        inside.set()
        assert saved.wait(120)

    handle = model[0].weight.register_hook(hook)  # gradients of the later layers are pending by now
    thread = threading.Thread(target=save)
    thread.start()
    loss_of(model, 1).backward()
    thread.join(120)
    handle.remove()
    assert len(states) == 1
    assert states[0]["fusedacc"]["window"]["micro_step"] == 1
    optimizer.step()
    assert optimizer.num_updates == 1
    assert_gradients(model, wanted)


def test_a_gradient_that_autograd_stores_in_a_closure_has_the_right_scale():
    """The accumulator has another scale by then."""
    ends = []
    for stored in (False, True):
        weight = torch.nn.Parameter(torch.ones(2))
        if stored:
            weight.register_post_accumulate_grad_hook(lambda p: None)
        optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), reduction="normalized")

        def closure(weight=weight, optimizer=optimizer):
            with optimizer.accumulate(weight=3.0):
                (weight * 30.0).sum().backward()

        with optimizer.accumulate(weight=7.0):
            (weight * 70.0).sum().backward()
        optimizer.step(closure)
        ends.append(weight.detach())
    assert torch.equal(*ends)
    torch.testing.assert_close(ends[0], torch.full((2,), 1.0 - 10.0))


def test_nested_backwards_add_in_the_order_of_autograd(monkeypatch):
    """The enclosing backward's small gradient is added before its last large one, with full buckets too."""
    monkeypatch.setattr("fusedacc.accumulators.engine.LAUNCH_BYTES", 100)
    ends = []
    for wraps in (False, True):
        weight, filling = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(30))
        optimizer = torch.optim.SGD([weight, filling], lr=0.1)
        if wraps:
            optimizer = fusedacc.AccumulatingOptimizer(optimizer)
        x = torch.ones(1, requires_grad=True)
        for factor in (1e8, 1.0, -1e8):
            inner = partial(lambda f, w, more, x: x + w * f + more.sum(), factor, weight, filling)
            x = checkpoint(inner, x, use_reentrant=True) + weight * 0.1
        x.backward()
        ends.append(weight.grad)
    assert torch.equal(*ends)


def tripled_in_inference_mode(gradient):
    with torch.inference_mode():
        return 3 * gradient


@pytest.mark.parametrize("steps", [None, 1, 2])
def test_a_gradient_of_inference_mode_does_not_become_a_sum(steps):
    param = nn.Parameter(torch.ones(3))
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([param], lr=1.0), steps, reduction="sum")
    for _ in range(6):
        for _ in range(steps or 2):
            with_backward(param, tripled_in_inference_mode).sum().backward()
            if steps:
                optimizer.step()
        if not steps:
            optimizer.step()
        optimizer.zero_grad()
    assert param.tolist() == [1.0 - 6 * 3 * (steps or 2)] * 3


@pytest.mark.parametrize("steps", [None, 2])
def test_a_view_of_a_tensor_that_python_keeps_does_not_become_a_sum(steps):
    param, kept = nn.Parameter(torch.ones(4, 4)), []

    def view_of_kept(gradient):
        kept.append(torch.full((16,), 3.0))
        return kept[-1].view(4, 4)

    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([param], lr=1.0), steps, reduction="sum")
    with_backward(param, view_of_kept).sum().backward()
    if steps:
        optimizer.step()
    with_backward(param, view_of_kept).sum().backward()
    assert [tensor.tolist() for tensor in kept] == [[3.0] * 16] * 2
    assert param.grad.tolist() == [[6.0] * 4] * 4


@pytest.mark.parametrize("steps", [None, 1])
def test_p_grad_has_no_graph(steps):
    """The gradient has one, although the backward pass records none."""
    param = nn.Parameter(torch.ones(3))

    def with_graph(gradient):
        with torch.enable_grad():
            return torch.full_like(gradient, 3.0).requires_grad_() * 1.0

    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([param], lr=1.0), steps)
    with_backward(param, with_graph).sum().backward()
    assert param.grad.grad_fn is None
    optimizer.step()
    assert param.tolist() == [-2.0] * 3


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
def test_a_sum_and_a_gradient_with_the_same_gaps_in_their_memory():
    param, memory = nn.Parameter(torch.ones(4, 4)), torch.ones(4, 8)
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([param], lr=1.0))
    param.grad = memory[:, ::2]
    with_backward(param, lambda gradient: torch.full((4, 8), 3.0)[:, ::2]).sum().backward()
    assert memory.tolist() == [[4.0, 1.0] * 4] * 4
    optimizer.step()
    assert param.tolist() == [[-3.0] * 4] * 4


class TwoViews(torch.autograd.Function):
    """The sum of two tensors, whose gradients are views of the same memory."""

    @staticmethod
    def forward(ctx, one, other):
        return one.sum() + other.sum()

    @staticmethod
    def backward(ctx, gradient):
        both = torch.ones(3) * gradient
        return both.view(3), both.detach().view(3)


@pytest.mark.parametrize("choice", ["", "0"], ids=["engine", "python"])
@pytest.mark.parametrize("steps", [3, None])
def test_two_gradients_that_are_views_of_one_memory_do_not_become_sums(steps, choice, monkeypatch):
    monkeypatch.setenv("FUSEDACC_ENGINE", choice)
    weights = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(weights, lr=1.0), steps, reduction="sum")
    for _ in range(3):
        TwoViews.apply(*weights).backward()
        (2 * weights[0]).sum().backward()
        if steps:
            optimizer.step()
    assert [weight.grad.tolist() for weight in weights] == [[9.0] * 3, [3.0] * 3]
