"""Plain PyTorch's loop with the wrapper's interface, the description of a loop, and exact sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fusedacc.accumulators.reduction import WEIGHING

from . import regrouping
from .edits import changed, edit
from .ignoring import Ignoring
from .scaling import Scaling, all_finite, values

LOW = (torch.bfloat16, torch.float16)
#: A norm to clip to that no gradient reaches.
NEVER = 1e30


class Mismatch(AssertionError):
    """The wrapper and stock disagree."""


@dataclass(frozen=True)
class Loop:
    """How a case accumulates. `steps`: None for a manual loop, a number, or one number per update."""

    steps: int | tuple[int, ...] | None
    reduction: str
    accumulate_dtype: torch.dtype | None = None
    rounding: str = "nearest"
    masters: bool = False
    skips: bool = False
    scaling: Scaling | None = None
    clip: float | None = None
    norm_type: float = 2.0

    @property
    def clips(self) -> bool:
        """Whether clipping can change a gradient."""
        return self.clip is not None and self.clip < NEVER

    @property
    def counted(self) -> bool:
        return self.steps is not None

    @property
    def needs_context(self) -> bool:
        return self.reduction in WEIGHING or (not self.counted and self.reduction == "mean")

    @property
    def weighs(self) -> bool:
        return self.reduction in WEIGHING

    @property
    def watches(self) -> bool:
        """Whether updates with inf or nan are skipped."""
        return self.skips or self.scaling is not None

    def size(self, update: int) -> int:
        return self.steps[update % len(self.steps)] if isinstance(self.steps, tuple) else self.steps


@dataclass
class ExactSum:
    """A float64 sum, and what bounds the rounding of this sum in another dtype.

    Attributes:
        magnitude: the sum of the terms' absolute values.
        terms: the number of terms.
        eps: eps of the coarsest dtype that the sum may have had.
        coarse: rounding that the terms already have, from sums in `p.grad`.
    """

    value: Tensor
    magnitude: Tensor
    terms: int = 0
    eps: float = 0.0
    coarse: float = 0.0

    @staticmethod
    def like(gradient: Tensor) -> ExactSum:
        zero = torch.zeros(gradient.shape, dtype=torch.float64)
        return ExactSum(zero, zero.clone())

    def add(self, value: Tensor, magnitude: Tensor, terms: int, eps: float, coarse: float) -> None:
        self.value += value
        self.magnitude += magnitude
        self.terms += terms
        self.eps = max(self.eps, eps)
        self.coarse += coarse

    def copy(self) -> ExactSum:
        return replace(self, value=self.value.clone(), magnitude=self.magnitude.clone())

    def change(self, change: str, value: float, unit: float) -> None:
        """Apply a user's change to this sum times `unit`."""
        self.value = changed(self.value * unit, change, value) / unit
        self.terms += 1
        if change == "halve":
            self.magnitude, self.coarse = self.magnitude * 0.5, self.coarse * 0.5
        elif change == "shift":
            self.magnitude = self.magnitude + abs(value / unit)
        elif change in ("fill", "replace"):
            self.magnitude, self.coarse = self.value.abs(), 0.0

    def rounding(self, scale: float) -> Tensor:
        """Return the largest error of this sum times `scale`, before its final cast."""
        return (self.terms + 4) * self.eps * (self.magnitude * abs(scale)) + self.coarse * abs(scale)

    def check(self, got: Tensor, scale: float, where: str, slack: float = 0.0) -> None:
        """Check that `got` is this sum times `scale`, within the rounding of its additions and its cast.

        Args:
            slack: the largest relative error of `scale`.
        """
        exact = self.value * scale
        info = torch.finfo(got.dtype)
        bound = self.rounding(scale) + (info.eps + slack) * exact.abs() + info.smallest_normal * info.eps
        settled = exact.abs() < info.max / 2  # ignore sums that overflow, because training has diverged
        error = (dense(got.double()) - exact).abs().where(settled, 0.0)
        right = (error <= bound) | ~settled
        if not bool(right.all()):
            raise Mismatch(f"{where}: gradient {difference(exact, dense(got.double()), ~right)}")


