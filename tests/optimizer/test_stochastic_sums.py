"""Stochastic rounding in the wrapper is repeatable and right on average."""

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import forked
import pytest
import torch
from loops import LOW, assert_mean, identical, loss_of, network, wrap
from torch import Tensor, nn

import fusedacc
from fusedacc.accumulators import engine
from fusedacc.accumulators.reduction import WEIGHING
from fusedacc.kernels import torch_state

#: The elements have equal gradients, so their mean is the mean over so many seeds.
ELEMENTS = 1 << 14
STOCHASTIC: dict[str, Any] = {"accumulate_dtype": LOW, "rounding": "stochastic"}


def trained(
    steps: int | None = 3, dtype: torch.dtype = LOW, seed: int | None = 0, **options: Any
) -> list[Tensor]:
    """Return all parameters, and the gradients after each update, of two and a half windows."""
    model = network(dtype)
    adam = functools.partial(torch.optim.Adam, eps=1e-3)
    optimizer = wrap(model, steps, adam, lr=0.01, seed=seed, **(STOCHASTIC | options))
    found = []
    for number in range(8):
        with optimizer.accumulate():
            loss_of(model, number).backward()
        if steps or number % 3 == 2:
            optimizer.step()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.zero_grad()
    optimizer.flush()
    return [*found, *(p.detach() for p in model.parameters())]


LOOPS = {
    "counted": {},
    "manual": {"steps": None},
    "float32": {"dtype": torch.float32},
    "clipped": {"max_grad_norm": 0.1},
    "masters": {"master_weights": True},
    "manual, mean": {"steps": None, "reduction": "mean"},
}


@pytest.mark.parametrize("options", LOOPS.values(), ids=LOOPS)
def test_the_seed_determines_the_bits(options):
    assert identical(trained(**options), trained(**options))
    assert not all(map(torch.equal, trained(**options), trained(seed=1, **options)))


def test_the_default_seed_is_torchs(monkeypatch):
    torch.manual_seed(77)
    found = trained(seed=None)  # calls manual_seed(0)
    assert identical(found, trained(seed=0))
    monkeypatch.setattr(torch_state, "process_group_up", lambda: True)
    torch.manual_seed(77)
    weight = nn.Parameter(torch.zeros(2, dtype=LOW))
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight]), 2, **STOCHASTIC)
    assert optimizer._accumulators.noise.seed == 0, "torch's seed may differ between ranks"


@pytest.mark.parametrize("options", LOOPS.values(), ids=LOOPS)
def test_hooks_backends_and_buckets_change_nothing(options, monkeypatch):
    wanted = trained(**options)
    for backend in ("cpu", "eager"):
        others = trained(backend=backend, **options)
        if "max_grad_norm" not in options:  # the norm of `eager` has other bits
            assert identical(others, wanted)
    monkeypatch.setattr(engine, "LAUNCH_BYTES", 1)
    assert identical(trained(**options), wanted)
    monkeypatch.setenv("FUSEDACC_ENGINE", "0")
    assert identical(trained(**options), wanted)


# On average


class Window:
    """One window with a vector as the parameter. All elements have the same gradients."""

    def __init__(self, dtype: torch.dtype = LOW, **options: Any) -> None:
        self.weight = nn.Parameter(torch.zeros(ELEMENTS, dtype=dtype))
        self.counted = options.get("steps") is not None
        inner = torch.optim.SGD([self.weight], lr=1.0)
        self.optimizer = fusedacc.AccumulatingOptimizer(
            inner, options.pop("steps", None), **(STOCHASTIC | {"seed": 6} | options)
        )

    def run(self, gradients: Sequence[float], weights: Sequence[float] | None = None) -> Tensor:
        """Return the final p.grad."""
        for index, gradient in enumerate(gradients):
            with self.optimizer.accumulate(weight=weights[index] if weights else None):
                self.weight.backward(torch.full_like(self.weight, gradient))
            if self.counted:
                self.optimizer.step()
        if self.weight.grad is None or not self.counted:
            self.optimizer.flush()
        assert self.weight.grad is not None
        return self.weight.grad.detach().clone()


def low(*values: float) -> list[float]:
    """Return the values rounded to bfloat16."""
    return torch.tensor(values).to(LOW).tolist()


GRADIENTS = low(1.0, 0.3, -0.017, 0.0031, 0.0007, 0.21, 0.0011)
WEIGHTS = [3.0, 1.0, 7.0, 2.0, 5.0, 11.0, 1.0]
MEANS: dict[str, Callable[[Sequence[float], Sequence[float]], float]] = {
    "mean": lambda g, w: sum(g) / len(g),
    "sum": lambda g, w: sum(g),
    "weighted": lambda g, w: sum(a * b for a, b in zip(g, w, strict=True)) / sum(w),
    "normalized": lambda g, w: sum(g) / sum(w),
}


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [LOW, torch.float32])
@pytest.mark.parametrize("steps", [7, 9, None], ids=["counted", "flushed", "manual"])
@pytest.mark.parametrize("reduction", MEANS)
def test_the_final_gradient_is_right_on_average(reduction, steps, dtype, cpu_backend):
    weights = WEIGHTS if reduction in WEIGHING else None
    window = Window(dtype, steps=steps, reduction=reduction, backend=cpu_backend)
    assert_mean(window.run(GRADIENTS, weights), MEANS[reduction](GRADIENTS, WEIGHTS))


