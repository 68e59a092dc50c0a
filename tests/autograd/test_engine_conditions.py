"""What the engine may do without Python, and what it must leave to Python."""

import threading

import pytest
import torch
from hook_situations import node_of
from loops import failing
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedacc
from fusedacc.kernels import native_module

STEPS = 6
PATIENCE = 120
needs_native = pytest.mark.skipif(native_module.module() is None, reason=f"{native_module.why_not()}")


def training(steps: int | None = STEPS, **options):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, fusedacc.AccumulatingOptimizer(inner, steps, **options)


def loss_of(model: nn.Module, seed: int = 0) -> torch.Tensor:
    return model(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))).square().mean()


def micro_batches(model: nn.Module, optimizer, number: int) -> None:
    for seed in range(number):
        loss_of(model, seed).backward()
        optimizer.step(), optimizer.zero_grad()


def sums(optimizer) -> list[torch.Tensor]:
    grads = optimizer._accumulators.grads
    return [grads.current(slot).clone() for slot in optimizer._slots]


@needs_native
@pytest.mark.parametrize("steps", [STEPS, None])
def test_a_backward_inside_ignore_does_not_count_after_one_of_another_thread_has_ended(steps):
    model, optimizer = training(steps)
    if steps is not None:
        micro_batches(model, optimizer, 2)
    inside, ignored = threading.Event(), threading.Event()

    def wait(gradient):
        if threading.current_thread() is thread:
            inside.set()
            assert ignored.wait(PATIENCE)

    thread = threading.Thread(target=lambda: loss_of(model).backward())
    model.weight.register_hook(wait)
    optimizer._engine.drop_plan()  # as after any unusual event
    thread.start()
    assert inside.wait(PATIENCE)
    with optimizer.ignore():
        ignored.set()
        thread.join(PATIENCE)
        before = sums(optimizer)
        loss_of(model, 7).backward()
    assert all(map(torch.equal, sums(optimizer), before))


@needs_native
def test_a_tainted_window_stays_tainted_after_another_backward():
    model, optimizer = training()
    micro_batches(model, optimizer, 2)
    with failing(model.weight):
        loss_of(model).backward()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="discard"):
            optimizer.step()
        loss_of(model).backward()


@needs_native
@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_in_mid_window_can_be_differentiated():
    model, optimizer = training()
    micro_batches(model, optimizer, 2)
    loss_of(model).backward(create_graph=True)
    second = torch.autograd.grad(model.weight.grad.square().sum(), model.weight)[0]
    assert second.abs().sum() > 0
    model.zero_grad()
    optimizer.discard()


@needs_native
def test_what_ignore_has_left_is_gone_after_a_counted_backward():
    model, optimizer = training()
    micro_batches(model, optimizer, 2)
    with optimizer.ignore():
        loss_of(model, 7).backward()
    assert model.weight.grad is not None
    optimizer._capture._let_go_on()  # as a backward pass of another thread does when it ends
    loss_of(model).backward()
    assert model.weight.grad is None


class Returns(torch.autograd.Function):
    """Gives its parameter a gradient of another dtype."""

    @staticmethod
    def forward(ctx, param, dtype):
        ctx.dtype = dtype
        return param.sum()

    @staticmethod
    def backward(ctx, gradient):
        return torch.full((4, 5), 3.0, dtype=ctx.dtype), None


@needs_native
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.float32])
def test_gradients_of_another_dtype_than_the_parameters(dtype):
    param = nn.Parameter(torch.zeros(4, 5, dtype=torch.bfloat16))
    inner = torch.optim.SGD([param], lr=1.0)
    optimizer = fusedacc.AccumulatingOptimizer(inner, STEPS, accumulate_dtype=torch.float32, reduction="sum")
    for _ in range(STEPS):
        Returns.apply(param, dtype).backward()
        optimizer.step(), optimizer.zero_grad()
    assert torch.equal(param, torch.full_like(param, -3.0 * STEPS))


@needs_native
@pytest.mark.parametrize("where", ["parameter", "node"])
def test_a_hook_sees_a_gradient_of_weight_0(where):
    model, optimizer = training(reduction="weighted")
    seen = []
    if where == "parameter":
        model.weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad is not None))
    else:
        node = model.weight.view_as(model.weight).grad_fn.next_functions[0][0]
        node.register_hook(lambda *gradients: seen.append(model.weight.grad is not None))
    for weight in (1.0, 0.0):
        with optimizer.accumulate(weight=weight):
            loss_of(model).backward()
        optimizer.step()
    assert seen == [True, True]


@needs_native
def test_a_micro_batch_of_weight_0_adds_nothing_that_is_not_finite():
    model, optimizer = training(reduction="weighted")
    for weight in (1.0, 0.0):
        with optimizer.accumulate(weight=weight):
            (loss_of(model) / weight if weight else loss_of(model) * float("inf")).backward()
        optimizer.step()
    assert all(bool(total.isfinite().all()) for total in sums(optimizer))


