"""A parameter gets another AccumulateGrad node: p.grad is what the contract says at any time."""

import contextlib
import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from loops import wrap
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import fusedacc

STEPS = 3


class Half(nn.Module):
    def forward(self, weight):
        return weight * 0.5


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 160), nn.Tanh(), nn.Linear(160, 160), nn.Tanh(), nn.Linear(160, 3))


def parametrized(model):
    parametrize.register_parametrization(model[2], "weight", Half())


def unparametrized(model):
    parametrized(model)
    parametrize.remove_parametrizations(model[2], "weight")


def set_to_itself(model):
    with torch.no_grad():
        model[2].weight.set_(model[2].weight)


def data_set_to_itself(model):
    model[2].weight.data.set_(model[2].weight.data)


def other_data(model):
    model[2].weight.data = model[2].weight.data.clone()


def swapped(model):
    weight = model[2].weight
    new = nn.Parameter(weight.detach().clone())
    if weight.grad is not None:
        new.grad = weight.grad.clone()
    torch.utils.swap_tensors(weight, new)


def frozen_and_trained_again(model):
    model[2].weight.requires_grad_(False)
    model[2].weight.requires_grad_(True)


CHANGES = [parametrized, unparametrized, set_to_itself, data_set_to_itself, other_data, swapped]
CHANGES += [frozen_and_trained_again]


def plain_sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1)


def loss_of(model, index):
    generator = torch.Generator().manual_seed(index)
    x, y = torch.randn(6, 10, generator=generator), torch.randint(3, (6,), generator=generator)
    return nn.functional.cross_entropy(model(x), y)


def train(optimizer_of, change, at, counted, reduction, clears):
    """Return the p.grad of each parameter after each backward pass, and the final parameters. The user clips
    p.grad before each update.
    """
    model = net()
    parameters = list(model.parameters())
    optimizer = optimizer_of(model)
    is_plain = isinstance(optimizer, torch.optim.SGD)
    seen = []
    for index in range(4 * STEPS):
        is_last = index % STEPS == STEPS - 1
        if index == at:
            change(model)
        weighs = reduction == "weighted"
        weight = index % STEPS + 1 if weighs else 1
        divisor = sum(range(1, STEPS + 1)) if weighs else STEPS
        inside = contextlib.nullcontext()
        if weighs and not is_plain:
            inside = optimizer.accumulate(weight=weight)
        with inside:
            loss = loss_of(model, index)
            if is_plain or not (counted or weighs):
                loss = loss * weight / divisor
            loss.backward()
        seen.append([None if p.grad is None else p.grad.clone() for p in parameters])
        if is_last:
            nn.utils.clip_grad_norm_(parameters, 0.05)
        if counted or is_last:
            optimizer.step()
            if clears or is_plain:
                optimizer.zero_grad()
    return seen, [p.detach() for p in parameters]


