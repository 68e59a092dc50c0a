"""Errors of the wrapper name the argument, the given value and the allowed ones, and change nothing."""

import contextlib

import pytest
import torch
from loops import network, scalar, wrap
from torch import nn

import fusedacc
from fusedacc.accumulators.reduction import WEIGHING
from fusedacc.optimizer.micro_batch import check_weight


def run_micro_batch(weight, optimizer, context=None) -> None:
    with context or contextlib.nullcontext():
        (weight * 1.0).backward()
    optimizer.step()


STEPS = "gradient_accumulation_steps"
BAD = [
    ({STEPS: 0}, ValueError, f"{STEPS}.*1.*0"),
    ({STEPS: -3}, ValueError, f"{STEPS}.*1.*-3"),
    ({STEPS: 2.0}, TypeError, f"{STEPS}.*int.*2.0"),
    ({STEPS: True}, TypeError, f"{STEPS}.*int.*True"),
    ({STEPS: "4"}, TypeError, f"{STEPS}.*int.*'4'"),
    ({STEPS: 2, "reduction": "avg"}, ValueError, "reduction.*'mean'.*'avg'"),
    ({"backend": "tpu"}, ValueError, "backend.*'?cpu.*"),
    ({"accumulate_dtype": torch.int32}, (TypeError, ValueError), "accumulate_dtype.*int32"),
    ({"accumulate_dtype": "float32"}, TypeError, "accumulate_dtype"),
    ({STEPS: 2, "process_group": None}, TypeError, "process_group"),
    ({"max_grad_norm": 0}, ValueError, "max_grad_norm must be above 0"),
    ({"max_grad_norm": -1.0}, ValueError, "max_grad_norm must be above 0"),
    ({"max_grad_norm": float("nan")}, ValueError, "max_grad_norm must be above 0"),
    ({"max_grad_norm": "1"}, TypeError, "max_grad_norm must be a number"),
    ({"max_grad_norm": 1.0, "norm_type": 1}, ValueError, r"norm_type is 1; allowed: 2\.0 and inf"),
]


@pytest.mark.parametrize(("options", "kind", "message"), BAD)
def test_bad_arguments_are_refused(options, kind, message):
    inner = torch.optim.SGD(network().parameters(), lr=0.1)
    with pytest.raises(kind, match=f"(?s){message}"):
        fusedacc.AccumulatingOptimizer(inner, **options)
    fusedacc.AccumulatingOptimizer(inner).close()


def test_other_objects_and_optimizers_are_refused():
    optimizer = wrap(network())
    with pytest.raises((TypeError, ValueError)):
        fusedacc.AccumulatingOptimizer(optimizer, 2)
    with pytest.raises(TypeError, match=r"optimizer.*Optimizer.*list"):
        fusedacc.AccumulatingOptimizer(optimizer.param_groups)
    with pytest.raises(ValueError, match=STEPS):
        fusedacc.AccumulatingOptimizer(torch.optim.LBFGS(network().parameters()), 4)
    inner = torch.optim.SGD(network().parameters(), lr=0.1)
    inner.defaults["gradient_release"] = True  # as optimi's optimizers have it
    with pytest.raises(ValueError, match=r"SGD\(gradient_release=True\).*allowed: gradient_release=False"):
        fusedacc.AccumulatingOptimizer(inner)


@pytest.mark.parametrize("result", [0, -1, 2.5, None])
def test_a_schedule_must_return_a_count(result):
    weight, optimizer = scalar(lambda update: result)
    with pytest.raises((TypeError, ValueError), match=STEPS):
        run_micro_batch(weight, optimizer)
    assert weight.item() == 0.0


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("reduction", WEIGHING)
def test_a_missing_weight_is_refused(reduction, steps):
    weight, optimizer = scalar(steps, reduction=reduction)
    with pytest.raises(RuntimeError, match="weight"):
        run_micro_batch(weight, optimizer, optimizer.accumulate())
    assert weight.item() == 0.0


@pytest.mark.parametrize("reduction", ["mean", "weighted", "normalized"])
def test_a_manual_loop_that_counts_needs_accumulate(reduction):
    weight, optimizer = scalar(reduction=reduction)
    with pytest.raises(RuntimeError, match=r"needs `with optimizer.accumulate\(\):`"):
        run_micro_batch(weight, optimizer)


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_weight_is_refused_by_reductions_without_weights(reduction, steps):
    _, optimizer = scalar(steps, reduction=reduction)
    with pytest.raises(ValueError, match=f"weight=3.*{reduction}"), optimizer.accumulate(weight=3):
        pass


@pytest.mark.parametrize(
    ("bad", "kind", "message"),
    [
        (-1.0, ValueError, "weight must be finite and at least 0"),
        (float("nan"), ValueError, "weight must be finite and at least 0"),
        (float("inf"), ValueError, "weight must be finite and at least 0"),
        ("3", TypeError, "weight must be a real number"),
        (torch.ones(1, device="meta"), TypeError, "0-dim tensor"),
    ],
)
def test_a_bad_weight_is_refused(bad, kind, message):
    _, optimizer = scalar(2, reduction="weighted")
    with pytest.raises(kind, match=message), optimizer.accumulate(weight=bad):
        pass


def test_only_normalized_takes_one_nonzero_weight_after_the_backward():
    for reduction in WEIGHING:
        weight, optimizer = scalar(2, reduction=reduction)
        with optimizer.accumulate(weight=1.0 if reduction == "weighted" else None) as micro_batch:
            (weight * 1.0).backward()
        with pytest.raises((RuntimeError, ValueError), match=r"weight=0.* came after the backward"):
            micro_batch.weight = 0
    with pytest.raises(RuntimeError, match="needs a weight for each micro-batch"):
        optimizer.step()
    micro_batch.weight = 5
    optimizer.step()
    assert (optimizer.micro_step, optimizer._window.weight_total) == (1, 5.0)


def test_accumulate_does_not_nest():
    _, optimizer = scalar(2)
    with optimizer.accumulate(), pytest.raises(RuntimeError, match="do not nest"), optimizer.accumulate():
        pass


def test_tensor_weights_become_floats_or_stay_on_the_device():
    assert check_weight(torch.tensor(3)) == 3.0
    kept = check_weight(torch.ones((), dtype=torch.int64, device="meta"))
    assert (kept.device.type, kept.dtype) == ("meta", torch.float32)


def test_zero_grad_between_backward_and_step_is_refused():
    weight, optimizer = scalar(3)
    (weight * 1.0).backward()
    with pytest.raises(RuntimeError, match=r"ignore\(\).*discard\(\)"):
        optimizer.zero_grad()
    optimizer.step(), optimizer.zero_grad()
    assert optimizer.micro_step == 1


def test_a_refused_group_changes_nothing():
    weight, optimizer = scalar(2)
    with pytest.raises((TypeError, ValueError)):
        optimizer.add_param_group({"params": [weight]})
    assert len(optimizer.param_groups) == 1
    for _ in range(2):
        run_micro_batch(weight, optimizer)
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
