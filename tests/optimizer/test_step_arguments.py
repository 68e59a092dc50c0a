"""`step(closure=None, **arguments)` passes the arguments on to the inner optimizer."""

import pytest
import torch
from torch import nn

import fusedacc


class Curved(torch.optim.Optimizer):
    """Divides the gradient by a curvature argument of its step, as SophiaH does with `hessian`."""

    def __init__(self, params) -> None:
        super().__init__(params, {})
        self.handed: list[dict] = []

    def step(self, closure=None, hessian=None, attention_max_logits=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.handed.append({"hessian": hessian, "attention_max_logits": attention_max_logits})
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param -= param.grad / (1.0 if hessian is None else hessian)
        return loss


def wrapped(steps=None, **options) -> tuple[nn.Parameter, Curved, fusedacc.AccumulatingOptimizer]:
    weight = nn.Parameter(torch.zeros(3))
    inner = Curved([weight])
    return weight, inner, fusedacc.AccumulatingOptimizer(inner, steps, **options)


def hessians(inner: Curved) -> list:
    return [handed["hessian"] for handed in inner.handed]


def test_arguments_of_the_updating_call_are_passed_on():
    weight, inner, optimizer = wrapped(2)
    for hessian in (2.0, 4.0, 8.0, 16.0):
        weight.sum().backward()
        optimizer.step(hessian=hessian)
        optimizer.zero_grad()
    assert hessians(inner) == [4.0, 16.0]
    assert weight.tolist() == [-1 / 4 - 1 / 16] * 3


@pytest.mark.parametrize("steps", [None, 1])
def test_arguments_are_passed_on_with_a_closure(steps):
    weight, inner, optimizer = wrapped(steps)

    def closure():
        optimizer.zero_grad()
        loss = weight.sum() + 5.0
        loss.backward()
        return loss

    assert optimizer.step(closure, hessian=4.0, attention_max_logits={"a": 1}).item() == 5.0
    assert inner.handed == [{"hessian": 4.0, "attention_max_logits": {"a": 1}}]
    assert weight.tolist() == [-1 / 4] * 3


@pytest.mark.parametrize("steps", [None, 1, 3])
def test_flush_and_a_closed_wrapper_pass_arguments_on(steps):
    weight, inner, optimizer = wrapped(steps)
    optimizer.flush(hessian=1.0)
    assert inner.handed == []
    weight.sum().backward()
    optimizer.flush(hessian=4.0)
    assert hessians(inner) == [4.0]
    assert weight.tolist() == [-1 / 4] * 3
    optimizer.close()
    optimizer.step(hessian=8.0)
    assert hessians(inner) == [4.0, 8.0]


@pytest.mark.parametrize(
    ("steps", "scaler", "flushes"),
    [
        (None, fusedacc.amp.GradScaler, False),
        (2, fusedacc.amp.GradScaler, False),
        (None, torch.amp.GradScaler, False),
        (3, fusedacc.amp.GradScaler, True),
    ],
)
def test_scalers_pass_arguments_on(steps, scaler, flushes):
    weight, inner, optimizer = wrapped(steps)
    scaling = scaler("cpu", init_scale=8.0)
    for hessian in (2.0, 4.0) if steps == 2 else (4.0,):
        scaling.scale(weight.sum()).backward()
        scaling.step(optimizer, hessian=2.0 if flushes else hessian)
        if flushes:
            scaling.flush(optimizer, hessian=hessian)
        scaling.update()
    assert hessians(inner) == [4.0]
    assert weight.tolist() == [-1 / 4] * 3


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("way", ["step", "closure", "flush", "scaler", "scaler.flush"])
def test_unknown_arguments_are_refused_before_anything_changes(steps, way):
    """So are those of a call that does not update."""
    weight, inner, optimizer = wrapped(steps)
    scaler = fusedacc.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(weight.sum()).backward()
    evaluations: list[int] = []
    calls = {
        "step": lambda: optimizer.step(jacobian=1.0),
        "closure": lambda: optimizer.step(lambda: evaluations.append(1), jacobian=1.0),
        "flush": lambda: optimizer.flush(jacobian=1.0),
        "scaler": lambda: scaler.step(optimizer, jacobian=1.0),
        "scaler.flush": lambda: scaler.flush(optimizer, jacobian=1.0),
    }
    before = optimizer.micro_step, optimizer.num_updates, optimizer.has_partial_window
    with pytest.raises(TypeError, match="inner Curved: got an unexpected keyword argument 'jacobian'"):
        calls[way]()
    assert (optimizer.micro_step, optimizer.num_updates, optimizer.has_partial_window) == before
    assert inner.handed == []
    assert evaluations == []
    assert weight.tolist() == [0.0] * 3
    for _ in range(steps or 1):
        optimizer.step()
        weight.sum().backward()
    assert optimizer.num_updates == 1
