"""The meter in whole loops: phases, kinds, and that it changes nothing."""

import contextlib
import csv
import functools
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from loops import LOW, loss_of, network, wrap
from torch import nn
from torch.optim import optimizer as hooks
from torch.testing._internal.two_tensor import TwoTensor

import fusedacc
from fusedacc.functional import prepare
from fusedacc.kernels import launch_events
from fusedacc.traffic import TrafficMeter, bytes_per_window, total

F32, BF16 = torch.float32, torch.bfloat16
STEPS = 8
MODULE = r"parameters must be a torch\.nn\.Module"


@pytest.fixture(autouse=True)
def threads_of_other_tests(monkeypatch):
    """Hide threads that earlier tests in this process have left."""
    everyone = threading.enumerate
    others = set(everyone()) - {threading.current_thread(), threading.main_thread()}
    monkeypatch.setattr(threading, "enumerate", lambda: [t for t in everyone() if t not in others])


def large(dtype: torch.dtype = F32) -> nn.Module:
    """Return a model whose matrices and vectors are much larger than its activations."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.Linear(256, 256)).to(dtype)


def loss(model: nn.Module, autocast: bool = False) -> torch.Tensor:
    x = torch.randn(2, 256, dtype=next(model.parameters()).dtype)
    with torch.autocast("cpu", BF16, enabled=autocast):
        return model(x).float().square().mean()


def stock_window(model: nn.Module, optimizer, autocast: bool = False) -> None:
    """Train a window. Autograd keeps float32 sums of bfloat16 parameters, which are cast at the update."""
    low = next(model.parameters()).dtype == BF16
    for p in model.parameters() if low else ():
        p.grad_dtype = F32
    for _ in range(STEPS):
        (loss(model, autocast) / STEPS).backward()
    for p in model.parameters() if low else ():
        gradient, p.grad = p.grad, None
        p.grad_dtype = BF16
        p.grad = gradient.to(BF16)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step(), optimizer.zero_grad()


def wrapped_window(model: nn.Module, optimizer, autocast: bool = False) -> None:
    for step in range(STEPS):
        loss(model, autocast).backward()
        if step == STEPS - 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(), optimizer.zero_grad()


def per_parameter(meter: TrafficMeter, model: nn.Module) -> dict[str, dict[str, float]]:
    found, elements = meter.as_dict()["by_phase_and_kind"], sum(p.numel() for p in model.parameters())
    return {phase: {kind: size / elements for kind, size in kinds.items()} for phase, kinds in found.items()}


@pytest.mark.parametrize(
    ("dtype", "autocast", "wrapped", "accumulate", "gradients_at_update"),
    [
        # stock float32: the first gradient is kept as it is, 7 are added; norm 4, clip 8, AdamW 4
        (F32, False, False, 7 * 12, 16),
        # fusedacc float32: the same; the second addition scales the first gradient
        (F32, False, True, 7 * 12, 16),
        # stock bfloat16: 8 casts of 6, 7 additions of 12; cast 6, norm 2, clip 4, AdamW 2
        (BF16, False, False, 8 * 6 + 7 * 12, 14),
        # fusedacc bfloat16: 6 to write the first, 7 additions of 10; norm 4, clip 8, cast 6, AdamW 2
        (BF16, False, True, 6 + 7 * 10, 20),
        # autocast: 8 casts by autograd on top
        (F32, True, False, 8 * 6 + 7 * 12, 16),
        (F32, True, True, 8 * 6 + 7 * 12, 16),
    ],
)
def test_a_window_equals_a_hand_count(dtype, autocast, wrapped, accumulate, gradients_at_update):
    model = large(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    window = wrapped_window if wrapped else stock_window
    if wrapped:
        optimizer = fusedacc.AccumulatingOptimizer(optimizer, gradient_accumulation_steps=STEPS)
    window(model, optimizer, autocast)  # creates the optimizer's state
    with TrafficMeter() as meter:
        window(model, optimizer, autocast)
    assert not meter.uncounted
    found = per_parameter(meter, model)
    size = dtype.itemsize
    product = BF16.itemsize if autocast else size
    close = pytest.approx
    # Under autocast the norm's gradients are float32 from the start.
    assert found["accumulate"]["gradients"] == close(accumulate, rel=0.004 if autocast else 1e-4)
    assert found["backward"]["gradients"] == close(8 * product, rel=0.01)  # each micro-gradient written once
    assert found["update"]["gradients"] == close(gradients_at_update, abs=0.01)
    assert found["update"]["optimizer"] == close(4 * size, abs=0.01)  # two states, read and written
    assert found["update"]["weights"] == close(2 * size, abs=0.01)
    options = {"loop": "fusedacc" if wrapped else "stock", "scale_is_one": not wrapped}
    accounted = bytes_per_window(dtype, BF16 if autocast else dtype, F32, STEPS, **options)
    counted = found["accumulate"]["gradients"] + found["backward"]["gradients"]
    assert counted / STEPS == close(total(accounted), rel=0.01), "the accounting differs"


@pytest.mark.parametrize("dtype", [F32, LOW])
@pytest.mark.parametrize("steps", [None, 2])
def test_the_meter_changes_no_result_and_no_path(dtype, steps):
    def train(metered: bool):
        model = network(dtype)
        optimizer = wrap(model, steps)
        meter = TrafficMeter()
        for seed in range(6):
            with meter if metered else contextlib.nullcontext():
                loss_of(model, seed).backward()
                optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()], optimizer.explain(), meter

    plain, plain_path, _ = train(False)
    counted, path, meter = train(True)
    assert all(map(torch.equal, plain, counted))
    assert path == plain_path
    assert meter.total_bytes > 0


def test_the_user_names_the_phases_of_a_manual_loop():
    weight = nn.Parameter(torch.zeros(1000, dtype=BF16))
    total_gradient = torch.zeros(1000)
    with TrafficMeter() as meter:
        (weight * 2).sum().backward()
        with meter.phase("accumulate"):
            total_gradient += weight.grad.float() * 0.5
        with meter.phase("evaluation"), meter.phase("inner"):
            weight.detach().sum()
    phases = meter.as_dict()["by_phase_and_kind"]
    assert phases["accumulate"] == {"gradients": 1000 * (2 + 4 + 4 + 4 + 4 + 4 + 4)}
    assert phases["inner"]["weights"] == 2000
    assert "evaluation" not in phases


def test_after_an_exception_in_a_step_nothing_is_an_update():
    weight = nn.Parameter(torch.zeros(1000))

    class Broken(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            raise RuntimeError("broken")

    optimizer = Broken([weight], lr=0.1)
    with TrafficMeter() as meter:
        (weight * 1.0).sum().backward()
        with pytest.raises(RuntimeError, match="broken"):
            optimizer.step()
        (weight * 1.0).sum().backward()
        weight.detach().mul(2)
    found = meter.as_dict()["by_phase_and_kind"]
    assert found["forward"]["weights"] == 3 * 4000
    assert "update" not in found


def test_other_threads_are_named_and_have_their_own_meters(tmp_path):
    """A `TorchDispatchMode` receives only the operators of the thread that entered it."""
    x, before = torch.randn(100), threading.getprofile()
    meters = []

    def add(own: bool = False) -> None:
        with TrafficMeter() if own else contextlib.nullcontext() as meter:
            meters.append(meter)
            x.add(1)

    with ThreadPoolExecutor(1, "early") as pool:
        pool.submit(add).result()
        with TrafficMeter() as meter:
            x.add(1)
            assert (meter.uncounted_threads, meter.total_bytes) == (["early_0"], 800)
            for name in ("late", "later"):
                thread = threading.Thread(target=add, name=name)
                thread.start()
                thread.join()
            pool.submit(add, own=True).result()
        assert (meters[-1].total_bytes, meter.total_bytes) == (800, 800)
        assert meters[-1].uncounted_threads == ["MainThread"]
        names = ["early_0", "late", "later"]
        assert meter.uncounted_threads == meter.as_dict()["uncounted_threads"] == names
        assert "NOT COUNTED: anything that 3 other threads ran: early_0, late, later" in meter.table()
        meter.to_csv(tmp_path / "traffic.csv")
        with (tmp_path / "traffic.csv").open(newline="") as file:
            rows = [row["op"] for row in csv.DictReader(file) if row["phase"] == "uncounted"]
        assert rows == [f"thread {name}" for name in names]
        with meter:
            meter.reset()
            x.add(1)
        assert meter.uncounted_threads == ["early_0"]
    assert threading.getprofile() is before
    with TrafficMeter() as meter:
        x.add(1)
    assert (meter.uncounted_threads, "NOT COUNTED" in meter.table()) == ([], False)


def test_the_autograd_engines_threads_are_counted():
    """The engine uses another thread for backwards nested deeper than 60, and for a GPU."""
    threads, x = set(), torch.randn(100)

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx, leaf, depth):
            ctx.depth = depth
            return leaf.view_as(leaf)

        @staticmethod
        def backward(ctx, gradient):
            if ctx.depth:
                with torch.enable_grad():
                    Nested.apply(torch.ones(1, requires_grad=True), ctx.depth - 1).backward()
            elif threading.get_ident() not in threads:
                threads.add(threading.get_ident())
                x.add(1)
                launch_events.launched("triton::scale_accumulate", [x], [x], (1.0, 1.0), [True])
            return gradient, None

    with TrafficMeter() as meter:
        Nested.apply(torch.ones(1, requires_grad=True), 70).backward()
    assert threads
    assert threading.get_ident() not in threads
    counted = meter.as_dict()["by_op"]
    assert counted["aten::add"]["total_bytes"] == counted["triton::scale_accumulate"]["total_bytes"] == 800
    assert meter.uncounted_threads == []


def test_figures_agree_with_each_other(tmp_path):
    model = large()
    optimizer = torch.optim.AdamW(model.parameters())
    with TrafficMeter(optimizer) as meter:
        stock_window(model, optimizer)
        torch.linalg.qr(torch.randn(3, 3))
    found = meter.as_dict()
    assert found["total_bytes"] == meter.total_bytes == found["read_bytes"] + found["written_bytes"]
    for name in ("by_phase", "by_kind", "by_device"):
        assert sum(found[name].values()) == meter.total_bytes, name
    assert sum(op["total_bytes"] for op in found["by_op"].values()) == found["total_bytes"]
    assert sum(op["calls"] for op in found["by_op"].values()) == found["calls"] == meter.calls
    assert found["by_device"].keys() == {"cpu"}
    for phase, kinds in found["by_phase_and_kind"].items():
        assert sum(kinds.values()) == found["by_phase"][phase]
    path = tmp_path / "traffic.csv"
    meter.to_csv(path)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    counted = [row for row in rows if row["phase"] != "uncounted"]
    assert sum(int(r["read_bytes"]) + int(r["written_bytes"]) for r in counted) == meter.total_bytes
    assert [r["op"] for r in rows if r["phase"] == "uncounted"] == ["aten.linalg_qr.default"]
    for words in ("compulsory bytes: each operand of an operator once", "other operators", "100.0%"):
        assert words in meter.table(2)


def test_it_keeps_no_tensor_alive():
    model = large()
    optimizer = wrap(model, 2)
    with TrafficMeter(model) as meter:
        loss(model).backward()
        optimizer.step()
        last = weakref.ref(next(model.parameters()))
        activations = torch.randn(10)
        activation = weakref.ref(activations.mul_(2))
        del activations
        assert activation() is None
        optimizer.close()
    del model, optimizer
    gc.collect()
    assert last() is None
    assert meter.as_dict()["by_kind"]["weights"] > 0


def test_reused_memory_gets_its_new_kind():
    """Memory of a gradient becomes an activation, or a batch that was loaded outside the meter."""
    weight = nn.Parameter(torch.zeros(5000))
    meter = TrafficMeter([weight])
    for _ in range(20):
        x = torch.randn(5000)
        with meter:
            (x * weight).sum().backward()
            weight.grad = None
            torch.zeros(5000).add_(1)
        del x
    found = meter.as_dict()["by_phase_and_kind"]
    assert "update" not in found
    assert found["forward"]["weights"] == found["backward"]["gradients"] == 20 * 20000
    assert found["forward"]["other"] >= 20 * 3 * 20000


def test_bad_arguments():
    meter = TrafficMeter()
    for call, error, message in (
        *((functools.partial(TrafficMeter, bad), TypeError, MODULE) for bad in (3, "x", torch.zeros(2), [3])),
        (lambda: meter.phase(3).__enter__(), TypeError, "name must be a string"),
        (lambda: meter.phase("").__enter__(), ValueError, "name must not be empty"),
        (lambda: meter.table(0), ValueError, "rows must be at least 1"),
    ):
        with pytest.raises(error, match=message):
            call()
    assert "total" in meter.table()


def test_in_inference_mode_no_hook_remains_and_steps_are_updates():
    class Mixed(torch.optim.SGD):
        def step(self, closure=None):
            with torch.inference_mode():
                torch.nn.functional.linear(self.x, self.x)
                self.x.mul(2)

    before = len(hooks._global_optimizer_pre_hooks)
    optimizer = Mixed([nn.Parameter(torch.zeros(3))], lr=0.1)
    optimizer.x = torch.randn(3, 3)
    with TrafficMeter() as meter:
        optimizer.step()
    assert len(hooks._global_optimizer_pre_hooks) == before
    assert set(meter.as_dict()["by_phase"]) == {"update"}
    with meter, pytest.raises(RuntimeError, match="is on already"), meter:
        pass


def test_a_step_inside_a_hook_is_an_update():
    weight = nn.Parameter(torch.randn(1000))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)

    def hook(p):
        optimizer.step(), optimizer.zero_grad()

    weight.register_post_accumulate_grad_hook(hook)
    (weight * 2).sum().backward()
    with TrafficMeter(optimizer) as meter:
        (weight * 2).sum().backward()
    assert meter.as_dict()["by_phase_and_kind"]["update"]["weights"] == 8000
    assert "accumulate" not in meter.as_dict()["by_phase"]


def test_a_backward_that_was_compiled_before_is_uncounted():
    compiled = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.GELU()), backend="aot_eager")
    x = torch.randn(4, 8)
    compiled(x).sum().backward()
    loss = compiled(x).sum()
    with TrafficMeter() as meter:
        loss.backward()
    assert any("CompiledFunctionBackward" in name for name in meter.uncounted)


def test_operators_without_a_rule_are_named():
    weight = nn.Parameter(TwoTensor(torch.zeros(1000), torch.zeros(1000)))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with TrafficMeter(optimizer) as meter:
        (weight * 2).sum().backward()
        optimizer.step()
        torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)]) * 2
        torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (torch.randn(3),))
    assert meter.as_dict()["by_phase_and_kind"]["update"]["weights"] == 2 * 8000
    assert len(meter.uncounted) > 1
    assert "cond" in meter.uncounted
    with torch._subclasses.FakeTensorMode():
        plan = prepare([torch.randn(10)], backend="cpu")
        with TrafficMeter() as meter:
            plan([torch.randn(10)], 0.5)
    assert "fusedacc.accumulate_prepared_.default" in meter.uncounted
