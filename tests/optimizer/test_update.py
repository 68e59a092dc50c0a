"""Clipping, skipped updates and the norm, compared with stock's separate passes."""

import copy
import math

import pytest
import torch
from loops import (
    NoHostRead,
    assert_close_weights,
    assert_equal_weights,
    cleared_micro_batch,
    identical,
    loss_of,
    micro_batch,
    network,
    scalar,
    wrap,
    wrap_momentum,
)
from torch import nn

import fusedacc
from fusedacc.optimizer import update
from fusedacc.optimizer.update import EPSILON, clip_on_host
from fusedacc.traffic import TrafficMeter

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
INNER = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=0.05, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd fused, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "sgd fused, damped": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, fused=True),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}
FUSED = [name for name in INNER if "fused" in name]
TOLERANCE = {F64: 1e-6, F32: 2e-5, BF16: 2e-2, F16: 4e-3}


def made(model, inner, steps=None, **options):
    return fusedacc.AccumulatingOptimizer(INNER[inner](list(model.parameters())), steps, **options)


def train_stock(model, make, steps, windows, max_norm, norm_type):
    """Train with float32 or float64 sums and one clip per update, then cast to the parameter's dtype."""
    optimizer, norms = make(list(model.parameters())), []
    low = next(model.parameters()).dtype in (BF16, F16)
    for window in range(windows):
        sums = [torch.zeros_like(p, dtype=F32 if low else p.dtype) for p in model.parameters()]
        for seed in range(window * steps, (window + 1) * steps):
            loss_of(model, seed).backward()
            for total, p in zip(sums, model.parameters(), strict=True):
                total += p.grad.to(total.dtype) / steps
                p.grad = None
        norms.append(torch.linalg.vector_norm(torch.stack([t.norm(norm_type) for t in sums]), norm_type))
        clip = min(1.0, max_norm / (norms[-1].item() + 1e-6))
        for total, p in zip(sums, model.parameters(), strict=True):
            p.grad = (total * clip).to(p.dtype)
        optimizer.step(), optimizer.zero_grad()
    return norms


def train_wrapped(model, inner, steps, windows, counted=True, **options):
    optimizer, norms = made(model, inner, steps if counted else None, **options), []
    for seed in range(steps * windows):
        (loss_of(model, seed) / (1 if counted else steps)).backward()
        last = seed % steps == steps - 1
        if counted or last:
            optimizer.step()
        if last:
            norms.append(optimizer.grad_norm)
            optimizer.zero_grad()
    return norms, optimizer


@pytest.mark.sweep
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.05, 1e6])
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("dtype", [F32, BF16, F64])
@pytest.mark.parametrize("inner", INNER)
def test_clipping_equals_stock(inner, dtype, counted, max_norm, norm_type):
    stock, ours = network(dtype), network(dtype)
    wanted = train_stock(stock, INNER[inner], 3, 4, max_norm, norm_type)
    options = {"max_grad_norm": max_norm, "norm_type": norm_type}
    norms, optimizer = train_wrapped(ours, inner, 3, 4, counted, **options)
    tolerance = TOLERANCE[dtype]
    for norm, want in zip(norms, wanted, strict=True):
        assert norm.ndim == 0
        torch.testing.assert_close(norm.double(), want.double(), rtol=tolerance, atol=tolerance)
    assert_close_weights(ours, stock, tolerance, tolerance)
    assert optimizer.num_skipped == 0


def test_a_clipping_factor_from_the_host_has_the_bits_of_torchs_operators():
    generator = torch.Generator().manual_seed(0)
    norms = torch.cat([10.0 ** torch.empty(2000).uniform_(-33, 33, generator=generator), torch.tensor([0.0])])
    for norm in norms:
        for limit in (1.0, 0.1, 2.5, 0.7 * float(norm) + 1e-20, 1e-29):
            wanted, found = (limit / (norm + EPSILON)).clamp(max=1.0), clip_on_host(norm, limit)
            assert found == wanted or (found is None and not (1e-30 < norm < 1e30 and wanted > 1e-30))
    for unusual in (math.inf, math.nan, 1e-3):
        assert clip_on_host(torch.tensor(unusual, dtype=F64 if unusual == 1e-3 else F32), 1.0) is None


