"""A hand-written wrapper of the obvious kind, which proves the harness: it must pass, its broken copies fail.

It collects `p.grad` at `step()`, so it cannot show the final gradient before that (`exposes=False`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .oracle import LOW, Loop
from .scaling import PlainScaler, all_finite


class Naive:
    scaler_kind = PlainScaler
    #: The feature of a loop without which this one does nothing wrong.
    feature: str | None = None

    def __init__(self, optimizer: torch.optim.Optimizer, loop: Loop) -> None:
        self.optimizer, self.loop = optimizer, loop
        self.sums: dict[int, Tensor] = {}
        self.micro_step = self.num_updates = self.num_skipped = 0
        self.weight = 0.0
        self.loss_scale = 1.0
        self.found = False
        self.masters: list[Tensor] = []
        self.has_updated = False
        self.context: SimpleNamespace | None = None
        self.final: list[Tensor | None] = []  # the gradients that the last update left in p.grad

    def close(self) -> None:
        """There is nothing to restore."""

    def unscale(self) -> None:
        """That is done at the update, whether it is asked for or not."""

    @contextmanager
    def widened(self) -> Iterator[None]:
        """While inside, the parameters are their masters."""
        low = [p.data for p in self.params] if self.loop.masters else []
        self.masters += [data.float() for data in low[len(self.masters) :]]
        for p, data, master in zip(self.params, low, self.masters, strict=False):
            p.data = master.copy_(torch.where(master.to(data.dtype) == data, master, data.float()))
            state = self.optimizer.state.get(p, {})
            state |= {name: v.float() for name, v in state.items() if torch.is_tensor(v)}
        yield
        for p, data, master in zip(self.params, low, self.masters, strict=False):
            p.data = data.copy_(master)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @property
    def size(self) -> int:
        return self.loop.size(self.num_updates)

    @property
    def accumulator_bytes(self) -> int:
        return sum(s.numel() * s.element_size() for s in self.sums.values())

    @property
    def will_update(self) -> bool:
        return not self.loop.counted or self.micro_step == self.size - 1

    @contextmanager
    def accumulate(self, weight: float | None = None) -> Iterator[SimpleNamespace]:
        self.context = SimpleNamespace(weight=weight)
        yield self.context
        if not self.loop.counted:
            self.end_micro_batch()

    @contextmanager
    def ignore(self) -> Iterator[None]:
        yield

    def ran(self) -> bool:
        shown = {id(gradient) for gradient in self.final}
        return any(p.grad is not None and id(p.grad) not in shown for p in self.params)

    def collect(self, weight: float) -> None:
        factor = weight if self.loop.reduction == "weighted" else 1.0
        for index, p in enumerate(self.params):
            if p.grad is None:
                continue
            gradient = p.grad.detach().to(torch.float32 if p.dtype in LOW else p.dtype)
            gradient = (gradient.to_dense() if gradient.is_sparse else gradient) * factor
            p.grad = None
            if weight == 0 and self.loop.weighs:
                continue
            self.sums[index] = gradient if index not in self.sums else self.sums[index] + gradient

    def end_micro_batch(self) -> None:
        weight = self.context.weight if self.loop.weighs and self.context is not None else 1.0
        self.collect(weight)
        self.micro_step += 1
        self.weight += weight
        self.context = None

    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.has_updated = False
        if self.loop.counted:
            if not self.ran():
                return loss
            self.end_micro_batch()
        elif not self.loop.needs_context:
            self.end_micro_batch()
        if not self.loop.counted or self.micro_step == self.size:
            self.update()
        return loss

    def flush(self) -> None:
        self.has_updated = False
        if self.micro_step:
            self.update()

    def reduced(self, total: Tensor) -> Tensor:
        divisor = {"mean": self.micro_step, "sum": 1}.get(self.loop.reduction, self.weight)
        return total / divisor / self.loss_scale

    def drops(self) -> bool:
        return self.loop.watches and not all_finite(self.sums.values())

    def update(self) -> None:
        self.found = self.drops()
        with self.widened():
            for index, p in enumerate(self.params):
                total = self.sums.get(index)
                p.grad = None if total is None else torch.empty_like(p).copy_(self.reduced(total))
            if not self.found:
                self.optimizer.step()
        self.num_updates += 1
        self.num_skipped += self.found
        self.has_updated = True
        self.final = [p.grad for p in self.params]
        self.clear()

    def clear(self) -> None:
        self.sums, self.micro_step, self.weight = {}, 0, 0.0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none or not self.final)
        if not self.loop.counted and not self.final:
            for index in () if set_to_none else self.sums:
                self.params[index].grad = torch.zeros_like(self.params[index])
            self.clear()
        self.final = []

    def discard(self) -> None:
        self.optimizer.zero_grad()
        self.clear()
        self.context = None

    def add_param_group(self, group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(group)

    def state_dict(self) -> dict[str, Any]:
        counts = self.micro_step, self.num_updates, self.num_skipped, self.weight
        with self.widened():
            masters = [master.clone() for master in self.masters]
        own = {"sums": dict(self.sums), "counts": counts, "masters": masters}
        return {"inner": self.optimizer.state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self.widened():
            self.optimizer.load_state_dict(state["inner"])
        self.sums, self.masters = dict(state["sums"]), [master.clone() for master in state["masters"]]
        self.micro_step, self.num_updates, self.num_skipped, self.weight = state["counts"]
        self.final, self.has_updated = [], False


class ForgetsTheRemainder(Naive):
    """Divides a part-filled window by the full window's size."""

    def reduced(self, total: Tensor) -> Tensor:
        return (
            total / self.size
            if self.loop.counted and self.loop.reduction == "mean"
            else super().reduced(total)
        )


