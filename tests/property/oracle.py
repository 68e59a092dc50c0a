"""Stock torch behind the wrapper's interface: the two interpreters that the wrapper is held to.

`StockManual` is the stock loop and nothing else. `Collector` takes each gradient out of `p.grad`, keeps exact
sums in float64, and at the update puts the reduced gradient into `p.grad` for the bare optimizer. Where its
sums cannot be bit-equal to the wrapper's, `witness` holds the wrapper's gradients: each is checked against
the exact one within rounding, then handed to the bare optimizer, so that parameters and state stay bit-equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .scaling import Scaling, all_finite, values

LOW = (torch.bfloat16, torch.float16)


class Mismatch(AssertionError):
    """The wrapper and stock disagree."""


@dataclass(frozen=True)
class Loop:
    """How gradients are accumulated and updated from. `steps`: None for the manual loop, a number, or one per
    update.
    """

    steps: int | tuple[int, ...] | None
    reduction: str
    accumulate_dtype: torch.dtype | None = None
    masters: bool = False
    skips: bool = False
    scaling: Scaling | None = None

    @property
    def counted(self) -> bool:
        return self.steps is not None

    @property
    def needs_context(self) -> bool:
        return self.reduction in ("weighted", "normalized") or (not self.counted and self.reduction == "mean")

    @property
    def weighs(self) -> bool:
        return self.reduction in ("weighted", "normalized")

    @property
    def watches(self) -> bool:
        """Whether an update from inf or nan is dropped."""
        return self.skips or self.scaling is not None

    def size(self, update: int) -> int:
        return self.steps[update % len(self.steps)] if isinstance(self.steps, tuple) else self.steps


@dataclass
class ExactSum:
    """A sum in float64 with what bounds the rounding of the same sum in another dtype.

    magnitude: the sum of the terms' absolute values. terms: how many were added. eps: the coarsest dtype that
    the sum may have been kept in. coarse: rounding already in the terms, from sums in `p.grad` itself.
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

    def check(self, got: Tensor, scale: float, where: str) -> None:
        """Raises unless `got` is this sum times `scale` within the rounding of its additions and its cast."""
        exact = self.value * scale
        info = torch.finfo(got.dtype)
        bound = (self.terms + 4) * self.eps * (self.magnitude * abs(scale)) + self.coarse * abs(scale)
        bound += info.eps * exact.abs() + info.smallest_normal * info.eps
        settled = exact.abs() < info.max / 2  # a sum that overflows has diverged: nothing is left to compare
        error = (dense(got.double()) - exact).abs().where(settled, 0.0)
        right = (error <= bound) | ~settled
        if not bool(right.all()):
            raise Mismatch(f"{where}: gradient {difference(exact, dense(got.double()), ~right)}")


