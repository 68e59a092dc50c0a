"""Clipping uses the norm of p.grad at `step()`, even if the user changed it. With private gradients, the last
additions of a window compute the norm, with the same bits.
"""

import copy

import pytest
import torch
from loops import LOW, Failure, fail, loss_of, micro_batch, network, wrap
from torch import nn
from torch.utils.dlpack import from_dlpack, to_dlpack

import fusedacc
from fusedacc.functional import total_norm
from fusedacc.traffic import TrafficMeter

F32 = torch.float32


def build(model, steps=2, **options):
    return wrap(model, steps, max_grad_norm=1e9, lr=0.0, **options)


def both(model: nn.Module, steps=2, **options):
    """Return the model and a copy, each with its optimizer. That of the copy keeps its gradients private."""
    twin = copy.deepcopy(model)
    return (model, build(model, steps, **options)), (
        twin,
        build(twin, steps, private_gradients=True, **options),
    )


def norm_of_grads(model: nn.Module) -> torch.Tensor:
    return total_norm([p.grad for p in model.parameters() if p.grad is not None])


def reads(optimizer) -> int:
    """Return how many calls of the next step read accumulators for their norm."""
    with TrafficMeter() as meter:
        optimizer.step()
    ops = meter.as_dict()["by_op"]
    return sum(op["calls"] for name, op in ops.items() if "norm_partials" in name)


def run_last(optimizer, model, seeds=(0, 1)) -> None:
    """Run a window without its last `step()`."""
    for seed in seeds:
        loss_of(model, seed).backward()
        if seed != seeds[-1]:
            optimizer.step()


@pytest.mark.sweep
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("dtype", [F32, LOW, torch.float64])
@pytest.mark.parametrize("steps", [2, 3])
def test_norms_from_the_last_additions_have_the_bits_of_a_separate_pass(dtype, steps, norm_type, cpu_backend):
    found = []
    for model, optimizer in both(network(dtype), steps, backend=cpu_backend, norm_type=norm_type):
        norms = []
        for window in range(4):
            run_last(optimizer, model, range(steps * window, steps * (window + 1)))
            optimizer.step()
            norms.append(optimizer.grad_norm)
            optimizer.zero_grad()
        found.append(torch.stack(norms))
    if dtype == torch.float64:  # the chunks are joined in another order, which float32 does not show
        torch.testing.assert_close(found[0], found[1], rtol=1e-14, atol=0)
    else:
        assert torch.equal(*found)


def test_only_visible_gradients_are_read_for_the_norm():
    (model, optimizer), (twin, private) = both(network())
    run_last(optimizer, model)
    run_last(private, twin)
    assert all(p.grad is None for p in twin.parameters())
    assert (reads(optimizer), reads(private)) == (1, 0)


def times(array, factor: float) -> None:
    array *= factor


CHANGES = {
    "in place": lambda model: model[0].weight.grad.mul_(3.0),
    "clipped by value": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3),
    "replaced": lambda model: setattr(model[0].weight, "grad", torch.ones_like(model[0].weight)),
    "removed": lambda model: setattr(model[0].weight, "grad", None),
    "through a view": lambda model: model[0].weight.grad.view(-1)[:3].zero_(),
    "by clip_grad_norm_": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "through .data": lambda model: model[0].weight.grad.data.mul_(3.0),
    ".data, as the tutorial divides": lambda model: [times(p.grad.data, 1 / 64) for p in model.parameters()],
    ".data replaced": lambda model: setattr(model[0].weight.grad, "data", torch.ones(5, 4)),
    "through numpy": lambda model: times(model[0].weight.grad.numpy(), 3.0),
    "through dlpack": lambda model: from_dlpack(to_dlpack(model[0].weight.grad)).mul_(3.0),
    "through its storage": lambda model: model[0].weight.grad.untyped_storage().fill_(0),
}


@pytest.mark.sweep
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("in_closure", [False, True])
def test_the_norm_includes_what_the_user_changed(change, steps, in_closure):
    model = network()
    optimizer = build(model, steps)
    for seed in range(steps - 1):
        micro_batch(model, optimizer, seed)
    wanted = []

    def last_micro_batch():
        loss_of(model, steps).backward()
        CHANGES[change](model)
        wanted.append(norm_of_grads(model))

    if not in_closure:
        last_micro_batch()
    optimizer.step(last_micro_batch if in_closure else None)
    assert torch.equal(optimizer.grad_norm, wanted[0])


