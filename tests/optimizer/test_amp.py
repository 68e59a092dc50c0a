"""Loss scaling: torch's scaler in the manual loop, ours in both, against stock's scaler on whole windows."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from loops import loss_of, network
from torch import nn

import fusedacc
from fusedacc.traffic import TrafficMeter

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
STEPS = 3
SETTINGS = {"init_scale": 2.0**10, "growth_interval": 2}
INNER = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "sgd fused, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}
#: torch's fused SGD leaves garbage in its momentum when its first step is dropped.
REFERENCE = {**INNER, "sgd fused, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)}


def overflowing(model: nn.Module, seed: int, bad: bool) -> torch.Tensor:
    loss = loss_of(model, seed)
    return loss * math.inf if bad else loss


def stock(model, make, windows, bad, unscales=False, clip=None):
    """float32 parameters, torch's own loop. Yields the scale after each update."""
    optimizer, scaler = make(list(model.parameters())), torch.amp.GradScaler("cpu", **SETTINGS)
    scales = []
    for window in range(windows):
        for step in range(STEPS):
            seed = STEPS * window + step
            scaler.scale(overflowing(model, seed, (window, step) == bad) / STEPS).backward()
        if unscales:
            scaler.unscale_(optimizer)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def counted(model, make, windows, bad, unscales=False, clip=None, clips_itself=False):
    options = {"max_grad_norm": clip} if clips_itself else {}
    optimizer = fusedacc.AccumulatingOptimizer(make(list(model.parameters())), STEPS, **options)
    scaler = fusedacc.amp.GradScaler("cpu", **SETTINGS)
    scales = []
    for window in range(windows):
        for step in range(STEPS):
            before = scaler.get_scale()
            seed = STEPS * window + step
            scaler.scale(overflowing(model, seed, (window, step) == bad)).backward()
            if unscales:
                scaler.unscale_(optimizer)
                if clip and optimizer.will_update and not clips_itself:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step < STEPS - 1:
                assert scaler.get_scale() == before, "the scale has changed inside a window"
        scales.append(scaler.get_scale())
    return scales, optimizer


def manual(
    model, make, windows, bad, unscales=False, clip=None, kind=torch.amp.GradScaler, clips_itself=False
):
    options = {"max_grad_norm": clip} if clips_itself else {}
    optimizer = fusedacc.AccumulatingOptimizer(make(list(model.parameters())), **options)
    scaler = kind("cpu", **SETTINGS)
    scales = []
    for window in range(windows):
        for step in range(STEPS):
            seed = STEPS * window + step
            scaler.scale(overflowing(model, seed, (window, step) == bad) / STEPS).backward()
        if unscales:
            scaler.unscale_(optimizer)
            if clip and not clips_itself:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, optimizer


def assert_close(ours: nn.Module, wanted: nn.Module, tolerance: float = 3e-5) -> None:
    for p, want in zip(ours.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(p, want, rtol=tolerance, atol=tolerance)


@pytest.mark.sweep
@pytest.mark.parametrize("bad", [None, (1, 0), (1, 1), (1, 2), (0, 0)])
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("inner", INNER)
class TestAgainstStock:
    def test_ours_in_a_counted_loop(self, inner, unscales, bad):
        wanted, ours = network(), network()
        clip = 0.05 if unscales else None
        scales = stock(wanted, REFERENCE[inner], 5, bad, unscales, clip)
        found, optimizer = counted(ours, INNER[inner], 5, bad, unscales, clip)
        assert found == scales
        assert_close(ours, wanted)
        assert int(optimizer.num_skipped) == (bad is not None)
        assert optimizer.num_updates == 5

    @pytest.mark.parametrize("kind", [torch.amp.GradScaler, fusedacc.amp.GradScaler])
    def test_either_in_a_manual_loop(self, inner, unscales, bad, kind):
        wanted, ours = network(), network()
        clip = 0.05 if unscales else None
        scales = stock(wanted, REFERENCE[inner], 5, bad, unscales, clip)
        found, optimizer = manual(ours, INNER[inner], 5, bad, unscales, clip, kind)
        assert found == scales
        assert_close(ours, wanted)
        assert int(optimizer.num_skipped) == (bad is not None)

    def test_the_wrapper_clips(self, inner, unscales, bad):
        wanted = network()
        scales = stock(wanted, REFERENCE[inner], 5, bad, True, 0.05)
        for loop in (counted, manual):
            ours = network()
            found, optimizer = loop(ours, INNER[inner], 5, bad, unscales, 0.05, clips_itself=True)
            assert found == scales
            assert_close(ours, wanted)
            assert optimizer.grad_norm.isfinite()


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("inner", INNER)
def test_low_precision_parameters(inner, dtype):
    """Scaled float16 gradients are summed in float32 and unscaled before they are cast: against float32."""
    wanted, ours = network(dtype), network(dtype)
    plain = fusedacc.AccumulatingOptimizer(INNER[inner](list(wanted.parameters())), STEPS)
    for seed in range(4 * STEPS):
        loss_of(wanted, seed).backward()
        plain.step()
        plain.zero_grad()
    found, optimizer = counted(ours, INNER[inner], 4, None)
    assert_close(ours, wanted, 2e-2)
    assert int(optimizer.num_skipped) == 0
    assert found[-1] == 2.0**12


def test_torchs_scaler_in_a_counted_loop_is_refused():
    for unscales in (False, True):
        model = network()
        optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), 2)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match=r"Use fusedacc\.amp\.GradScaler"):
            scaler.step(optimizer)
        optimizer.step()  # the refusal has left nothing behind
        assert optimizer.micro_step == 1


