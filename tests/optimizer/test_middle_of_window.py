"""Micro-batches inside a window, which the engine handles without Python."""

import copy
import functools
import sys
from collections import UserDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loops import Failure, fail, failing, scalar, with_backward
from torch import nn

import fusedacc
from fusedacc.amp import GradScaler
from fusedacc.kernels import native_module

STEPS = 6
needs_native = pytest.mark.skipif(native_module.module() is None, reason=f"{native_module.why_not()}")
CLIPPED = {"max_grad_norm": 1e6}
PACKAGE = str(Path(fusedacc.__file__).parent)


class Training:
    """A loop with windows of `STEPS` micro-batches, counted or manual."""

    def __init__(self, counted: bool = True, with_model: bool = False, **options) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        inner = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        options["model"] = self.model if with_model else None
        self.opt = fusedacc.AccumulatingOptimizer(inner, STEPS if counted else None, **options)
        self.inputs = torch.randn(4 * STEPS, 5, 4)
        self.number = 0

    def loss(self) -> torch.Tensor:
        self.number += 1
        return self.model(self.inputs[self.number - 1]).square().mean()

    def micro_batch(self) -> None:
        self.loss().backward()
        self.opt.step(), self.opt.zero_grad()


def python_calls(work: Callable[[], object]) -> list[str]:
    """Return the functions of the package that Python calls."""
    called: list[str] = []

    def note(frame, event, argument) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return called


@needs_native
@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_python_runs_in_the_middle_of_a_window(reduction, with_model):
    training = Training(reduction=reduction, with_model=with_model)
    for window in range(4):
        for number in range(STEPS):
            in_backward = python_calls(training.loss().backward)
            in_step, in_zero_grad = python_calls(training.opt.step), python_calls(training.opt.zero_grad)
            assert bool(in_backward) == (window == 0 and number == 0)
            assert (in_step == ["step"]) == (number < STEPS - 1)
            assert (in_zero_grad == ["zero_grad"]) == (number < STEPS - 1)


@needs_native
def test_no_python_runs_in_the_backwards_of_a_manual_loop_but_the_first():
    training = Training(counted=False)
    for window in range(2):
        for number in range(STEPS):
            assert bool(python_calls(training.loss().backward)) == (window == 0 and number == 0)
        training.opt.step(), training.opt.zero_grad()


@needs_native
@pytest.mark.parametrize(
    ("with_model", "options", "limit"),
    [(False, {}, 30), (True, {}, 45), (False, CLIPPED, 160), (True, CLIPPED, 180)],
    ids=["", "model=", "clip", "model=, clip"],
)
def test_few_functions_of_the_package_are_called_in_a_window(with_model, options, limit):
    training = Training(with_model=with_model, **options)
    for number in range(2):
        called = python_calls(lambda: [training.micro_batch() for _ in range(STEPS)])
        assert number == 0 or len(called) <= limit, (len(called), called)


@needs_native
def test_native_code_continues_when_losses_are_no_longer_scaled():
    training, scaler = Training(), GradScaler("cpu", init_scale=2.0)
    for _ in range(STEPS):
        scaler.scale(training.loss()).backward()
        scaler.step(training.opt)
        scaler.update(), training.opt.zero_grad()
    for _ in range(STEPS - 2):
        training.micro_batch()
    training.loss().backward()
    assert python_calls(training.opt.step) == ["step"]
    scaler.scale(training.loss()).backward()
    with pytest.raises(RuntimeError, match=r"call scaler\.step\(optimizer\)"):
        training.opt.step()
    training.opt.discard()
    training.micro_batch()


WAYS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "clip": {"max_grad_norm": 1e-3},
    "bfloat16 sums": {"accumulate_dtype": torch.bfloat16},
}


@needs_native
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_with_and_without_the_engine_the_same_gradients_are_shown(options, monkeypatch):
    outcomes = []
    for choice in "10":
        monkeypatch.setenv("FUSEDACC_ENGINE", choice)
        training, seen = Training(**options), []

        def look(training=training, seen=seen) -> None:
            params = list(training.model.parameters())
            seen.extend(None if p.grad is None else p.grad.clone() for p in params)
            seen.extend(p.detach().clone() for p in params)

        for _ in range(3 * STEPS):
            training.loss().backward()
            look()
            training.opt.step()
            look()
            training.opt.zero_grad()
            look()
        outcomes.append(seen)
    for mine, its in zip(*outcomes, strict=True):
        assert (mine is None) == (its is None)
        assert mine is None or torch.equal(mine, its)


