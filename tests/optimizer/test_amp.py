"""Loss scaling: torch's scaler in the manual loop and ours in both loops give stock's weights."""

import copy
import math
import pickle

import pytest
import torch
from loops import assert_close_weights, assert_equal_weights, loss_of, network
from torch import nn

import fusedacc

F32 = torch.float32
STEPS, CLIP = 3, 0.05
SETTINGS = {"init_scale": 2.0**10, "growth_interval": 2}
INNER = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "sgd fused, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}
#: torch's fused SGD leaves garbage in its momentum when its first step is dropped.
REFERENCE = {**INNER, "sgd fused, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)}
SCALERS = {"manual, torch": torch.amp.GradScaler, "stock": torch.amp.GradScaler}


def overflowing(model: nn.Module, seed: int, bad: bool) -> torch.Tensor:
    loss = loss_of(model, seed)
    return loss * math.inf if bad else loss


def train(model, make, loop, bad=None, unscales=False, clips=False, windows=5, **options):
    """Run windows of STEPS micro-batches.

    Returns:
        The scale after each update, and the optimizer.
    """
    optimizer = make(list(model.parameters()))
    counted = loop == "counted"
    if loop != "stock":
        optimizer = fusedacc.AccumulatingOptimizer(optimizer, STEPS if counted else None, **options)
    scaler, scales = SCALERS.get(loop, fusedacc.amp.GradScaler)("cpu", **SETTINGS), []
    for seed in range(STEPS * windows):
        last, before = seed % STEPS == STEPS - 1, scaler.get_scale()
        loss = overflowing(model, seed, divmod(seed, STEPS) == bad)
        scaler.scale(loss if counted else loss / STEPS).backward()
        if not (counted or last):
            continue
        if unscales:
            scaler.unscale_(optimizer)
        if clips and last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer), scaler.update(), optimizer.zero_grad()
        assert last or scaler.get_scale() == before, "the scale has changed inside a window"
        scales += [scaler.get_scale()] if last else []
    return scales, optimizer


@pytest.mark.sweep
@pytest.mark.parametrize("bad", [None, (1, 0), (1, 1), (1, 2), (0, 0)])
@pytest.mark.parametrize("clips", ["no", "user", "wrapper", "wrapper, unscaled"])
@pytest.mark.parametrize("loop", ["counted", "manual, torch", "manual, ours"])
@pytest.mark.parametrize("inner", INNER)
def test_scaled_training_equals_stock(inner, loop, clips, bad):
    wanted, ours = network(), network()
    scales, _ = train(wanted, REFERENCE[inner], "stock", bad, clips != "no", clips != "no")
    options = {"max_grad_norm": CLIP} if "wrapper" in clips else {}
    unscales = clips in ("user", "wrapper, unscaled")
    found, optimizer = train(ours, INNER[inner], loop, bad, unscales, clips == "user", **options)
    assert found == scales
    assert_close_weights(ours, wanted, 3e-5, 3e-5)
    assert (int(optimizer.num_skipped), optimizer.num_updates) == (bad is not None, 5)
    assert not options or optimizer.grad_norm.isfinite()


def prepared(steps=2, inner="adamw fused", **options):
    model = network()
    optimizer = fusedacc.AccumulatingOptimizer(INNER[inner](list(model.parameters())), steps, **options)
    return model, optimizer, fusedacc.amp.GradScaler("cpu", **SETTINGS)


def micro_batch(model, optimizer, scaler, seed=0, bad=False) -> None:
    scaler.scale(overflowing(model, seed, bad)).backward()
    scaler.step(optimizer), scaler.update(), optimizer.zero_grad()


@pytest.mark.parametrize("unscales", [False, True])
def test_torchs_scaler_in_a_counted_loop_is_refused(unscales):
    model, optimizer, _ = prepared()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model)).backward()
    if unscales:
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"Use fusedacc\.amp\.GradScaler"):
        scaler.step(optimizer)
    optimizer.step()  # the refusal has left nothing behind
    assert optimizer.micro_step == 1


def test_wrong_calls_are_errors():
    model, optimizer, scaler = prepared(1)
    scaler.scale(loss_of(model)).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called since the last update"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="no closure"):
        scaler.step(optimizer, lambda: None)
    with pytest.raises(TypeError, match="must be an AccumulatingOptimizer"):
        scaler.flush(torch.optim.SGD(model.parameters()))
    model, optimizer, scaler = prepared(1)
    scaler.scale(loss_of(model)).backward()
    scaler.unscale_(optimizer.optimizer)
    for call in (scaler.step, scaler.unscale_):
        with pytest.raises(RuntimeError, match="unscaled twice"):
            call(optimizer)


