"""An oracle for all loops and reductions that takes each gradient out of `p.grad`.

`Collector` keeps exact sums in float64. At an update it puts the reduced gradient into `p.grad` for the inner
optimizer. If its sums may differ from the wrapper's by rounding, `witness` holds the wrapper's gradients.
`Collector` checks them against the exact ones and gives them to the inner optimizer, so that parameters and
state stay bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .oracle import LOW, ExactSum, Loop, Mismatch, StockManual, dense, spread
from .scaling import all_finite


@dataclass
class Window:
    """The sums of a window by parameter index, its number of micro-batches, and their total weight."""

    sums: dict[int, ExactSum] = field(default_factory=dict)
    count: int = 0
    weight: float = 0.0

    def copy(self) -> Window:
        return Window({i: total.copy() for i, total in self.sums.items()}, self.count, self.weight)


class Collector(StockManual):
    def __init__(self, inner: torch.optim.Optimizer, loop: Loop) -> None:
        super().__init__(inner, loop)
        self.window = Window()
        self.micro: dict[int, ExactSum] = {}
        self.context: SimpleNamespace | None = None
        self.dirty = False  # a backward has run since the last step
        self.several = False  # low-precision sums may have been made in p.grad itself
        self.rounds = False  # they are, until the next update: p.grad was left so and not cleared
        self.found_before = False  # inf or nan, by `unscale_`, whatever has been written since
        self.finite = True  # else the last update was dropped, or the case has diverged
        self.shown: list[Tensor | None] = []  # what the last update left in p.grad
        self.left: list[Tensor | None] = []  # the same, as the wrapper shows it
        self.norm: float | None = None  # of the last update's gradient before it was clipped
        self.slack = 0.0  # how far that may be off, relative to it

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
        """Record that `p.grad` is unscaled. The sums always are."""
        self.unscaled = not self.loop.counted or (self.dirty and self.will_update)
        sums = [self.preview(index)[0] for index in range(len(self.params))] if self.unscaled else []
        self.found_before = not all_finite(total.value for total in sums if total is not None)

    def eps(self, p: Tensor) -> float:
        """Return eps of the coarsest dtype that the parameter's sum may have."""
        kept = self.loop.accumulate_dtype or (torch.float32 if p.dtype in LOW else p.dtype)
        return max(torch.finfo(kept).eps, torch.finfo(torch.float32).eps if p.dtype in LOW else 0.0)

    def take(self, index: int, p: Tensor, gradient: Tensor) -> None:
        magnitude = spread(gradient) / self.loss_scale
        gradient = dense(gradient.double()) / self.loss_scale
        if index not in self.micro:
            self.micro[index] = ExactSum.like(gradient)
        eps = self.eps(p)
        coarse = 0.0
        if (self.several or self.rounds) and gradient.numel():
            largest = gradient.abs().where(gradient.isfinite(), 0.0).max().item()
            coarse = 4 * max(eps, torch.finfo(p.dtype).eps) * largest  # each added by itself
        self.micro[index].add(gradient, magnitude, 1, eps, coarse)

    def before_backward(self) -> None:
        """Drop a counted loop's used gradients, but not the user's. A manual loop continues with p.grad."""
        super().before_backward()
        if not self.stale:
            return
        self.stale = self.found = False
        self.drop_spent()
        for index, p in enumerate(self.params if not self.loop.counted else []):
            gradient, p.grad = self.left[index], None
            if gradient is None:
                continue
            value, magnitude = dense(gradient.double()) / self.loss_scale, spread(gradient) / self.loss_scale
            coarse = 0.0
            if gradient.dtype in LOW and value.numel():
                self.rounds = True
                coarse = 16 * torch.finfo(gradient.dtype).eps * value.abs().max().item()
            self.window.sums[index] = ExactSum(value, magnitude, 1, self.eps(p), coarse)

    def spent(self, p: Tensor) -> bool:
        """Whether an update has used `p.grad`."""
        return self.loop.counted and any(p.grad is shown for shown in self.shown if shown is not None)

    def drop_spent(self) -> None:
        for p in self.params:
            if self.spent(p):
                p.grad = None

    def put(self, index: int, value: float) -> None:
        """Replace a used gradient of a counted loop with one of the user's."""
        self.before_backward()
        self.params[index].grad = torch.full_like(self.params[index], value)
        self.after_backward(several=True)

    def edit(self, index: int, change: str, road: str, value: float) -> None:
        total, unit = self.preview(index)
        if total is None:
            return
        self.micro.pop(index, None)
        if change == "remove":
            self.window.sums.pop(index, None)
            return
        total.change(change, value, unit)
        self.window.sums[index] = total

    def regroup(self, before: list[Tensor]) -> None:
        """Move sums with their parameters after the user has changed the groups."""
        places = {id(p): index for index, p in enumerate(self.params)}
        for sums in (self.window.sums, self.micro):
            kept = {id(before[index]): total for index, total in sums.items()}
            sums.clear()
            sums.update({places[key]: total for key, total in kept.items() if key in places})

    def after_backward(self, several: bool, by_hand: bool = False) -> None:
        """Collect gradients. `several`: the backward may deliver a parameter's gradient more than once."""
        self.several = self.several or several or self.dirty
        self.collect(everything=False)
        self.dirty = True

    def collect(self, everything: bool) -> None:
        """Take `p.grad`. If a post-accumulate hook reads it, wait for the end of the micro-batch."""
        for index, p in enumerate(self.params):
            hooked = bool(p._post_accumulate_grad_hooks)
            if p.grad is not None and (everything or not hooked) and not self.spent(p):
                self.take(index, p, p.grad)
                p.grad = None

    @contextmanager
    def ignore(self) -> Iterator[None]:
        """Leave nothing in p.grad, because p.grad is empty between backwards here."""
        with super().ignore():
            yield
        self.ignored.clear(self.params)

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
        factor = self.factor(weight)
        if factor:
            for index, micro in self.micro.items():
                total = self.window.sums.setdefault(index, ExactSum.like(micro.value))
                scaled = micro.value * factor, micro.magnitude * factor
                total.add(*scaled, micro.terms + 1, micro.eps, micro.coarse * factor)
        self.window.count += 1
        self.window.weight += weight
        self.micro, self.context, self.dirty, self.several = {}, None, False, False

    def factor(self, weight: float) -> float:
        """Return the factor of a micro-batch's gradients."""
        return {"weighted": weight, "normalized": 1.0 if weight else 0.0}.get(self.loop.reduction, 1.0)

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
        if self.dirty:
            self.end_micro_batch()
        if self.window.count:
            self.update()

    def update(self) -> None:
        scale, sums = self.scale(), self.window.sums
        self.finite = all_finite(total.value for total in sums.values())
        self.found = self.loop.watches and (self.found_before or not self.finite)
        self.found_before = False
        scale *= self.clip(scale)
        finals = [self.final(index, p, sums.get(index), scale) for index, p in enumerate(self.params)]
        for p, final in zip(self.params, finals, strict=True):
            p.grad = None if final is None else final.to(p.dtype)
        if not self.found:
            self.apply(finals)
        self.shown = [p.grad for p in self.params]
        left = self.shown if self.witness is None else self.witness
        self.left = [None if gradient is None else gradient.detach().clone() for gradient in left]
        self.end_update()
        self.window, self.rounds = Window(), False

    def clip(self, scale: float) -> float:
        """Return the clipping factor of `clip_grad_norm_`."""
        self.norm, self.slack = None, 0.0
        totals = self.window.sums.values()
        if not (self.loop.clips and self.finite and totals):
            return 1.0
        kind = self.loop.norm_type
        values = torch.cat([(total.value * scale).flatten() for total in totals])
        errors = torch.cat([total.rounding(scale).flatten() for total in totals])
        self.norm = torch.linalg.vector_norm(values, kind).item()
        error = torch.linalg.vector_norm(errors, kind).item()
        eps = max(total.eps for total in totals)
        self.slack = error / max(self.norm, 1e-30) + values.numel() * max(eps, torch.finfo(torch.float32).eps)
        return min(1.0, self.loop.clip / (self.norm + 1e-6))

    def apply(self, finals: list[Tensor | None]) -> None:
        """Run the inner optimizer's step. The gradients are already in `p.grad`."""
        self.inner.step()

    def wide(self, p: Tensor) -> torch.dtype:
        """Return the dtype of the inner optimizer's parameter."""
        return p.dtype

    def final(self, index: int, p: Tensor, total: ExactSum | None, scale: float) -> Tensor | None:
        """Return the gradient for the update, or the one that p.grad shows after a skipped update."""
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
            total.check(got, scale, where, self.slack)
        return got.detach().to(dtype, copy=True)

    def preview(self, index: int) -> tuple[ExactSum | None, float]:
        """Return what `p.grad` must show between the window's last backward and its step."""
        weight = self.context.weight if self.loop.weighs and self.context is not None else 1.0
        total, micro = self.window.sums.get(index), self.micro.get(index)
        both = ExactSum.like((total or micro).value) if total or micro else None
        for part, factor in ((total, 1.0), (micro, self.factor(weight))):
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
        self.shown = []
        if not self.loop.counted and not self.stale:
            for index, p in enumerate(self.params):
                summed = index in self.window.sums or index in self.micro
                p.grad = torch.zeros_like(p) if summed and not set_to_none else None
            self.window, self.micro, self.dirty, self.rounds = Window(), {}, False, False
        self.stale = self.unscaled = self.found = False

    def discard(self) -> None:
        super().discard()
        self.window, self.micro, self.context = Window(), {}, None
        self.dirty = self.stale = self.several = False

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "window": self.window.copy(), "updates": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self.window = state["window"].copy()
        self.num_updates, self.num_skipped = state["updates"]
        self.micro, self.dirty, self.stale, self.has_updated = {}, False, False, False
        self.found = False
        for p in self.params if self.loop.counted else ():
            p.grad = None