def prepared(steps=2, inner="adamw fused", **options):
    model = network()
    optimizer = fusedacc.AccumulatingOptimizer(INNER[inner](list(model.parameters())), steps, **options)
    return model, optimizer, fusedacc.amp.GradScaler("cpu", **SETTINGS)


def test_misuse_is_named():
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


def test_unscaling_the_inner_optimizer_is_refused():
    model, optimizer, scaler = prepared(1)
    scaler.scale(loss_of(model)).backward()
    scaler.unscale_(optimizer.optimizer)
    for call in (scaler.step, scaler.unscale_):
        with pytest.raises(RuntimeError, match="unscaled twice"):
            call(optimizer)


def test_a_scaler_that_is_passed_by_is_missed():
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


def test_a_last_window_that_is_not_full():
    model, twin = network(), network()
    make = INNER["adamw fused"]
    optimizer = fusedacc.AccumulatingOptimizer(make(list(model.parameters())), 4)
    plain = fusedacc.AccumulatingOptimizer(make(list(twin.parameters())), 4)
    scaler = fusedacc.amp.GradScaler("cpu", **SETTINGS)
    for seed in range(3):
        scaler.scale(loss_of(model, seed)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        loss_of(twin, seed).backward()
        plain.step()
    scaler.flush(optimizer)
    scaler.update()
    plain.flush()
    assert_close(model, twin)
    scaler.flush(optimizer)  # an empty window: nothing
    scaler.update()
    assert optimizer.num_updates == 1
    with pytest.raises(TypeError, match="must be an AccumulatingOptimizer"):
        scaler.flush(torch.optim.SGD(model.parameters()))


def test_a_new_scale_waits_for_the_end_of_the_window():
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


def test_two_wrappers_of_different_windows_share_a_scaler():
    first, second = network(), network()
    make = INNER["adamw fused"]
    short = fusedacc.AccumulatingOptimizer(make(list(first.parameters())), 1)
    long = fusedacc.AccumulatingOptimizer(make(list(second.parameters())), 2)
    scaler = fusedacc.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    for step in range(4):
        loss = loss_of(first, step) * (math.inf if step == 0 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(short)
        scaler.scale(loss_of(second, step)).backward()
        scaler.step(long)
        scaler.update()
        for optimizer in (short, long):
            optimizer.zero_grad()
        # What the short one found in step 0 counts when the long one's window ends, in step 1.
        assert scaler.get_scale() == [1024.0, 512.0, 512.0, 1024.0][step]
    assert (int(short.num_skipped), int(long.num_skipped)) == (1, 0)


def test_other_optimizers_and_a_disabled_scaler_are_torchs():
    model, twin = network(), network()
    plain, reference = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    scaler, torchs = fusedacc.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")
    for m, o, s in ((model, plain, scaler), (twin, reference, torchs)):
        s.scale(loss_of(m)).backward()
        s.step(o)
        s.update()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    off = fusedacc.amp.GradScaler("cpu", enabled=False)
    model, optimizer, _ = prepared(2)
    for seed in range(2):
        off.scale(loss_of(model, seed)).backward()
        off.unscale_(optimizer)
        off.step(optimizer)
        off.update()
    off.flush(optimizer)
    assert optimizer.num_updates == 1


@pytest.mark.parametrize("inner", INNER)
def test_saved_and_restored_between_windows(inner):
    def build():
        model = network()
        optimizer = fusedacc.AccumulatingOptimizer(
            INNER[inner](list(model.parameters())), 2, max_grad_norm=0.1
        )
        return model, optimizer, fusedacc.amp.GradScaler("cpu", **SETTINGS)

    def run(model, optimizer, scaler, seeds):
        for seed in seeds:
            scaler.scale(overflowing(model, seed, seed == 3)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    straight = build()
    run(*straight, range(9))
    before, after = build(), build()
    run(*before, range(5))  # in mid-window
    after[0].load_state_dict(before[0].state_dict())
    after[1].load_state_dict(copy.deepcopy(before[1].state_dict()))
    after[2].load_state_dict(before[2].state_dict())
    run(*after, range(5, 9))
    assert all(map(torch.equal, straight[0].parameters(), after[0].parameters()))
    assert straight[2].get_scale() == after[2].get_scale()
    assert int(straight[1].num_skipped) == int(after[1].num_skipped) == 1


def test_scaled_and_clipped_update_moves_no_more_than_a_clipped_one():
    torch.manual_seed(0)
    model = nn.Linear(300, 300)
    optimizer = fusedacc.AccumulatingOptimizer(
        torch.optim.AdamW(model.parameters(), fused=True), 1, max_grad_norm=0.01
    )
    scaler = fusedacc.amp.GradScaler("cpu")
    for _ in range(2):
        scaler.scale(model(torch.randn(2, 300)).square().mean()).backward()
        with TrafficMeter(model) as meter:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    elements = sum(p.numel() for p in model.parameters())
    found = meter.as_dict()["by_phase_and_kind"]["update"]["gradients"] / elements
    assert found == pytest.approx(4 + 8, abs=0.05), meter.table()


def scaled_window(reduction, last, unscales=True, dtype=F32, weights=(None, None), inner="adamw"):
    """Two micro-batches with a loss scale and without; `last` does the second one's backward."""
    ends = []
    for scaler in (fusedacc.amp.GradScaler("cpu", **SETTINGS), fusedacc.amp.GradScaler("cpu", enabled=False)):
        model = network(dtype)
        optimizer = fusedacc.AccumulatingOptimizer(
            INNER[inner](list(model.parameters())), 2, reduction=reduction
        )
        with optimizer.accumulate(weight=weights[0]):
            scaler.scale(loss_of(model, 0)).backward()
        scaler.step(optimizer)
        scaler.update()
        with optimizer.accumulate() as micro_batch:
            last(model, scaler.scale(loss_of(model, 1)))
            if weights[1] is not None:
                micro_batch.weight = weights[1]
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.num_updates == 1
        ends.append([p.grad for p in model.parameters()])
    for scaled, plain in zip(*ends, strict=True):
        torch.testing.assert_close(scaled, plain, rtol=8 * torch.finfo(dtype).eps, atol=0)


def backward(model, loss):
    loss.backward()


def by_hand(model, loss):
    parameters = list(model.parameters())
    for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        p.grad = gradient


@pytest.mark.parametrize("unscales", [False, True])
class TestWhatComesLateIsUnscaled:
    def test_a_weight_after_the_backward(self, unscales):
        scaled_window("normalized", backward, unscales, weights=(3.0, 7.0))

    def test_gradients_put_there_by_hand(self, unscales):
        scaled_window("mean", by_hand, unscales)

    @pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
    def test_a_gradient_with_its_graph(self, unscales):
        scaled_window("mean", lambda model, loss: loss.backward(create_graph=True), unscales)

    def test_float64_sums_keep_their_digits(self, unscales):
        scaled_window("normalized", backward, unscales, torch.float64, weights=(3.0, 4.0))


def test_unscaling_before_the_weight_is_set_is_refused():
    model, optimizer, scaler = prepared(1, reduction="normalized")
    with optimizer.accumulate() as micro_batch:
        scaler.scale(loss_of(model)).backward()
        with pytest.raises(RuntimeError, match="needs the weight"):
            scaler.unscale_(optimizer)
        micro_batch.weight = 2.0
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def test_no_norm_of_an_earlier_update_is_shown():
    model, optimizer, scaler = prepared(1)
    for unscales in (False, True):
        scaler.scale(loss_of(model)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert (optimizer.grad_norm is None) is unscales


def test_a_restored_window_ends_before_another_loss_is_scaled():
    model, optimizer, scaler = prepared(2)
    scaler.scale(loss_of(model)).backward()
    scaler.step(optimizer)
    scaler.update()
    _, restored, other = prepared(2)
    restored.load_state_dict(optimizer.state_dict())
    other.load_state_dict(scaler.state_dict())
    other.flush(restored)
    other.update()
    assert (restored.num_updates, other.get_scale()) == (1, 2.0**10)


def test_a_scaler_is_pickled_and_copied():
    _, _, scaler = prepared(1)
    for twin in (pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)):
        assert twin.state_dict() == scaler.state_dict()