def test_step_and_flush_refuse_scaled_gradients():
    model, optimizer, scaler = prepared(2)
    scaler.scale(loss_of(model)).backward()
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"call scaler\.flush\(optimizer\)"):
        optimizer.flush()
    scaler.scale(loss_of(model)).backward()
    with pytest.raises(RuntimeError, match=r"call scaler\.step\(optimizer\)"):
        optimizer.step()
    scaler.step(optimizer)
    assert optimizer.num_updates == 1


def test_a_new_scale_is_refused_inside_a_window():
    model, optimizer, scaler = prepared(2)
    scaler.scale(loss_of(model)).backward()
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="in mid-window"):
        scaler.update(2.0)
    scaler.update()
    scaler.scale(loss_of(model)).backward()
    scaler.step(optimizer)
    scaler.update(2.0)
    assert scaler.get_scale() == 2.0


def test_two_wrappers_with_different_windows_share_a_scaler():
    (first, short, _), (second, long, _) = prepared(1), prepared(2)
    scaler = fusedacc.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    for step in range(4):
        scaler.scale(overflowing(first, step, step == 0)).backward()
        scaler.step(short)
        scaler.scale(loss_of(second, step)).backward()
        scaler.step(long)
        scaler.update(), short.zero_grad(), long.zero_grad()
        # The overflow of `short` in step 0 lowers the scale when the window of `long` ends, in step 1.
        assert scaler.get_scale() == [1024.0, 512.0, 512.0, 1024.0][step]
    assert (int(short.num_skipped), int(long.num_skipped)) == (1, 0)


def test_other_optimizers_and_a_disabled_scaler_work_as_in_torch():
    model, twin = network(), network()
    for net, scaler in ((model, fusedacc.amp.GradScaler("cpu")), (twin, torch.amp.GradScaler("cpu"))):
        micro_batch(net, torch.optim.SGD(net.parameters(), lr=0.1), scaler)
    assert_equal_weights(model, twin)
    off = fusedacc.amp.GradScaler("cpu", enabled=False)
    model, optimizer, _ = prepared(2)
    for seed in range(2):
        off.scale(loss_of(model, seed)).backward()
        off.unscale_(optimizer)
        off.step(optimizer), off.update()
    off.flush(optimizer)
    assert optimizer.num_updates == 1


def backward(model, loss):
    loss.backward()


def assign_gradients(model, loss):
    for p, gradient in zip(model.parameters(), torch.autograd.grad(loss, model.parameters()), strict=True):
        p.grad = gradient


LATE = {
    "a weight after the backward": ("normalized", backward, F32, (3.0, 7.0)),
    "assigned gradients": ("mean", assign_gradients, F32, (None, None)),
    "create_graph": ("mean", lambda _, loss: loss.backward(create_graph=True), F32, (None, None)),
    "float64": ("normalized", backward, torch.float64, (3.0, 4.0)),
}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize(("reduction", "last", "dtype", "weights"), LATE.values(), ids=LATE)
def test_late_weights_and_assigned_gradients_are_unscaled(reduction, last, dtype, weights, unscales):
    """Compare with a disabled scaler. `last` runs the second backward."""
    ends = []
    for scaler in (fusedacc.amp.GradScaler("cpu", **SETTINGS), fusedacc.amp.GradScaler("cpu", enabled=False)):
        model = network(dtype)
        inner = INNER["adamw"](list(model.parameters()))
        optimizer = fusedacc.AccumulatingOptimizer(inner, 2, reduction=reduction)
        with optimizer.accumulate(weight=weights[0]):
            scaler.scale(loss_of(model, 0)).backward()
        scaler.step(optimizer), scaler.update()
        with optimizer.accumulate() as late:
            last(model, scaler.scale(loss_of(model, 1)))
            if weights[1] is not None:
                late.weight = weights[1]
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer), scaler.update()
        assert optimizer.num_updates == 1
        ends.append([p.grad for p in model.parameters()])
    for scaled, plain in zip(*ends, strict=True):
        torch.testing.assert_close(scaled, plain, rtol=8 * torch.finfo(dtype).eps, atol=0)


def test_unscaling_before_the_weight_is_set_is_refused():
    model, optimizer, scaler = prepared(1, reduction="normalized")
    with optimizer.accumulate() as late:
        scaler.scale(loss_of(model)).backward()
        with pytest.raises(RuntimeError, match="needs the weight"):
            scaler.unscale_(optimizer)
        late.weight = 2.0
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def test_a_scaler_can_be_pickled_and_copied():
    _, _, scaler = prepared(1)
    for twin in (pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)):
        assert twin.state_dict() == scaler.state_dict()
