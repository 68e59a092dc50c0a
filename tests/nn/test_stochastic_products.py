"""Modules of `model=` add to stochastically rounded bfloat16 sums: each product is rounded once.

Every product here is 1 plus many parts of less than half an ulp. Rounded to nearest first, it would be 1.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kept_casts import Conv1D
from loops import LOW, assert_mean, wrap
from torch import Tensor, nn

import fusedacc
from fusedacc.nn.functional import grouped_linear

WIDTH, EXPERTS, TOKENS = 136, 4, 22
SMALL = 2.0**-12
#: The product of a first token, which is 1, and the other tokens.
PRODUCT = 1 + (TOKENS - 1) * SMALL
STOCHASTIC: dict[str, Any] = {"accumulate_dtype": LOW, "rounding": "stochastic", "seed": 4}


class Experts(nn.Module):
    """A Linear layer for each of several groups of rows. how: "grouped" or "loop"."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight, self.how = nn.Parameter(torch.zeros(EXPERTS, WIDTH, WIDTH)), how

    def forward(self, x: Tensor) -> Tensor:
        rows = x.repeat(EXPERTS, 1)
        if self.how == "grouped":
            ends = torch.arange(1, EXPERTS + 1, dtype=torch.int32) * len(x)
            return grouped_linear(rows, self.weight, ends)
        return torch.cat([part @ self.weight[i].t() for i, part in enumerate(rows.split(len(x)))])


class Table(nn.Module):
    """An embedding. Each token looks up every row."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(torch.arange(WIDTH).repeat(len(x), 1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(WIDTH, WIDTH),
    "Conv1D": lambda: Conv1D(WIDTH, WIDTH),
    "Embedding": Table,
    "grouped": lambda: Experts("grouped"),
    "loop": lambda: Experts("loop"),
}
#: How each model adds its gradients.
PATHS = dict(zip(MODELS, ("gemm", "gemm", "embedding", "grouped", "grouped"), strict=True))


def product(kind: str, operands: torch.dtype) -> float:
    """Return what is added each time. If autograd multiplies, it is a gradient in its operands' dtype."""
    return torch.tensor(PRODUCT).to(operands).item() if kind == "loop" else PRODUCT


def tokens(dtype: torch.dtype) -> Tensor:
    return torch.ones(TOKENS, WIDTH, dtype=dtype)