def poison(model: nn.Module, value: float) -> None:
    handle = model[0].weight.register_hook(lambda g: torch.full_like(g, value))
    loss_of(model, 99).backward()
    handle.remove()


def snapshot(model, optimizer):
    return copy.deepcopy((list(model.parameters()), optimizer.optimizer.state_dict()["state"]))


@pytest.mark.sweep
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("inner", INNER)
def test_an_update_that_is_not_finite_is_skipped(inner, dtype, counted, value):
    model = network(dtype)
    optimizer = made(model, inner, 2 if counted else None, skip_nonfinite=True)

    def window(bad):
        for index in range(2):
            if bad and index == 1:
                poison(model, value)
            else:
                loss_of(model, index).backward()
            if counted or index == 1:
                optimizer.step()
        optimizer.zero_grad()

    window(bad=False)
    before = snapshot(model, optimizer)
    window(bad=True)
    assert identical(before, snapshot(model, optimizer))
    assert int(optimizer.num_skipped) == 1
    assert optimizer.num_updates == 2
    assert optimizer.has_updated
    window(bad=False)
    assert int(optimizer.num_skipped) == 1
    assert not torch.equal(before[0][0], next(model.parameters()))


@pytest.mark.parametrize("inner", FUSED)
def test_a_skipped_first_update_changes_nothing(inner):
    """torch's fused SGD would leave an uninitialized momentum buffer."""
    model, twin = network(), network()
    optimizer, reference = (made(net, inner, skip_nonfinite=True) for net in (model, twin))
    poison(model, math.nan)
    optimizer.step(), optimizer.zero_grad()
    for seed in range(3):
        for m, o in ((model, optimizer), (twin, reference)):
            cleared_micro_batch(m, o, seed)
    assert_equal_weights(model, twin)
    assert (int(optimizer.num_skipped), int(reference.num_skipped)) == (1, 0)


@pytest.mark.parametrize("inner", [name for name in FUSED if "adam" in name])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_window_reads_nothing_to_the_host(inner, dtype, monkeypatch):
    monkeypatch.setattr(update, "clip_on_host", lambda *_: None)  # as on a GPU
    model = network(dtype)
    optimizer = made(model, inner, 2, max_grad_norm=0.1, skip_nonfinite=True)
    for seed in range(2):
        micro_batch(model, optimizer, seed)
    with NoHostRead():
        for seed in range(4):
            cleared_micro_batch(model, optimizer, seed)
        with pytest.raises(AssertionError, match="waits for the device"):
            torch.ones(()).item()
    assert optimizer.num_updates == 3


def wide(dtype=F32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300)).to(dtype)


@pytest.mark.parametrize(
    ("inner", "dtype", "steps", "gradient_bytes"),
    [
        ("adamw fused", F32, None, 4 + 8),  # norm, and the kernel that scales, writes back
        ("adam foreach", F32, None, 4 + 8 + 4 + 4),  # norm, one pass, lerp and addcmul read
        ("adamw fused", BF16, None, 4 + 6 + 2),  # norm, cast and scale in one, the kernel
        ("adamw fused", F32, 2, 4 + 8),
        ("adam foreach", F32, 2, 4 + 8 + 4 + 4),
        ("adamw fused", BF16, 2, 4 + 6 + 2),
    ],
)
def test_gradient_bytes_at_the_update(inner, dtype, steps, gradient_bytes):
    model = wide(dtype)
    optimizer = made(model, inner, steps, max_grad_norm=0.01)
    x = torch.randn(2, 300, dtype=dtype)
    for _ in range(4):
        with TrafficMeter(model) as meter:  # from the backward on: it learns what holds gradients
            model(x).float().square().mean().backward()
            optimizer.step()
        optimizer.zero_grad()
    assert optimizer.has_updated
    elements = sum(p.numel() for p in model.parameters())
    assert not meter.uncounted
    found = meter.as_dict()["by_phase_and_kind"]["update"]["gradients"] / elements
    assert found == pytest.approx(gradient_bytes, abs=0.05), meter.table()