def assert_close(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.sweep
@pytest.mark.parametrize("native", ["", "0"], ids=["native", "python"])
@pytest.mark.parametrize("clears", [True, False], ids=["", "no zero_grad"])
@pytest.mark.parametrize("with_model", [False, True], ids=["", "model="])
@pytest.mark.parametrize("reduction", ["mean", "weighted"])
@pytest.mark.parametrize("at", [STEPS, STEPS + 1, 2 * STEPS - 1])
@pytest.mark.parametrize("change", CHANGES)
def test_counted_loop(change, at, reduction, with_model, clears, native, monkeypatch):
    monkeypatch.setenv("FUSEDACC_ENGINE", native)

    def make(model):
        return wrap(model, STEPS, reduction=reduction, model=model if with_model else None)

    plain, wanted = train(plain_sgd, change, at, False, reduction, True)
    seen, found = train(make, change, at, True, reduction, clears)
    assert_close(found, wanted)
    for index, gradients in enumerate(seen):
        if index % STEPS == STEPS - 1:
            assert_close(gradients, plain[index])
        else:
            assert gradients == [None] * len(gradients), index


@pytest.mark.sweep
@pytest.mark.parametrize("native", ["", "0"], ids=["native", "python"])
@pytest.mark.parametrize("with_model", [False, True], ids=["", "model="])
@pytest.mark.parametrize("reduction", ["sum", "weighted"])
@pytest.mark.parametrize("at", [STEPS, STEPS + 1, 2 * STEPS - 1])
@pytest.mark.parametrize("change", CHANGES)
def test_manual_loop(change, at, reduction, with_model, native, monkeypatch):
    monkeypatch.setenv("FUSEDACC_ENGINE", native)

    def make(model):
        return wrap(model, None, reduction=reduction, model=model if with_model else None, lr=0.1)

    if reduction == "weighted":  # p.grad is not divided before step(), so do not clip it
        monkeypatch.setattr(nn.utils, "clip_grad_norm_", lambda parameters, limit: None)
    plain, wanted = train(plain_sgd, change, at, False, reduction, True)
    seen, found = train(make, change, at, False, reduction, True)
    assert_close(found, wanted)
    if reduction == "sum":
        for ours, theirs in zip(seen, plain, strict=True):
            assert_close(ours, theirs)


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, None], ids=str)
@pytest.mark.parametrize(("at", "clears"), [(4, False), (4, True), (5, True)])
def test_modules_are_converted_by_swapping_tensors(dtype, at, clears, steps, monkeypatch):
    """`Module.to` swaps parameters and gradients with `set_swap_module_params_on_conversion(True)`."""

    def run(optimizer_of, counted):
        model = copy.deepcopy(net())
        optimizer = optimizer_of(model)
        for index in range(8):
            if index == at:
                if dtype is None:
                    model.to(memory_format=torch.contiguous_format)
                else:
                    model.to(dtype)
            generator = torch.Generator().manual_seed(index)
            x = torch.randn(6, 10, generator=generator).to(model[0].weight.dtype)
            loss = model(x).float().square().mean()
            (loss if counted else loss / 2).backward()
            if counted or index % 2:
                optimizer.step()
                if clears or not counted or isinstance(optimizer, torch.optim.SGD):
                    optimizer.zero_grad()
        return [p.detach().double() for p in model.parameters()]

    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        wanted = run(plain_sgd, False)
        if steps is not None and not clears:  # autograd has added to gradients that an update has used
            with pytest.raises(RuntimeError, match=r"call optimizer\.zero_grad\(\) before this"):
                run(lambda model: wrap(model, steps), True)
            return
        found = run(lambda model: wrap(model, steps), steps is not None)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    tolerance = {"rtol": 2e-2, "atol": 5e-3} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-6}
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)


def test_what_ignore_has_left_does_not_count_after_a_move():
    model, twin = net(), net()
    optimizer = wrap(model, 1)
    with optimizer.ignore():
        loss_of(model, 0).backward()
    model.to(memory_format=torch.contiguous_format)
    other_data(model)
    model[2].weight.grad.data = model[2].weight.grad.data.clone()
    loss_of(model, 1).backward()
    loss_of(twin, 1).backward()
    assert_close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


@pytest.mark.parametrize("steps", [1, 2])
def test_gradients_after_a_cast_are_not_taken_for_used_ones(steps):
    """The user has removed the used gradients, and no hook runs on the new nodes."""
    model = net()
    optimizer = wrap(model, steps)
    for index in range(steps):
        loss_of(model, index).backward()
        optimizer.step()
    used = [p.grad for p in model.parameters()]  # the user keeps them
    model.zero_grad()
    model.double()
    twin = copy.deepcopy(model)
    x = torch.randn(6, 10, dtype=torch.float64)
    twin(x).square().mean().backward()
    plain_sgd(twin).step()
    for _ in range(steps):
        model(x).square().mean().backward()
        optimizer.step()
    assert_close(model.parameters(), twin.parameters())
    assert all(gradient.dtype is torch.float32 for gradient in used)