def test_the_first_gradients_scale_adds_no_rounding():
    """The next addition applies it."""
    found = Window(steps=3).run(low(1.0, 0.0, 0.0))
    assert_mean(found, low(1.0)[0] / 3)
    assert found.unique().numel() == 2, "one rounding has two results"


@pytest.mark.parametrize("steps", [4, None])
def test_exact_values_inf_and_nan_are_not_changed(steps):
    for values in ([1.0, 2.0, 0.5, 0.25], [float("inf")] * 4, [1.0, float("nan"), 1.0, 1.0]):
        found = Window(steps=steps, reduction="sum").run(values)
        wanted = torch.full((ELEMENTS,), sum(values), dtype=LOW)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    largest = torch.finfo(LOW).max
    assert (
        Window(steps=steps, reduction="sum").run([largest, largest * 2.0**-10, 0.0, 0.0]) == largest
    ).all()


LAYERS = {
    "Linear": (lambda: nn.Linear(64, 64), lambda number: torch.full((8, 64), 1 / (number + 3))),
    "Embedding": (lambda: nn.Embedding(64, 64), lambda number: torch.tensor([number, 5, 5])),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_modules_leave_gradients_to_stochastic_rounding(layer):
    make, input_of = LAYERS[layer]
    found = []
    for with_model in (False, True):
        torch.manual_seed(0)
        model = make().to(LOW)
        optimizer = wrap(model, 3, seed=1, lr=1.0, model=model if with_model else None, **STOCHASTIC)
        for number in range(12):
            x = input_of(number)
            model(x.to(LOW) if x.is_floating_point() else x).square().sum().backward()
            optimizer.step(), optimizer.zero_grad()
        found.append(list(model.parameters()))
    assert identical(*found)


def test_sparse_sums_are_rounded_to_nearest():
    found = []
    for seed in (0, 1):
        torch.manual_seed(0)
        model = nn.Embedding(64, 64, sparse=True, dtype=LOW)
        optimizer = wrap(model, 3, seed=seed, lr=1.0, **STOCHASTIC)
        for number in range(3):
            model(torch.tensor([number, 5, 5])).square().sum().backward()
            optimizer.step()
        found.append(model.weight.detach())
    assert torch.isfinite(found[0]).all()
    assert torch.equal(*found)


@pytest.mark.parametrize("order", ["sparse first", "dense first"])
def test_sparse_gradients_into_a_dense_sum_are_rounded_stochastically(order):
    weight = nn.Parameter(torch.zeros(ELEMENTS, 1, dtype=LOW))
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight]), None, seed=1, **STOCHASTIC)
    every = torch.arange(ELEMENTS)
    steps = [
        lambda: nn.functional.embedding(every, weight, sparse=True).mul(2.0**-9).sum().backward(),
        lambda: weight.sum().backward(),
    ]
    for backward in steps if order == "sparse first" else reversed(steps):
        backward()
    assert weight.grad.layout is torch.strided
    assert_mean(weight.grad.flatten(), 1 + 2.0**-9)
    optimizer.close()


def test_a_gradient_wider_than_its_parameter_is_rounded_once():
    window = Window(steps=2, reduction="sum")
    window.weight.grad_dtype = None
    exact = 1.0 + 2.0**-12
    for _ in range(2):
        window.weight.backward(torch.full((ELEMENTS,), exact, dtype=torch.float32))
        window.optimizer.step()
    assert_mean(window.weight.grad, 2 * exact)


@pytest.mark.parametrize("native", ["0", "1"])
def test_an_assigned_float32_gradient_is_not_taken_for_bfloat16(native, monkeypatch):
    monkeypatch.setenv("FUSEDACC_ENGINE", native)
    weight = nn.Parameter(torch.zeros(5000))
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight]), None, seed=1, **STOCHASTIC)
    weight.sum().backward()
    weight.grad = torch.full((5000,), 0.1)
    for _ in range(2):
        (weight * 0.3).sum().backward()
    torch.testing.assert_close(weight.grad, torch.full((5000,), 0.7))
    optimizer.close()


CAST = """
import sys, torch, fusedacc
model = torch.nn.Linear(100, 50, bias=False)
how = {"accumulate_dtype": torch.bfloat16, "rounding": "stochastic", "reduction": "sum"}
optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(model.parameters()), 3, **how)
model.to(getattr(torch, sys.argv[1]))
for number in range(3):
    (model.weight * 0.3).sum().backward()
    optimizer.step()
print(model.weight.grad.unique().tolist())
"""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_cast_to_float64_or_float16_ends_bfloat16_accumulation(dtype):
    """In a new process, because a kernel that takes wider elements for bfloat16 corrupts memory."""
    done = forked.run(CAST, str(dtype)[6:])
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    assert found == pytest.approx(3 * torch.tensor(0.3, dtype=dtype).item(), rel=4 * torch.finfo(wide).eps)