def test_a_closure_in_a_manual_loop_is_clipped():
    stock, ours = network(), network()
    reference = torch.optim.SGD(stock.parameters(), lr=0.1, momentum=0.9)
    optimizer = wrap_momentum(ours, max_grad_norm=0.01)

    def evaluate(model, each):
        each.zero_grad()
        loss = loss_of(model, 1)
        loss.backward()
        if each is reference:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        return loss

    for _ in range(3):
        reference.step(lambda: evaluate(stock, reference))
        optimizer.step(lambda: evaluate(ours, optimizer))
    assert_close_weights(ours, stock, 1e-5, 1e-7)
    with pytest.raises(RuntimeError, match="skip_nonfinite=True does not go with a closure"):
        wrap(network(), skip_nonfinite=True).step(lambda: None)


MASTERS = {"max_grad_norm": 1.0, "master_weights": True}
EXPLAINED = [
    ("adamw fused", F32, {}, "update: then AdamW; a loss scale or device weights would be folded in"),
    ("adamw fused", BF16, {}, "update: cast to the dtype of p.grad, then AdamW;"),
    ("adamw fused", F32, {"max_grad_norm": 0.5}, "inside AdamW's fused kernel; p.grad is read for the norm"),
    ("adamw fused", BF16, {"max_grad_norm": 2.0, "norm_type": math.inf}, "inf norm 2 in the pass that casts"),
    ("sgd", F32, {"skip_nonfinite": True}, "SGD does not scale by itself; dropping waits for the device"),
    ("adamw fused", BF16, MASTERS, "fused kernel; p.grad is read for the norm; on float32 masters"),
]


@pytest.mark.parametrize(("inner", "dtype", "options", "text"), EXPLAINED)
def test_explain_describes_the_update(inner, dtype, options, text):
    model = network(dtype)
    assert text in made(model, inner, 2, **options).explain()


@pytest.mark.parametrize("reduction", ["mean", "normalized"])
def test_a_scale_known_at_the_end_of_the_window_adds_no_pass(reduction):
    """A window that ends early has one, and so have late weights."""
    model = wide()
    optimizer = made(model, "adamw fused", 4, reduction=reduction, max_grad_norm=1e9)
    for _ in range(2):
        with TrafficMeter(model) as meter:
            for _ in range(3):
                with optimizer.accumulate(weight=2.0 if reduction == "normalized" else None):
                    model(torch.randn(2, 300)).square().mean().backward()
                optimizer.step()
            optimizer.flush()
        optimizer.zero_grad()
    elements = sum(p.numel() for p in model.parameters())
    found = meter.as_dict()["by_phase_and_kind"]["update"]["gradients"] / elements
    assert found == pytest.approx(4 + 8, abs=0.05), meter.table()


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("done", "options"), [(1, {}), (2, {"max_grad_norm": 0.01})])
def test_a_gradient_left_by_an_update_is_not_counted(dtype, done, options):
    """That of a bfloat16 parameter is a cast, not the accumulator."""
    model = network(dtype)
    optimizer = wrap(model, 2, **options)
    for seed in range(done):
        micro_batch(model, optimizer, seed)
    optimizer.flush()
    left = [p.grad for p in model.parameters()]
    assert None not in left
    optimizer.step()
    assert (optimizer.num_updates, optimizer.micro_step) == (1, 0)
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), left, strict=True))


def test_gradients_that_a_clipped_update_has_used_do_not_count_again():
    """Without `zero_grad()`."""
    weight, optimizer = scalar(2, max_grad_norm=10.0)
    for _ in range(4):
        weight.backward()
        optimizer.step()
    assert weight.item() == -2