PRIVATE = [False, True]


def assert_norm(optimizer, model: nn.Module, private: bool) -> None:
    """Compare with the norm of p.grad before `step()`, or after it if p.grad is private (lr=0 keeps it)."""
    wanted = None if private else norm_of_grads(model)
    optimizer.step()
    assert torch.equal(optimizer.grad_norm, norm_of_grads(model) if wanted is None else wanted)


def part(model: nn.Module) -> None:
    """Run a backward through some of the parameters."""
    model[0](torch.randn(3, 4)).square().mean().backward()


@pytest.mark.parametrize("private", PRIVATE)
@pytest.mark.parametrize("stored", [False, True], ids=["", "autograd stores one"])
@pytest.mark.parametrize(("steps", "whole"), [(2, 2), (2, 1), (3, 2)])
def test_the_norm_is_right_after_a_last_backward_through_some_parameters(steps, whole, stored, private):
    """`whole` backwards through all parameters come before it, in the same micro-batch or in earlier ones."""
    model = network()
    if stored:
        model[0].bias.register_post_accumulate_grad_hook(lambda p: None)
    optimizer = build(model, steps, private_gradients=private)
    for seed in range(whole):
        loss_of(model, seed).backward()
        if seed < steps - 1:
            optimizer.step()
    part(model)
    assert_norm(optimizer, model, private)


@pytest.mark.parametrize("steps", [2, 3])
def test_the_pass_that_applies_deferred_scales_computes_norms(steps):
    model = network()
    optimizer = build(model, steps, private_gradients=True)
    for seed in range(steps - 1):
        micro_batch(model, optimizer, seed)
    part(model)
    assert reads(optimizer) == (0 if steps == 2 else 1)  # with three steps no scale is deferred


@pytest.mark.parametrize("private", PRIVATE)
@pytest.mark.parametrize("reduction", ["weighted", "normalized", "flushed"])
def test_the_norm_is_right_if_the_scale_is_known_late(reduction, private):
    model = network()
    flushes = reduction == "flushed"
    given = {} if flushes else {"reduction": reduction}
    optimizer = build(model, 4 if flushes else 2, private_gradients=private, **given)
    for seed in (0, 1):
        with optimizer.accumulate(weight=None if flushes else 3.0 + seed):
            loss_of(model, seed).backward()
        optimizer.step()
    if flushes:
        optimizer.flush()
    assert torch.equal(optimizer.grad_norm, norm_of_grads(model))


@pytest.mark.parametrize("private", PRIVATE)
@pytest.mark.parametrize("then", ["clears", "continues", "writes and repeats the step"])
def test_an_update_that_fails_leaves_no_stale_norm(then, private):
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)  # it scales: a second try is allowed
    optimizer = fusedacc.AccumulatingOptimizer(inner, 2, max_grad_norm=1e9, private_gradients=private)
    fails = inner.register_step_pre_hook(fail)
    run_last(optimizer, model)
    with pytest.raises(Failure):
        optimizer.step()
    fails.remove()
    if then == "writes and repeats the step":
        model[0].weight.grad.data.mul_(3.0)
        wanted = norm_of_grads(model)
        optimizer.step()
        assert torch.equal(optimizer.grad_norm, wanted)
        return
    if then == "clears":
        optimizer.zero_grad()
    loss_of(model, 2).backward()  # touches every sum
    optimizer.step()
    part(model)  # and this one a part
    assert_norm(optimizer, model, private)


def test_unscaling_shows_private_gradients_and_the_norm_includes_changes():
    model = network()
    optimizer = build(model, private_gradients=True)
    scaler = fusedacc.amp.GradScaler("cpu", init_scale=8.0)
    for seed in (0, 1):
        scaler.scale(loss_of(model, seed)).backward()
        if seed == 0:
            scaler.step(optimizer), scaler.update()
    scaler.unscale_(optimizer)
    model[0].weight.grad.data.mul_(3.0)
    wanted = norm_of_grads(model)
    scaler.step(optimizer)
    assert torch.equal(optimizer.grad_norm, wanted)


def test_a_manual_loop_has_no_private_gradients():
    with pytest.raises(ValueError, match="private_gradients=True needs a counted loop"):
        build(network(), None, private_gradients=True)