@needs_native
def test_an_addition_changes_the_version_of_p_grad():
    model, _ = training(steps=None)
    loss_of(model).backward()
    for _ in range(2):
        before = [p.grad._version for p in model.parameters()]
        loss_of(model).backward()
        after = [p.grad._version for p in model.parameters()]
        assert all(version > former for version, former in zip(after, before, strict=True))


@needs_native
def test_discard_inside_a_backward_ends_it():
    model, optimizer = training()
    micro_batches(model, optimizer, 2)
    handle = model.weight.register_hook(lambda gradient: optimizer.discard())
    loss_of(model).backward()
    handle.remove()
    optimizer.discard()
    assert not optimizer._engine.backwards()
    micro_batches(model, optimizer, 2)
    assert optimizer.micro_step == 2


@needs_native
def test_a_step_without_a_backward_does_not_count():
    model, optimizer = training()
    micro_batches(model, optimizer, 2)
    optimizer.step(), optimizer.zero_grad()
    assert optimizer.micro_step == 2


@pytest.mark.parametrize("window", range(3))
def test_zero_grad_refuses_to_clear_what_no_step_has_ended(window):
    model, optimizer = training(2)
    micro_batches(model, optimizer, 2 * window + 1)
    loss_of(model).backward()
    before = [param.grad.clone() for param in model.parameters()]
    with pytest.raises(RuntimeError, match="after a backward that no step"):
        optimizer.zero_grad()
    assert all(map(torch.equal, (param.grad for param in model.parameters()), before))


@pytest.mark.parametrize("choice", ["", "0"], ids=["engine", "python"])
def test_a_failed_backward_that_two_threads_drop_taints_only_its_own_window(choice, monkeypatch):
    """Between the moment when a thread finds the backward and when it drops it, another thread drops it and
    the window.
    """
    monkeypatch.setenv("FUSEDACC_ENGINE", choice)
    model, optimizer = training(2)
    with failing(model.weight):
        loss_of(model).backward()
    drop = optimizer._capture._drop

    def drop_later(backward, *, failed):
        drop(backward, failed=failed)
        monkeypatch.undo()
        optimizer.discard()
        drop(backward, failed=failed)

    monkeypatch.setattr(optimizer._capture, "_drop", drop_later)  # until `monkeypatch.undo`
    optimizer.zero_grad()
    micro_batches(model, optimizer, 2)
    assert optimizer.num_updates == 1


@pytest.mark.parametrize("choice", ["", "0"], ids=["engine", "python"])
@pytest.mark.parametrize("steps", [3, None])
def test_a_backward_that_fails_taints_its_window_until_discard(steps, choice, monkeypatch):
    monkeypatch.setenv("FUSEDACC_ENGINE", choice)
    model, optimizer = training(steps)
    for _ in range(2):
        micro_batches(model, optimizer, 1)
        with failing(model.weight):
            loss_of(model).backward()
        with pytest.raises(RuntimeError, match="an exception has interrupted a backward"):
            optimizer.step()
        optimizer.discard()
    done = optimizer.num_updates
    micro_batches(model, optimizer, 3)
    assert optimizer.num_updates == done + (1 if steps else 3)


@pytest.mark.parametrize("choice", ["", "0"], ids=["engine", "python"])
def test_parameters_frozen_before_the_backward_get_no_gradient(choice, monkeypatch):
    monkeypatch.setenv("FUSEDACC_ENGINE", choice)
    model, optimizer = training(3)
    micro_batches(model, optimizer, 4)
    loss = loss_of(model)
    model.requires_grad_(False)
    loss.backward()
    optimizer.zero_grad()  # raises after a backward that counts
    assert optimizer.micro_step == 1


def once_on_the_node(param: nn.Parameter) -> None:
    """Register a hook on the parameter's node that removes itself."""
    handle = node_of(param).register_hook(lambda *_: handle.remove())


def once_on_the_parameter(param: nn.Parameter) -> None:
    handle = param.register_post_accumulate_grad_hook(lambda _: handle.remove())


@pytest.mark.parametrize("register", [once_on_the_node, once_on_the_parameter])
@pytest.mark.parametrize("number", [1, 3])
def test_a_hook_that_removes_itself_between_two_gradients_of_a_backward(number, register):
    """Autograd stores the first gradient, because of the hook, and the engine adds the second."""
    model, optimizer = training(None)
    twin = nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    for each in (model, twin):
        for seed in range(number):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed), requires_grad=True)
            register(each.weight)
            parts = [checkpoint(each, x * factor, use_reentrant=True) for factor in (1.0, 2.0)]
            sum(part.square().sum() for part in parts).backward()
    optimizer.step()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()))


@pytest.mark.parametrize("steps", [2, None])
def test_the_sum_of_a_parameter_whose_elements_share_memory(steps):
    weight = nn.Parameter(torch.ones(1).expand(5))
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=0.1), steps, reduction="sum")
    factors = torch.arange(5.0)
    (weight * factors).sum().backward()
    if steps:
        optimizer.step()
    (weight * factors).sum().backward()
    assert torch.equal(weight.grad, 2 * factors)