@pytest.mark.parametrize(("steps", "in_window"), [(None, 0), (1, 0), (2, 0), (2, 1)])
def test_a_backward_pass_after_a_cast_cannot_add_to_what_ignore_has_left(steps, in_window):
    """No hook runs on the new nodes, so autograd has added to gradients that do not count."""
    model = net()
    optimizer = wrap(model, steps)
    wanted = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    for index in range(in_window):
        loss_of(model, index).backward()
        optimizer.step()
        gradients = torch.autograd.grad(loss_of(model, index), list(model.parameters()))
        wanted = [total + gradient for total, gradient in zip(wanted, gradients, strict=True)]
    with optimizer.ignore():
        loss_of(model, 7).backward()
    model.double()
    x = torch.randn(6, 10, dtype=torch.float64)
    model(x).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"call optimizer\.zero_grad\(\) before this change"):
        optimizer.step()

    optimizer.zero_grad()  # the micro-batch can be repeated
    assert all(p.grad is None for p in model.parameters())
    gradients = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    count = in_window + 1
    wanted = [(total + gradient) / count for total, gradient in zip(wanted, gradients, strict=True)]
    wanted = [p.detach() - 0.1 * gradient for p, gradient in zip(model.parameters(), wanted, strict=True)]
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.flush()
    assert optimizer.num_updates == 1
    assert_close(model.parameters(), wanted)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("native", ["", "0"], ids=["native", "python"])
def test_post_accumulate_hooks_see_each_gradient_once(steps, native, monkeypatch):
    """The gradient counts once, and p.grad is None in mid-window, also where hooks look at it."""
    monkeypatch.setenv("FUSEDACC_ENGINE", native)
    model, twin = net(), net()
    optimizer = wrap(model, steps, lr=0.0)
    seen = []
    model[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    wanted = []
    for index in range(2 * steps):
        loss_of(model, index).backward()
        twin.zero_grad()
        loss_of(twin, index).backward()
        wanted.append(twin[2].weight.grad)
        if index % steps == steps - 1:
            mean = sum(wanted[-steps:]) / steps
            torch.testing.assert_close(model[2].weight.grad, mean)
        else:
            assert model[2].weight.grad is None
        optimizer.step()
        optimizer.zero_grad()
    assert_close(seen, wanted)


@pytest.mark.parametrize("with_model", [False, True], ids=["", "model="])
def test_a_backward_inside_another_does_not_show_half_a_sum(with_model):
    """A checkpoint with use_reentrant=True runs the backward pass of its block inside the outer one."""
    model, twin = net(), net()
    optimizer = wrap(model, 2, lr=0.0, model=model if with_model else None)

    def run(layers, index, scale=1.0):
        x = torch.randn(6, 10, generator=torch.Generator().manual_seed(index))
        hidden = layers[2](torch.tanh(layers[0](x)))
        inner = checkpoint(lambda h: layers[2](torch.tanh(h)), hidden, use_reentrant=True)
        (layers[4](inner).square().mean() * scale).backward()

    for index in range(4):
        if index in (1, 2):
            set_to_itself(model)
        run(model, index)
        run(twin, index, 0.5)
        if index % 2:
            assert_close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
            twin.zero_grad()
        optimizer.step()
        optimizer.zero_grad()


def test_post_accumulate_hooks_with_backward_passes_of_several_threads():
    model, twin = net(), net()
    optimizer = wrap(model, 1, lr=0.0)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: None)
    for index in range(0, 120, 4):
        losses = [loss_of(model, index + number) for number in range(4)]
        with ThreadPoolExecutor(4) as pool:
            for backward in [pool.submit(loss.backward) for loss in losses]:
                backward.result()
        for number in range(4):
            loss_of(twin, index + number).backward()
        optimizer.step()
        assert_close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
        optimizer.zero_grad()
        twin.zero_grad()


class Halving(torch.optim.SGD):
    """Changes p.grad in place in each update."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.mul_(0.5)
        return super().step(closure)


def trained(make=torch.optim.SGD) -> tuple[nn.Sequential, fusedacc.AccumulatingOptimizer]:
    """Return a model after three windows, whose last gradients are still in p.grad."""
    model = net()
    optimizer = wrap(model, 2, make)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(2, 10)).sum().backward()
        optimizer.step()
    return model, optimizer


def test_a_gradient_that_the_update_has_changed_does_not_look_like_a_new_one():
    model, optimizer = trained(Halving)
    model.double()
    optimizer.explain()  # looks at all parameters
    optimizer.zero_grad()
    for _ in range(2):
        model(torch.randn(2, 10).double()).sum().backward()
        optimizer.step()
    assert optimizer.num_updates == 4


def test_zero_grad_hooks_the_nodes_of_a_model_that_was_cast():
    model, optimizer = trained()
    model.double()
    optimizer.zero_grad()
    model(torch.randn(2, 10).double()).sum().backward()
    assert all(param.grad is None for param in model.parameters())