def backward(model: nn.Module, dtype: torch.dtype, autocast: bool = False) -> None:
    with torch.autocast("cpu", LOW, enabled=autocast):
        output = model(tokens(dtype))
    size = torch.full((TOKENS, *[1] * (output.dim() - 1)), SMALL)
    if len(output) != TOKENS:
        size = torch.full((TOKENS, 1), SMALL)
    size[0] = 1.0
    size = size.repeat(len(output) // TOKENS, *size.shape[1:]).expand(output.shape)
    output.backward(size.to(output.dtype).contiguous())  # torch's grouped_mm rejects expanded ones


def weight_of(model: nn.Module) -> nn.Parameter:
    return next(p for p in model.parameters() if p.dim() > 1)


def window(
    kind: str, steps: int | None, dtype: torch.dtype, autocast: bool = False, **options: Any
) -> tuple[Tensor, str]:
    """Return the weight's final gradient, the sum of five products, and how it was added."""
    torch.manual_seed(0)
    model = MODELS[kind]().to(dtype)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    given = STOCHASTIC | {"model": model, "reduction": "sum"} | options
    optimizer = fusedacc.AccumulatingOptimizer(inner, steps, **given)
    for _ in range(5):
        backward(model, dtype, autocast)
        if steps:
            optimizer.step()
    slot = next(slot for slot in optimizer._slots if slot.param is weight_of(model))
    found, paths = weight_of(model).grad.clone(), "+".join(slot.paths)
    optimizer.close()
    return found, paths


@pytest.mark.sweep
@pytest.mark.parametrize("native", ["1", "0"])
@pytest.mark.parametrize("how", ["bfloat16", "float32", "autocast"])
@pytest.mark.parametrize("steps", [5, None])
@pytest.mark.parametrize("kind", MODELS)
def test_products_are_correct_on_average(kind, steps, how, native, monkeypatch):
    monkeypatch.setenv("FUSEDACC_NATIVE_HOOKS", native)
    dtype = LOW if how == "bfloat16" else torch.float32
    if how == "autocast" and kind == "grouped":
        pytest.skip("torch's grouped_mm takes no operands of two dtypes")
    found, paths = window(kind, steps, dtype, how == "autocast")
    assert paths == PATHS[kind]
    assert_mean(found, 5 * product(kind, torch.float32 if how == "float32" else LOW))


@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("kind", MODELS)
def test_products_are_correct_on_average_with_each_backend(kind, backend):
    found, _ = window(kind, 5, LOW, backend=backend)
    assert_mean(found, 5 * product(kind, LOW))


@pytest.mark.parametrize("reduction", ["mean", "weighted"])
@pytest.mark.parametrize("kind", MODELS)
def test_scaled_first_products_are_correct_on_average(kind, reduction):
    """A first product is written with its scale. A single product is rounded once."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    optimizer = wrap(model, 3, model=model, reduction=reduction, lr=0.0, **STOCHASTIC)
    with optimizer.accumulate(weight=3.0 if reduction == "weighted" else None):
        backward(model, torch.float32)
    optimizer.step()
    optimizer.flush()
    assert_mean(weight_of(model).grad, PRODUCT)
    optimizer.close()


class Shaped(nn.Module):
    """A Linear layer over tokens in batches, `times` over."""

    def __init__(self, bias: bool = True, times: int = 1) -> None:
        super().__init__()
        self.linear, self.times = nn.Linear(WIDTH, WIDTH, bias=bias), times

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(2, -1, WIDTH)
        return sum(self.linear(x * 2.0**index) for index in range(self.times)).flatten(0, 1)


#: Besides `MODELS`: changes of a Linear layer's input, its bias and its number of calls.
LINEARS: dict[str, Callable[[], nn.Module]] = {
    "Linear without bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "Linear of three dimensions": Shaped,
    "Linear of three dimensions without bias": lambda: Shaped(bias=False),
    "Linear called twice": lambda: Shaped(times=2),
}
#: Weights of a window's micro-batches. Dividing by their sum does not round.
WEIGHTS = (1.0, 1.0, 2.0)
#: What adds the gradients: the backend, and whether the hooks are native.
ADDERS = [(backend, native) for backend in ("cpu", "eager") for native in "10"]


def gradients_by(
    backend: str, native: str, kind: str, steps: int | None, how: str, patch: pytest.MonkeyPatch
) -> list[Tensor]:
    """Return all gradients of two windows. float32 adds their values without rounding."""
    patch.setenv("FUSEDACC_NATIVE_HOOKS", native)
    torch.manual_seed(0)
    dtype = LOW if how == "bfloat16" else torch.float32
    model = (MODELS | LINEARS)[kind]().to(dtype)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    given = STOCHASTIC | {"model": model, "backend": backend, "max_grad_norm": 1e9}
    optimizer = fusedacc.AccumulatingOptimizer(
        inner, steps, reduction="weighted" if steps else "sum", **given
    )
    for number in range(6):
        with optimizer.accumulate(weight=WEIGHTS[number % 3] if steps else None):
            backward(model, dtype, how == "autocast")
        if steps or number == 2:
            optimizer.step()  # in a manual loop, p.grad keeps its sum in the parameter's dtype
    found = [p.grad.clone() for p in model.parameters()]
    optimizer.close()
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("how", ["bfloat16", "float32", "autocast"])
@pytest.mark.parametrize("steps", [3, None])
@pytest.mark.parametrize("kind", [*MODELS, *LINEARS])
def test_the_same_bits_with_every_kind_of_hook(kind, steps, how, monkeypatch):
    """Each write to a sum uses one random number, whatever the backend and the hooks."""
    if how == "autocast" and kind == "grouped":
        pytest.skip("torch's grouped_mm takes no operands of two dtypes")
    found = {adder: gradients_by(*adder, kind, steps, how, monkeypatch) for adder in ADDERS}
    for adder, gradients in found.items():
        assert all(map(torch.equal, gradients, found[ADDERS[0]])), adder


def test_an_expert_without_rows_keeps_its_sum():
    torch.manual_seed(0)
    model = Experts("grouped").to(LOW)
    optimizer = wrap(model, None, model=model, lr=0.0, **STOCHASTIC)
    backward(model, LOW), backward(model, LOW)
    before = model.weight.grad.clone()
    ends = torch.tensor([0, TOKENS, TOKENS, TOKENS]).int()
    grouped_linear(tokens(LOW), model.weight, ends).sum().backward()
    assert torch.equal(model.weight.grad[[0, 2, 3]], before[[0, 2, 3]])
    assert not torch.equal(model.weight.grad[1], before[1])
    optimizer.close()
