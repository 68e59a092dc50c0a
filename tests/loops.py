"""A small network, numbered losses, and the results of plain PyTorch, for tests of whole loops."""

import contextlib
import copy
import functools
import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fusedacc

LOW = torch.bfloat16
#: The dtype of a model and the options of its wrapper. "model" is replaced with the model; "python" disables
#: native hooks.
WAYS = {
    "float32": (torch.float32, {}),
    "python float32": (torch.float32, {}),
    "bfloat16": (LOW, {}),
    "python bfloat16": (LOW, {}),
    "float32 model": (torch.float32, {"model": True}),
    "bfloat16 model": (LOW, {"model": True}),
    "bfloat16 masters": (LOW, {"master_weights": True}),
    "python bfloat16 masters": (LOW, {"master_weights": True, "model": True}),
}
#: A program that trains with the package and prints why its hooks run in Python.
TRAINS = """
import torch, fusedacc
from fusedacc.kernels import native_module
p = torch.nn.Parameter(torch.zeros(3))
optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 2)
for _ in range(2):
    p.sum().backward()
    optimizer.step()
assert p.tolist() == [-1.0] * 3
print(native_module.why_not())
"""


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def wrap(
    net: nn.Module, steps=None, make=torch.optim.SGD, lr: float = 0.1, **options
) -> fusedacc.AccumulatingOptimizer:
    return fusedacc.AccumulatingOptimizer(make(net.parameters(), lr=lr), steps, **options)


def wrap_momentum(model: nn.Module, steps=None, **options):
    """Wrap as in `wrap`, with an inner optimizer that has state."""
    return wrap(model, steps, functools.partial(torch.optim.SGD, momentum=0.9), **options)


def scalar(steps=None, **options) -> tuple[nn.Parameter, fusedacc.AccumulatingOptimizer]:
    """Return one parameter that starts at 0, so that an update with lr 1 shows its gradient."""
    weight = nn.Parameter(torch.zeros(()))
    return weight, fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), steps, **options)


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    return model(x.to(next(model.parameters()).dtype)).pow(2).mean()


def expected(model: nn.Module, seeds: Iterable[int], scale: float = 1.0) -> list[Tensor]:
    """Return plain PyTorch's gradients at the model's current weights, summed and then scaled."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    for seed in seeds:
        loss_of(twin, seed).backward()
    return [p.grad * scale for p in twin.parameters()]


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


def assert_gradients(model: nn.Module, wanted: list[Tensor]) -> None:
    """Compare sums of scaled terms with scaled sums, with a tolerance of a few float32 roundings."""
    for gradient, want in zip(gradients(model), wanted, strict=True):
        assert gradient is not None
        torch.testing.assert_close(gradient, want, rtol=1e-5, atol=1e-6)


def micro_batch(model: nn.Module, optimizer: fusedacc.AccumulatingOptimizer, seed: int) -> None:
    loss_of(model, seed).backward()
    optimizer.step()


def cleared_micro_batch(model: nn.Module, optimizer: fusedacc.AccumulatingOptimizer, seed: int = 0) -> None:
    micro_batch(model, optimizer, seed)
    optimizer.zero_grad()


def assert_same_gradients(model: nn.Module, twin: nn.Module, **tolerances: float) -> None:
    """Compare gradients that a matrix product may round: the tolerance depends on the largest added terms."""
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            largest = theirs.grad.abs().max().item() if theirs.grad.numel() else 0.0
            given = tolerances or {"rtol": 1e-5, "atol": 1e-6 * max(1.0, largest)}
            torch.testing.assert_close(ours.grad, theirs.grad, **given, msg=lambda m, n=name: f"{n}: {m}")


def assert_equal_weights(model: nn.Module, other: nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def assert_close_weights(model: nn.Module, other: nn.Module, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}"
        )


def assert_mean(found: Tensor, wanted: float) -> None:
    """Check that stochastically rounded elements are correct on average.

    The mean must be within 4.5 standard errors, and the elements must contain noise, so that rounding to
    nearest fails.
    """
    values = found.double().flatten()
    error = values.std().item() / values.numel() ** 0.5
    assert error > 0
    assert abs(values.mean().item() - wanted) < 4.5 * error, (values.mean().item(), wanted, error)


def identical(one: Any, other: Any) -> bool:
    """Return whether trees of tensors and plain values, such as checkpoints, are bitwise equal."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(identical(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(identical, one, other))
    return torch.equal(one, other) and one.dtype == other.dtype if isinstance(one, Tensor) else one == other


def through_file(state: Any) -> Any:
    """Save and load a checkpoint. `torch.load` rejects everything except tensors, numbers and containers."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


class _WithBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, backward: Callable[[Tensor], Tensor | None]) -> Tensor:
        ctx.pass_on = backward
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, None]:
        return ctx.pass_on(gradient), None


def with_backward(x: Tensor, backward: Callable[[Tensor], Tensor | None]) -> Tensor:
    """Return a copy of `x`. In its backward, a Python function makes the gradient of `x`."""
    return _WithBackward.apply(x, backward)


class Failure(Exception):
    """The exception that tests raise in a backward."""


def fail(*_: object) -> None:
    """Raise `Failure`, as a hook."""
    raise Failure


@contextlib.contextmanager
def failing(at: Tensor) -> Iterator[None]:
    """Make a backward in this block raise an exception when the gradient of `at` arrives."""
    handle = at.register_hook(fail)
    with pytest.raises(Failure):
        yield
    handle.remove()


class Operators(TorchDispatchMode):
    """Records the operators that run, with names such as "aten.mm.default"."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.append(str(operator))
        return operator(*args, **(kwargs or {}))


class NoHostRead(TorchDispatchMode):
    """Fails if the host reads data from the device."""

    FORBIDDEN = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func._schema.name.removeprefix("aten::") not in self.FORBIDDEN, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))