def dense(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_dense() if tensor.is_sparse else tensor


def spread(gradient: Tensor) -> Tensor:
    """Return the sum of the terms' absolute values. A sparse gradient may list a row several times."""
    gradient = gradient.detach().double()
    if not gradient.is_sparse:
        return gradient.abs()
    rows = gradient._values().abs() * max(1, gradient._nnz())
    return torch.sparse_coo_tensor(
        gradient._indices(), rows, gradient.shape, check_invariants=False
    ).to_dense()


def difference(must: Tensor, got: Tensor, wrong: Tensor) -> str:
    """Describe how many elements differ, and the largest difference."""
    error = (got - must).abs().nan_to_num(float("inf")).where(wrong, -1.0)
    worst = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    share = f"{int(wrong.sum())} of {wrong.numel()} elements"
    return f"differs in {share}, most at {worst}: {got[worst].item():.9g} must be {must[worst].item():.9g}"


class StockManual:
    """Plain PyTorch: autograd sums into `p.grad`, and each step is the inner optimizer's."""

    def __init__(self, inner: torch.optim.Optimizer, loop: Loop) -> None:
        self.inner, self.loop = inner, loop
        self.num_updates = self.num_skipped = 0
        self.has_updated = False
        self.loss_scale = 1.0  # of the last loss
        self.unscaled = False  # p.grad has been divided by it
        self.found = False  # the last update was skipped, and its gradient is not cleared
        self.stale = False  # p.grad holds the last update's gradient
        self.ran = False  # p.grad holds more than what was put there by hand
        self.witness: list[Tensor | None] | None = None
        self.ignored = Ignoring()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @property
    def groups(self) -> list[list[Tensor]]:
        """The model's parameters in the optimizer's groups."""
        return [group["params"] for group in self.inner.param_groups]

    @property
    def params(self) -> list[Tensor]:
        return [p for group in self.groups for p in group]

    @property
    def has_gradients(self) -> bool:
        return any(p.grad is not None and not self.ignored.has(p) for p in self.params)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.clear(set_to_none)
        self.ignored.forget()
        self.stale, self.ran = not set_to_none, False
        self.unscaled = self.found = False

    def clear(self, set_to_none: bool) -> None:
        self.inner.zero_grad(set_to_none)

    def unscale(self) -> None:
        for p in self.params:
            if p.grad is not None:
                values(p.grad).mul_(1.0 / self.loss_scale)
        self.unscaled = True

    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        self.ignored.clear(self.params)
        if self.loop.scaling is not None and not self.unscaled:
            self.unscale()
        self.found = self.loop.watches and not all_finite(p.grad for p in self.params)
        loss = None
        if not self.found:
            loss = self.inner.step() if closure is None else self.inner.step(closure)
        self.end_update()
        return loss

    def end_update(self) -> None:
        self.num_updates += 1
        self.num_skipped += self.found
        self.has_updated = self.stale = True
        self.unscaled = False

    def before_backward(self) -> None:
        """Autograd adds to `p.grad`."""
        self.ignored.clear(self.params)

    def after_backward(self, several: bool, by_hand: bool = False) -> None:
        """Record that a backward has run."""
        self.ran = self.ran or not by_hand

    def edit(self, index: int, change: str, road: str, value: float) -> None:
        edit(self.params[index], change, road, value)

    # Groups changed by hand.

    def append(self, params: list[Tensor], as_group: bool) -> None:
        regrouping.append(self.inner, params, as_group)

    def remove(self, p: Tensor) -> None:
        regrouping.remove(self.inner, p)

    def replace(self, old: Tensor, new: Tensor) -> None:
        regrouping.replace(self.inner, old, new)

    def resize(self, p: Tensor, data: Tensor) -> None:
        regrouping.resize(self.inner, p, data)

    def discard(self) -> None:
        for p in self.params:
            p.grad = None
        self.stale = self.unscaled = self.found = False

    @contextmanager
    def accumulate(self, weight: float | None = None) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(weight=weight)

    @contextmanager
    def ignore(self) -> Iterator[None]:
        with self.ignored.around(self.params):
            yield

    def add_param_group(self, group: dict[str, Any]) -> None:
        self.inner.add_param_group(group)

    def close(self) -> None:
        """Do nothing: this optimizer has changed nothing to restore."""

    def state_dict(self) -> dict[str, Any]:
        kept = [None if self.ignored.has(p) else p.grad for p in self.params]
        gradients = [None if gradient is None else gradient.clone() for gradient in kept]
        return {"inner": self.inner.state_dict(), "gradients": gradients, "updates": self.counts}

    @property
    def counts(self) -> tuple[int, int]:
        return self.num_updates, self.num_skipped

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self.num_updates, self.num_skipped = state["updates"]
        self.has_updated = self.stale = self.found = False
        for p, gradient in zip(self.params, state["gradients"], strict=True):
            p.grad = None if gradient is None else gradient.clone()
