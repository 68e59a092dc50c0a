"""Sums that are rounded stochastically take whole gradients: `model=` changes no bit of them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kept_casts import Conv1D
from loops import LOW, assert_mean
from torch import Tensor, nn

import fusedacc
from fusedacc.nn.functional import grouped_linear, linear_cross_entropy

WIDTH, EXPERTS, TOKENS = 136, 4, 22  # so wide that small layers are no reason to leave the Linear to PyTorch
STOCHASTIC: dict[str, Any] = {"accumulate_dtype": LOW, "rounding": "stochastic", "seed": 4}
WHY = 'rounding="stochastic" takes whole gradients'


class Experts(nn.Module):
    """A Linear layer for each of several groups of rows. how: "grouped" or "loop"."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight, self.how = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH), how

    def forward(self, x: Tensor) -> Tensor:
        rows = x.repeat(EXPERTS, 1)
        if self.how == "grouped":
            ends = torch.arange(1, EXPERTS + 1, dtype=torch.int32) * len(x)
            return grouped_linear(rows, self.weight, ends)
        return torch.cat([part @ self.weight[i].t() for i, part in enumerate(rows.split(len(x)))])


class Table(nn.Module):
    """An embedding, of which each token looks up some rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x[:, None] * self.rows(torch.arange(3 * len(x)).view(len(x), 3) % WIDTH)


class Head(nn.Module):
    """A language model's head with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear_cross_entropy(x, self.head.weight, torch.arange(len(x)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(WIDTH, WIDTH),
    "Conv1D": lambda: Conv1D(WIDTH, WIDTH),
    "Embedding": Table,
    "grouped": lambda: Experts("grouped"),
    "loop": lambda: Experts("loop"),
    "head": Head,
}


def trained(
    net: nn.Module, steps: int | None, autocast: bool, call: Any = None, **options: Any
) -> tuple[list[Tensor], list[str]]:
    """Return the gradients of two windows, and the rows of `explain()` for the weights."""
    inner = torch.optim.SGD(net.parameters(), lr=0.0)
    optimizer = fusedacc.AccumulatingOptimizer(inner, steps, **(STOCHASTIC | options))
    dtype = next(net.parameters()).dtype
    found = []
    for number in range(6):
        x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(number)).to(dtype)
        with torch.autocast("cpu", LOW, enabled=autocast):
            output = (net if call is None else call)(x)
        output.float().square().mean().backward()
        if steps or number % 3 == 2:
            optimizer.step()
            found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
            optimizer.zero_grad()
    weights = [p for p in net.parameters() if p.dim() > 1]
    shapes = ["x".join(map(str, weight.shape)) for weight in weights]
    text = optimizer.explain().splitlines()
    reasons = {line.split()[0]: line for line in text if line.startswith("[")}
    rows = [line for line in text if any(shape in line.split() for shape in shapes)]
    optimizer.close()
    return found, [row + " " + reasons[row.split()[-1]] for row in rows]


@pytest.mark.sweep
@pytest.mark.parametrize("how", ["bfloat16", "float32", "autocast"])
@pytest.mark.parametrize("steps", [3, None])
@pytest.mark.parametrize("kind", MODELS)
def test_modules_change_no_bit(kind, steps, how):
    if how == "autocast" and kind == "grouped":
        pytest.skip("torch's grouped_mm takes no operands of two dtypes")
    torch.manual_seed(0)
    model = MODELS[kind]().to(LOW if how == "bfloat16" else torch.float32)
    twin, autocast = copy.deepcopy(model), how == "autocast"
    wanted, _ = trained(twin, steps, autocast)
    found, rows = trained(model, steps, autocast, model=model)
    assert wanted
    assert all(map(torch.equal, found, wanted))
    assert rows
    for row in rows:
        assert row.split()[2] == "multi_tensor"
        assert WHY in row


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("steps", [3, None])
@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
def test_casts_are_kept(kind, steps, compiled):
    torch.manual_seed(0)
    model = MODELS[kind]()
    twin = copy.deepcopy(model)
    calls = [torch.compile(each, backend="aot_eager") if compiled else each for each in (model, twin)]
    found, rows = trained(model, steps, True, calls[0], model=model, keep_casts=True)
    wanted, _ = trained(twin, steps, True, calls[1])
    assert all(map(torch.equal, found, wanted))
    (row,) = rows
    assert row.split()[2] == "multi_tensor"
    assert WHY in row
    assert "cast is kept over the window" in row


def test_a_gradient_is_rounded_once_into_its_sum():
    """Each gradient of a float32 weight is 1 plus an eighth of what bfloat16 can represent."""
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = fusedacc.AccumulatingOptimizer(inner, 5, model=model, reduction="sum", **STOCHASTIC)
    for _ in range(5):
        model(torch.ones(1, WIDTH)).backward(torch.full((1, WIDTH), 1 + 2.0**-10))
        optimizer.step()
    assert_mean(model.weight.grad, 5 * (1 + 2.0**-10))
    optimizer.close()