@needs_native
def test_with_and_without_the_engine_bfloat16_sums_have_the_same_bits(monkeypatch):
    """1/3 is no power of two, so a first gradient is rounded before others are added to it."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(9, 200, generator=generator).bfloat16()
    outcomes = []
    for choice in "10":
        monkeypatch.setenv("FUSEDACC_ENGINE", choice)
        weight = nn.Parameter(torch.zeros(200, dtype=torch.bfloat16))
        optimizer = fusedacc.AccumulatingOptimizer(
            torch.optim.SGD([weight], lr=1.0), 3, accumulate_dtype=torch.bfloat16
        )
        for x in inputs:
            (weight * x).sum().backward()
            optimizer.step(), optimizer.zero_grad()
        outcomes.append(weight.detach())
    assert torch.equal(*outcomes)


def replace_a_parameter(training: Training) -> None:
    training.model[2].bias = nn.Parameter(torch.zeros(3))
    training.opt.param_groups[0]["params"][3] = training.model[2].bias


def scale_the_loss(training: Training) -> None:
    training.scaler = GradScaler("cpu", enabled=True)
    training.scaler.scale(torch.ones(()))
    training.opt._loss_scale.note(training.scaler)


def act_as_torchs_scaler(training: Training) -> None:
    training.opt.grad_scale = training.opt.found_inf = torch.ones(())


def ignore_a_backward(training: Training) -> None:
    with training.opt.ignore():
        training.loss().backward()
        training.loss().backward()


def enter_a_micro_batch(training: Training) -> None:
    with training.opt.accumulate():
        training.loss().backward()


EVENTS = {
    "put a gradient": lambda training: setattr(training.model[0].bias, "grad", torch.ones(8)),
    "replace a parameter": replace_a_parameter,
    "scale the loss": scale_the_loss,
    "torch's scaler": act_as_torchs_scaler,
    "load its own checkpoint": lambda training: training.opt.load_state_dict(training.opt.state_dict()),
    "discard": lambda training: training.opt.discard(),
    "ignore a backward": ignore_a_backward,
    "enter a micro-batch": enter_a_micro_batch,
    "another backward": lambda training: training.loss().backward(),
    "another step": lambda training: training.opt.step(),
    "create_graph": lambda training: training.loss().backward(create_graph=True),
    "set zeros": lambda training: training.opt.zero_grad(set_to_none=False),
    "close": lambda training: training.opt.close(),
    "a process group": lambda _: torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    ),
}


@needs_native
@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("between", ["micro-batches", "backward and step", "step and zero_grad"])
@pytest.mark.parametrize("at", [3, STEPS - 1, 2 * STEPS - 1, 2 * STEPS])
@pytest.mark.parametrize("loop", ["counted", "manual", "model="])
@pytest.mark.parametrize("event", EVENTS)
def test_with_and_without_the_engine_events_have_the_same_effect(event, loop, at, between, monkeypatch):
    """Without it, Python checks everything in every micro-batch."""
    outcomes, counted = [], loop != "manual"
    for choice in "10":
        monkeypatch.setenv("FUSEDACC_ENGINE", choice)
        training, seen = Training(counted, with_model=loop == "model="), []
        try:
            for number in range(3 * STEPS - 1):
                happens = number == at
                if happens and between == "micro-batches":
                    EVENTS[event](training)
                training.loss().backward()
                if happens and between == "backward and step":
                    EVENTS[event](training)
                if counted or number % STEPS == STEPS - 1:
                    training.opt.step()
                    if happens and between == "step and zero_grad":
                        EVENTS[event](training)
                    training.opt.zero_grad()
                is_shown = [p.grad is not None for p in training.model.parameters()]
                seen.append((training.opt.micro_step, training.opt.num_updates, is_shown))
                if event == "create_graph":
                    for p in training.model.parameters():
                        p.grad = None if p.grad is None else p.grad.detach()
        except RuntimeError as error:
            seen.append(str(error))
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
        outcomes.append((seen, [p.detach().clone() for p in training.model.parameters()]))
    (native, mine), (python, its) = outcomes
    assert native == python
    # Without the engine, PyTorch computes the products of `model=`.
    rtol, atol = (1e-5, 1e-6) if loop == "model=" else (0, 0)
    torch.testing.assert_close(mine, its, rtol=rtol, atol=atol)


def freeze_and_unfreeze(training: Training) -> None:
    for needed in (False, True):
        training.model[0].bias.requires_grad_(needed)
        training.opt.explain()


CHANGES = {
    "add a group": lambda training: training.opt.add_param_group({"params": [nn.Parameter(torch.zeros(3))]}),
    "freeze and unfreeze": freeze_and_unfreeze,
    "make a group another mapping": lambda training: training.opt.param_groups.__setitem__(
        0, UserDict(training.opt.param_groups[0])
    ),
}


@needs_native
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("with_model", "at"), [(False, 1), (False, STEPS), (True, STEPS)])
@pytest.mark.parametrize("event", CHANGES.values(), ids=CHANGES)
def test_changes_during_one_of_the_first_backwards_take_effect(event, with_model, at, reduction, monkeypatch):
    """The second backward applies deferred scales.

    The first one of the second window makes the accumulators.
    """
    outcomes = []
    for choice in "10":
        monkeypatch.setenv("FUSEDACC_ENGINE", choice)
        training = Training(reduction=reduction, with_model=with_model)
        for number in range(2 * STEPS):
            loss = training.loss()
            if number == at:
                # The last layer's gradients have been added by then.
                happens = functools.partial(lambda training, gradient: event(training), training)
                hook = training.model[0].weight.register_hook(happens)
            loss.backward()
            if number == at:
                hook.remove()
            training.opt.step(), training.opt.zero_grad()
        outcomes.append([p.detach().clone() for p in training.model.parameters()])
    for mine, its in zip(*outcomes, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-7)


def halve(training: Training) -> None:
    for p in training.model.parameters():
        p.data = p.data.bfloat16()


BEFORE_THE_UPDATE = {
    "add a frozen group": lambda training: training.opt.add_param_group(
        {"params": [nn.Parameter(torch.zeros(3), requires_grad=False)]}
    ),
    "replace a gradient": lambda training: setattr(
        training.model[0].weight, "grad", torch.ones_like(training.model[0].weight)
    ),
    "change the parameters' dtype": halve,
}


@needs_native
@pytest.mark.parametrize("event", BEFORE_THE_UPDATE.values(), ids=BEFORE_THE_UPDATE)
def test_changes_between_a_windows_last_backward_and_its_update_take_effect(event, monkeypatch):
    outcomes = []
    for choice in "10":
        monkeypatch.setenv("FUSEDACC_ENGINE", choice)
        training = Training()
        for number in range(2 * STEPS):
            training.loss().backward()
            if number == 2 * STEPS - 1:
                event(training)
            training.opt.step(), training.opt.zero_grad()
        outcomes.append([p.detach().clone() for p in training.model.parameters()])
    assert all(map(torch.equal, *outcomes))


@needs_native
@pytest.mark.parametrize("rows", [3, 700], ids=["small", "large"])
@pytest.mark.parametrize(
    "same",
    [lambda weight: with_backward(weight, torch.clone), torch.clone],
    ids=["from Python", "from autograd"],
)
def test_the_gradients_of_a_windows_first_backward_are_not_handled_by_python(same, rows):
    weight, given = nn.Parameter(torch.zeros(rows, 400)), torch.ones(2, 400)
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), 2)
    for _ in range(3):
        called = python_calls(nn.functional.linear(given, same(weight)).sum().backward)
        assert "receive" not in called
        optimizer.step(), optimizer.zero_grad()
    optimizer.flush()
    assert torch.equal(weight, torch.full_like(weight, -4.0))


@needs_native
@pytest.mark.parametrize("with_model", [False, True])
def test_a_window_does_not_overwrite_gradients_that_the_user_holds(with_model):
    training = Training(with_model=with_model)
    for number in range(2 * STEPS):
        training.loss().backward()
        if number == STEPS - 1:
            rows, *others = [p.grad for p in training.model.parameters()]
            rows = rows[1:]
            copies = [each.clone() for each in (rows, *others)]
        training.opt.step(), training.opt.zero_grad()
    assert all(map(torch.equal, (rows, *others), copies))


@needs_native
def test_an_addition_that_fails_at_the_end_of_a_first_backward_taints_the_window(monkeypatch):
    training = Training(accumulate_dtype=torch.bfloat16, backend="eager")
    for _ in range(STEPS):
        training.micro_batch()
    loss = training.loss()
    with monkeypatch.context() as patch:
        patch.setattr(training.opt._accumulators.adder, "add", fail)
        with pytest.raises(Failure):
            loss.backward()
    with pytest.raises(RuntimeError, match="an exception has interrupted a backward"):
        training.opt.step()


def test_an_exception_at_the_end_of_a_backward_taints_the_window(monkeypatch):
    training = Training(with_model=True)
    loss = training.loss()
    with monkeypatch.context() as patch:
        patch.setattr(training.opt._accumulation, "end_backward", lambda *_, **options: fail())
        with pytest.raises(Failure):
            loss.backward()
    with pytest.raises(RuntimeError, match=r"an exception has interrupted a backward.*discard"):
        training.opt.step()


@pytest.mark.parametrize(("at", "with_model"), [(3, False), (STEPS - 1, False), (STEPS, True)])
@pytest.mark.parametrize("counted", [True, False], ids=["counted", "manual"])
def test_a_backward_that_fails_after_an_addition_taints_the_window_until_discard(counted, at, with_model):
    training = Training(counted, with_model)
    for number in range(at):
        training.loss().backward()
        if counted or number == STEPS - 1:
            training.opt.step(), training.opt.zero_grad()
    before = [p.detach().clone() for p in training.model.parameters()]
    with failing(training.model[0].weight):
        training.loss().backward()
    for call in (training.opt.step, training.opt.flush):
        with pytest.raises(RuntimeError, match=r"an exception has interrupted a backward.*discard"):
            call()
    training.opt.discard()
    assert all(map(torch.equal, training.model.parameters(), before))
    assert all(p.grad is None for p in training.model.parameters())
    fresh = Training(counted, with_model)
    fresh.model.load_state_dict(training.model.state_dict())
    fresh.opt.load_state_dict(copy.deepcopy(training.opt.state_dict()))
    for each in (training, fresh):
        each.number = 0
        for number in range(STEPS):
            each.loss().backward()
            if counted or number == STEPS - 1:
                each.opt.step()
    assert all(map(torch.equal, training.model.parameters(), fresh.model.parameters()))


@pytest.mark.parametrize("steps", [1, 2, None])
@pytest.mark.parametrize(
    ("dtype", "grad_dtype"), [(torch.float32, torch.bfloat16), (torch.float64, torch.float32)]
)
def test_an_update_has_gradients_of_the_dtype_that_the_user_has_asked_for(dtype, grad_dtype, steps):
    seen = []

    class Sees(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(weight.grad.dtype)
            return super().step(closure)

    weight = nn.Parameter(torch.zeros(4, dtype=dtype))
    weight.grad_dtype = grad_dtype
    optimizer = fusedacc.AccumulatingOptimizer(Sees([weight], lr=1.0), steps)
    for _ in range(2 * (steps or 1)):
        weight.sum().backward()
        optimizer.step(), optimizer.zero_grad()
    assert seen == [grad_dtype] * 2


def test_a_grad_dtype_that_the_user_asks_for_in_mid_window():
    def train(grad_dtype: torch.dtype) -> list[torch.Tensor]:
        weights = [nn.Parameter(torch.linspace(0, 1, 5)) for _ in range(2)]
        optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(weights, lr=0.25), 2)
        for micro_batch in range(8):
            if micro_batch == 3:
                weights[0].grad_dtype = grad_dtype
            sum((weight * 2.0**micro_batch).sum() for weight in weights).backward()
            if micro_batch == 3 and weights[0].grad is not None:
                assert weights[0].grad.dtype == grad_dtype
            optimizer.step(), optimizer.zero_grad()
        return [weight.detach() for weight in weights]

    # bfloat16 holds these gradients exactly.
    for asked, usual in zip(train(torch.bfloat16), train(torch.float32), strict=True):
        assert torch.equal(asked, usual)


def test_a_plan_is_not_used_in_a_later_window():
    """A window of three begins with a gradient that was put into p.grad by hand, without a backward pass."""
    weight, optimizer = scalar(lambda window: 2 + window)
    for _ in range(2):
        weight.backward()
        optimizer.step(), optimizer.zero_grad()
    weight.grad = torch.ones(())
    optimizer.step(), optimizer.zero_grad()
    for _ in range(2):
        weight.backward()
        optimizer.step(), optimizer.zero_grad()
    assert optimizer.num_updates == 2
    assert weight.item() == pytest.approx(-2)


def test_a_window_whose_backward_passes_give_no_gradient_updates():
    weight, optimizer = scalar(3)
    for number in range(9):
        with_backward(weight, torch.clone if number < 3 else lambda gradient: None).backward()
        optimizer.step(), optimizer.zero_grad()
    assert (optimizer.micro_step, optimizer.num_updates) == (0, 3)
    assert weight.item() == -1


def test_a_scaler_that_steps_divides_gradients_of_losses_that_it_has_not_scaled():
    """As torch's scaler does."""
    weight, optimizer = scalar(2)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    seen = []
    for number in range(6):
        weight.backward()
        if number < 2:
            optimizer.step()
        else:
            scaler.step(optimizer), scaler.update()
        optimizer.zero_grad()
        seen.append(weight.item())
    assert seen == [0, -1, -1, -1.25, -1.25, -1.5]


def test_a_parameter_that_was_frozen_gets_scaled_gradients():
    """It is frozen while its sum is published, and unfrozen before a further backward pass."""
    weight, optimizer = scalar(2)
    other = nn.Parameter(torch.ones(()))
    optimizer.add_param_group({"params": [other]})
    (weight * other).backward()
    optimizer.step(), optimizer.zero_grad()
    weight.requires_grad_(False)
    optimizer.explain()  # looks at all parameters
    (weight * other).backward()
    weight.requires_grad_(True)
    (weight * other).backward()
    optimizer.step()
    assert weight.item() == -1