class FillsWithZeros(Naive):
    """Gives zeros to parameters that had no gradient."""

    def update(self) -> None:
        for index, p in enumerate(self.params):
            self.sums.setdefault(index, torch.zeros_like(p))
        super().update()


class ClearsTooSoon(Naive):
    """Its `zero_grad` drops a counted window's sums."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.sums = {}


class CountsEmptySteps(Naive):
    def ran(self) -> bool:
        return True


class KeepsTheGradient(Naive):
    """Leaves the last window's sums in the next."""

    def clear(self) -> None:
        sums = self.sums
        super().clear()
        self.sums = sums


class SumsInLowPrecision(Naive):
    def collect(self, weight: float) -> None:
        super().collect(weight)
        for index, p in enumerate(self.params):
            if index in self.sums:
                self.sums[index] = self.sums[index].to(p.dtype).float()


class IgnoresWeights(Naive):
    def reduced(self, total: Tensor) -> Tensor:
        return total / max(self.micro_step, 1) if self.loop.weighs else super().reduced(total)


class AddsWeightlessNan(Naive):
    def collect(self, weight: float) -> None:
        super().collect(weight if weight else 1e-30)


class SkipsFrozen(Naive):
    """Drops what a parameter had summed before it was frozen."""

    def update(self) -> None:
        for index, p in enumerate(self.params):
            if not p.requires_grad:
                self.sums.pop(index, None)
        super().update()


class LosesOnRestart(Naive):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state | {"sums": {}})


class LosesOnCopy(Naive):
    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"sums": {}})


class AddsIgnored(Naive):
    """Takes a backward under `ignore()` for a micro-batch."""

    @contextmanager
    def ignore(self) -> Iterator[None]:
        yield
        self.collect(1.0)


class KeepsDiscarded(Naive):
    def discard(self) -> None:
        self.optimizer.zero_grad()


class MissesNewGroups(Naive):
    def __init__(self, optimizer: torch.optim.Optimizer, loop: Loop) -> None:
        super().__init__(optimizer, loop)
        self.first_groups = len(optimizer.param_groups)

    def collect(self, weight: float) -> None:
        for group in self.param_groups[self.first_groups :]:
            for p in group["params"]:
                p.grad = None
        super().collect(weight)


class RoundsMasters(Naive):
    feature = "masters"

    def update(self) -> None:
        super().update()
        self.masters = [m.to(p.dtype).float() for m, p in zip(self.masters, self.params, strict=False)]


class StepsLowParameters(Naive):
    """Has no masters at all."""

    feature = "masters"

    @contextmanager
    def widened(self) -> Iterator[None]:
        self.masters = [p.detach().float() for p in self.params]
        yield


class LosesMastersOnRestart(Naive):
    feature = "masters"

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.masters = []


class OverwritesWrittenParameters(Naive):
    """Does not see that somebody else has written a parameter."""

    feature = "masters"

    @contextmanager
    def widened(self) -> Iterator[None]:
        for p, master in zip(self.params, self.masters, strict=False):
            p.data.copy_(master)
        with super().widened():
            yield


class UpdatesFromInf(Naive):
    def drops(self) -> bool:
        return False


class LooksAtOneGradient(Naive):
    def drops(self) -> bool:
        return self.loop.watches and not all_finite(list(self.sums.values())[:1])


class DecaysWhatItDrops(Naive):
    """Steps with gradients of zero, which moves momentum and counts a step."""

    def update(self) -> None:
        dropped = self.drops()
        if dropped:
            self.sums = {index: torch.zeros_like(total) for index, total in self.sums.items()}
        super().update()
        self.found, self.num_skipped = dropped, self.num_skipped + dropped


class CountsNoSkips(Naive):
    def update(self) -> None:
        super().update()
        self.num_skipped = 0


class TellsOfNoInf(Naive):
    """Drops the update, and the scaler does not hear of it."""

    def update(self) -> None:
        super().update()
        self.found = False


class UpdatesFromScaledGradients(Naive):
    def reduced(self, total: Tensor) -> Tensor:
        return super().reduced(total) * self.loss_scale


class HastyScaler(PlainScaler):
    def note(self) -> None:
        self.found, self.ready = self.optimizer.found, False


class ChangesTheScaleInMidWindow(Naive):
    scaler_kind = HastyScaler


class NeverGrows(PlainScaler):
    def update(self) -> None:
        super().update()
        self.successes = 0


class ScalesByTooLittle(Naive):
    scaler_kind = NeverGrows


BROKEN = (
    ForgetsTheRemainder,
    FillsWithZeros,
    ClearsTooSoon,
    CountsEmptySteps,
    KeepsTheGradient,
    SumsInLowPrecision,
    IgnoresWeights,
    AddsWeightlessNan,
    SkipsFrozen,
    LosesOnRestart,
    LosesOnCopy,
    AddsIgnored,
    KeepsDiscarded,
    MissesNewGroups,
    RoundsMasters,
    StepsLowParameters,
    LosesMastersOnRestart,
    OverwritesWrittenParameters,
    UpdatesFromInf,
    LooksAtOneGradient,
    DecaysWhatItDrops,
    CountsNoSkips,
    TellsOfNoInf,
    UpdatesFromScaledGradients,
    ChangesTheScaleInMidWindow,
    ScalesByTooLittle,
)