def dense(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_dense() if tensor.is_sparse else tensor


def spread(gradient: Tensor) -> Tensor:
    """The sum of the absolute values that a gradient is the sum of: a sparse one lists a row many times."""
    gradient = gradient.detach().double()
    if not gradient.is_sparse:
        return gradient.abs()
    rows = gradient._values().abs() * max(1, gradient._nnz())
    return torch.sparse_coo_tensor(
        gradient._indices(), rows, gradient.shape, check_invariants=False
    ).to_dense()


def difference(must: Tensor, got: Tensor, wrong: Tensor) -> str:
    """Where two tensors differ: how many elements, and the worst."""
    error = (got - must).abs().nan_to_num(float("inf")).where(wrong, -1.0)
    worst = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    share = f"{int(wrong.sum())} of {wrong.numel()} elements"
    return f"differs in {share}, most at {worst}: {got[worst].item():.9g} must be {must[worst].item():.9g}"


class StockManual:
    """The stock loop: autograd sums into `p.grad`, and each step is one of the bare optimizer's."""

    def __init__(self, inner: torch.optim.Optimizer, loop: Loop) -> None:
        self.inner, self.loop = inner, loop
        self.num_updates = self.num_skipped = 0
        self.has_updated = False
        self.loss_scale = 1.0  # of the last loss
        self.unscaled = False  # p.grad has been divided by it
        self.found = False  # the last update was dropped, and nothing has cleared its gradient
        self.stale = False  # p.grad holds the last update's gradient
        self.ran = False  # p.grad holds more than what was put there by hand
        self.witness: list[Tensor | None] | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @property
    def groups(self) -> list[list[Tensor]]:
        """The model's parameters as the optimizer has them."""
        return [group["params"] for group in self.inner.param_groups]

    @property
    def params(self) -> list[Tensor]:
        return [p for group in self.groups for p in group]

    @property
    def has_gradients(self) -> bool:
        return any(p.grad is not None for p in self.params)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.clear(set_to_none)
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

    def after_backward(self, several: bool, by_hand: bool = False) -> None:
        """Autograd has already done everything else."""
        self.ran = self.ran or not by_hand

    def discard(self) -> None:
        for p in self.params:
            p.grad = None
        self.stale = self.unscaled = self.found = False

    @contextmanager
    def accumulate(self, weight: float | None = None) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(weight=weight)

    @contextmanager
    def ignore(self) -> Iterator[None]:
        yield

    def add_param_group(self, group: dict[str, Any]) -> None:
        self.inner.add_param_group(group)

    def close(self) -> None:
        """There is nothing to restore."""

    def state_dict(self) -> dict[str, Any]:
        gradients = [None if p.grad is None else p.grad.clone() for p in self.params]
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


@dataclass
class Window:
    """What the micro-batches of one window left: sums by parameter index, their number and total weight."""

    sums: dict[int, ExactSum] = field(default_factory=dict)
    count: int = 0
    weight: float = 0.0

    def copy(self) -> Window:
        sums = {
            i: ExactSum(s.value.clone(), s.magnitude.clone(), s.terms, s.eps, s.coarse)
            for i, s in self.sums.items()
        }
        return Window(sums, self.count, self.weight)


class Collector(StockManual):
    """Every loop and reduction, by taking each gradient out of `p.grad`."""

    def __init__(self, inner: torch.optim.Optimizer, loop: Loop) -> None:
        super().__init__(inner, loop)
        self.window = Window()
        self.micro: dict[int, ExactSum] = {}
        self.context: SimpleNamespace | None = None
        self.dirty = False  # a backward has run since the last step
        self.several = False  # low-precision sums may have been made in p.grad itself
        self.finite = True  # else the last update was dropped, or the case has diverged
        self.edits = 1.0  # what the user multiplied the visible final gradient by

    @property
    def size(self) -> int:
        return self.loop.size(self.num_updates) if self.loop.counted else 0

    @property
    def mid_window(self) -> bool:
        return bool(self.window.count or self.dirty)

    @property
    def micro_step(self) -> int:
        return self.window.count

    @property
    def will_update(self) -> bool:
        return not self.loop.counted or self.window.count == self.size - 1

    @property
    def has_gradients(self) -> bool:
        return super().has_gradients or bool(self.window.sums or self.micro)

    def unscale(self) -> None:
        """Sums are kept unscaled: this only tells what `p.grad` shows."""
        self.unscaled = not self.loop.counted or (self.dirty and self.will_update)

    def take(self, index: int, p: Tensor, gradient: Tensor) -> None:
        magnitude = spread(gradient) / self.loss_scale
        gradient = dense(gradient.double()) / self.loss_scale
        if index not in self.micro:
            self.micro[index] = ExactSum.like(gradient)
        kept = self.loop.accumulate_dtype or (torch.float32 if p.dtype in LOW else p.dtype)
        eps = max(torch.finfo(kept).eps, torch.finfo(torch.float32).eps if p.dtype in LOW else 0.0)
        coarse = 0.0
        if self.several and gradient.numel():
            largest = gradient.abs().where(gradient.isfinite(), 0.0).max().item()
            coarse = 4 * torch.finfo(p.dtype).eps * largest  # summed in p.grad itself
        self.micro[index].add(gradient, magnitude, 1, eps, coarse)

    def after_backward(self, several: bool, by_hand: bool = False) -> None:
        """several: this backward may have delivered a parameter's gradient more than once."""
        self.several = self.several or several or self.dirty
        self.collect(everything=False)
        self.dirty = True

    def collect(self, everything: bool) -> None:
        """Takes `p.grad`; at the end of a micro-batch also where post-accumulate hooks look at it."""
        for index, p in enumerate(self.params):
            hooked = bool(p._post_accumulate_grad_hooks)
            if p.grad is not None and (everything or not hooked):
                self.take(index, p, p.grad)
                p.grad = None

    @contextmanager
    def accumulate(self, weight: float | None = None) -> Iterator[SimpleNamespace]:
        self.context = SimpleNamespace(weight=weight)
        try:
            yield self.context
        except BaseException:
            self.context = None
            raise
        if not self.loop.counted:
            self.end_micro_batch()

    def end_micro_batch(self) -> None:
        self.collect(everything=True)
        weight = self.context.weight if self.loop.weighs and self.context is not None else 1.0
        factor = {"weighted": weight, "normalized": 1.0 if weight else 0.0}.get(self.loop.reduction, 1.0)
        if factor:
            for index, micro in self.micro.items():
                total = self.window.sums.setdefault(index, ExactSum.like(micro.value))
                scaled = micro.value * factor, micro.magnitude * factor
                total.add(*scaled, micro.terms + 1, micro.eps, micro.coarse * factor)
        self.window.count += 1
        self.window.weight += weight
        self.micro, self.context, self.dirty, self.several = {}, None, False, False

    def scale(self) -> float:
        if self.loop.reduction == "mean":
            return 1.0 / self.window.count
        return 1.0 / self.window.weight if self.loop.weighs else 1.0

    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.has_updated = False
        if self.loop.counted or not self.loop.needs_context:
            self.collect(everything=True)
            if self.dirty or self.micro:
                self.end_micro_batch()
            elif self.loop.counted:
                return loss
        if not self.loop.counted or self.window.count == self.size:
            self.update()
        return loss

    def flush(self) -> None:
        self.has_updated = False
        if self.window.count:
            self.update()

    def update(self) -> None:
        scale, sums = self.scale() * self.edits, self.window.sums
        self.finite = all_finite(total.value for total in sums.values())
        self.found = self.loop.watches and not self.finite
        finals = [self.final(index, p, sums.get(index), scale) for index, p in enumerate(self.params)]
        for p, final in zip(self.params, finals, strict=True):
            p.grad = None if final is None else final.to(p.dtype)
        if not self.found:
            self.apply(finals)
        self.end_update()
        self.window, self.edits = Window(), 1.0

    def apply(self, finals: list[Tensor | None]) -> None:
        """The bare optimizer's step, from gradients that are in `p.grad` already."""
        self.inner.step()

    def wide(self, p: Tensor) -> torch.dtype:
        """The dtype that the bare optimizer works in."""
        return p.dtype

    def final(self, index: int, p: Tensor, total: ExactSum | None, scale: float) -> Tensor | None:
        """The gradient to update from, or what shows of one that is dropped."""
        dtype = self.wide(p)
        if self.witness is None:
            return None if total is None else torch.empty_like(p, dtype=dtype).copy_(total.value * scale)
        got = self.witness[index]
        where = f"update {self.num_updates}, parameter {index} {tuple(p.shape)}"
        if got is None or total is None:
            weightless = total is None and self.loop.weighs and got is not None and not dense(got).any()
            if (got is None) != (total is None) and not weightless:
                raise Mismatch(f"{where}: gradient is {'None' if got is None else 'there'} and must not be")
            return None if got is None else got.detach().to(dtype, copy=True)
        if self.finite:
            total.check(got, scale, where)
        return got.detach().to(dtype, copy=True)

    def preview(self, index: int) -> tuple[ExactSum | None, float]:
        """What `p.grad` must show between the backward of the window's last micro-batch and its step."""
        weight = self.context.weight if self.loop.weighs and self.context is not None else 1.0
        total, micro = self.window.sums.get(index), self.micro.get(index)
        both = ExactSum.like((total or micro).value) if total or micro else None
        for part, factor in ((total, 1.0), (micro, weight if self.loop.reduction == "weighted" else 1.0)):
            if part is not None and both is not None and factor:
                scaled = part.value * factor, part.magnitude * factor
                both.add(*scaled, part.terms + 1, part.eps, part.coarse * factor)
        count, weights = self.window.count + 1, self.window.weight + weight
        shown = 1.0 if self.unscaled else self.loss_scale
        return both, shown * {"mean": 1.0 / count, "sum": 1.0}.get(self.loop.reduction, 1.0 / weights)

    def zero_grad(self, set_to_none: bool = True) -> None:
        inside = self.loop.counted and self.window.count > 0 and not self.stale
        self.clear(set_to_none or inside)
        self.several = self.several or not set_to_none  # gradients are added to the zeros in p.grad
        if not self.loop.counted and not self.stale:
            for index, p in enumerate(self.params):
                summed = index in self.window.sums or index in self.micro
                p.grad = torch.zeros_like(p) if summed and not set_to_none else None
            self.window, self.micro, self.dirty = Window(), {}, False
        self.stale = self.unscaled = self.found = False

    def discard(self) -> None:
        super().discard()
        self.window, self.micro, self.context, self.edits = Window(), {}, None, 1.0
        self.dirty = self.stale = self.several = False

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "window": self.window.copy(), "updates": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self.window = state["window"].copy()
        self.num_updates, self.num_skipped = state["updates"]
        self.micro, self.dirty, self.stale, self.has_updated = {}, False, False, False
        self.found = False
