"""Errors of the wrapper: each names the argument, what was given and what is allowed, and changes nothing."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import fusedacc


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def wrap(model: nn.Module, steps=None, **options) -> fusedacc.AccumulatingOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return fusedacc.AccumulatingOptimizer(inner, steps, **options)


def scalar(steps=None, **options) -> tuple[nn.Parameter, fusedacc.AccumulatingOptimizer]:
    weight = nn.Parameter(torch.zeros(()))
    return weight, fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), steps, **options)


def run_micro_batch(weight, optimizer, context=None) -> None:
    with context or contextlib.nullcontext():
        (weight * 1.0).backward()
    optimizer.step()


ERRORS = [
    (lambda o: fusedacc.AccumulatingOptimizer(o.param_groups), TypeError, "optimizer.*Optimizer.*list"),
    (lambda o: fusedacc.AccumulatingOptimizer(o, 0), ValueError, "gradient_accumulation_steps.*1.*0"),
    (lambda o: fusedacc.AccumulatingOptimizer(o, -3), ValueError, "gradient_accumulation_steps.*1.*-3"),
    (lambda o: fusedacc.AccumulatingOptimizer(o, 2.0), TypeError, "gradient_accumulation_steps.*int.*2.0"),
    (lambda o: fusedacc.AccumulatingOptimizer(o, True), TypeError, "gradient_accumulation_steps.*int.*True"),
    (lambda o: fusedacc.AccumulatingOptimizer(o, "4"), TypeError, "gradient_accumulation_steps.*int.*'4'"),
    (lambda o: fusedacc.AccumulatingOptimizer(o, 2, reduction="avg"), ValueError, "reduction.*'mean'.*'avg'"),
    (lambda o: fusedacc.AccumulatingOptimizer(o, backend="tpu"), ValueError, "backend.*'?cpu.*"),
    (
        lambda o: fusedacc.AccumulatingOptimizer(o, accumulate_dtype=torch.int32),
        (TypeError, ValueError),
        "accumulate_dtype.*int32",
    ),
    (lambda o: fusedacc.AccumulatingOptimizer(o, accumulate_dtype="float32"), TypeError, "accumulate_dtype"),
    (lambda o: fusedacc.AccumulatingOptimizer(o, 2, max_grad_norm=-1.0), ValueError, "max_grad_norm"),
    (lambda o: fusedacc.AccumulatingOptimizer(o, 2, process_group=None), TypeError, "process_group"),
]


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS)
def test_bad_arguments(call, kind, message):
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(kind, match=f"(?s){message}"):
        call(inner)
    fusedacc.AccumulatingOptimizer(inner).close()


def test_wrapping_twice():
    optimizer = wrap(network())
    with pytest.raises((TypeError, ValueError)):
        fusedacc.AccumulatingOptimizer(optimizer, 2)


@pytest.mark.parametrize("result", [0, -1, 2.5, None])
def test_a_schedule_that_returns_no_count(result):
    weight, optimizer = scalar(lambda update: result)
    with pytest.raises((TypeError, ValueError), match="gradient_accumulation_steps"):
        run_micro_batch(weight, optimizer)
    assert weight.item() == 0.0


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("reduction", ["weighted", "normalized"])
def test_a_missing_weight(reduction, steps):
    weight, optimizer = scalar(steps, reduction=reduction)
    with pytest.raises(RuntimeError, match="weight"):
        run_micro_batch(weight, optimizer, optimizer.accumulate())
    assert weight.item() == 0.0


@pytest.mark.parametrize("reduction", ["mean", "weighted", "normalized"])
def test_a_manual_loop_that_counts_needs_the_context(reduction):
    weight, optimizer = scalar(reduction=reduction)
    with pytest.raises(RuntimeError, match="accumulate"):
        run_micro_batch(weight, optimizer)


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_weight_where_none_is_taken(reduction, steps):
    _, optimizer = scalar(steps, reduction=reduction)
    with pytest.raises(ValueError, match=f"weight=3.*{reduction}"), optimizer.accumulate(weight=3):
        pass


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_a_weight_out_of_range(bad):
    _, optimizer = scalar(2, reduction="weighted")
    with pytest.raises(ValueError, match="weight"), optimizer.accumulate(weight=bad):
        pass


def test_a_weight_that_is_no_number():
    _, optimizer = scalar(2, reduction="weighted")
    with pytest.raises(TypeError, match="weight"), optimizer.accumulate(weight="3"):
        pass


def test_a_late_weight_where_the_gradients_are_in():
    weight, optimizer = scalar(2, reduction="weighted")
    with optimizer.accumulate(weight=2) as micro:
        (weight * 1.0).backward()
        with pytest.raises(RuntimeError, match="backward"):
            micro.weight = 3
    assert micro.weight == 2


def test_zero_grad_after_a_backward_that_no_step_has_ended():
    weight, optimizer = scalar(3)
    (weight * 1.0).backward()
    with pytest.raises(RuntimeError, match=r"ignore\(\).*discard\(\)"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.micro_step == 1


def test_lbfgs_cannot_be_counted():
    inner = torch.optim.LBFGS(network().parameters())
    with pytest.raises(ValueError, match="gradient_accumulation_steps"):
        fusedacc.AccumulatingOptimizer(inner, 4)


def test_a_bad_group_adds_nothing():
    weight, optimizer = scalar(2)
    with pytest.raises((TypeError, ValueError)):
        optimizer.add_param_group({"params": [weight]})
    assert len(optimizer.param_groups) == 1
    for _ in range(2):
        (weight * 1.0).backward()
        optimizer.step()
    assert weight.item() == -1.0


LAZY = {
    "a Linear": (lambda: nn.LazyLinear(3), (2, 4)),
    "a convolution": (lambda: nn.LazyConv1d(3, 2), (2, 4, 5)),
    "a norm": (lambda: nn.LazyBatchNorm1d(), (2, 4)),
}


@pytest.mark.parametrize(("make", "shape"), LAZY.values(), ids=LAZY)
def test_parameters_without_a_shape_are_refused_until_a_forward_pass(make, shape):
    model = nn.Sequential(nn.Identity(), make())
    kind = type(model[1]).__name__
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    for options, place in (({}, "'0.0'"), ({"model": model}, f"'1.weight' of the {kind} '1'")):
        with pytest.raises(ValueError, match=rf"^parameter {place} has no shape.* one forward pass"):
            fusedacc.AccumulatingOptimizer(inner, 2, **options)
    known = network()
    optimizer = wrap(known, 2)
    with pytest.raises(ValueError, match=r"parameter '1\.0' has no shape"):
        optimizer.add_param_group({"params": list(model.parameters())})
    assert len(optimizer.param_groups) == 1
    model(torch.ones(shape))
    optimizer.add_param_group({"params": list(model.parameters())})
    (known(torch.ones(2, 4)).sum() + model(torch.randn(shape)).square().sum()).backward()
    optimizer.step()
