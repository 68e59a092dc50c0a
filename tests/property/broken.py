"""Wrappers with one mistake each, which the property test has to find out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .naive import Exposing, Naive
from .oracle import Loop, dense
from .scaling import PlainScaler, all_finite


class ForgetsTheRemainder(Naive):
    """Divides a part-filled window by the full window's size."""

    events = ("flush",)

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

    events = ("freeze",)

    def update(self) -> None:
        for index, p in enumerate(self.params):
            if not p.requires_grad:
                self.sums.pop(index, None)
        super().update()


class LosesOnRestart(Naive):
    events = ("restore",)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state | {"sums": {}})


class LosesOnCopy(Naive):
    events = ("copy",)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"sums": {}})


class AddsIgnored(Naive):
    """Takes a backward under `ignore()` for a micro-batch."""

    events = ("ignored",)

    @contextmanager
    def ignore(self) -> Iterator[None]:
        yield
        self.collect(1.0)


class LeavesIgnored(Naive):
    """Leaves what a backward under `ignore()` has stored where the next one adds to it."""

    events = ("ignored",)

    @contextmanager
    def ignore(self) -> Iterator[None]:
        yield


class KeepsDiscarded(Naive):
    events = ("discard",)

    def discard(self) -> None:
        self.optimizer.zero_grad()


class MissesNewGroups(Naive):
    events = ("add_group",)

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
    events = ("restore",)

    feature = "masters"

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.masters = []


class OverwritesWrittenParameters(Naive):
    """Does not see that somebody else has written a parameter."""

    events = ("write",)

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


class CountsTheSpent(Naive):
    """Its next window begins with what the last update has consumed, unless somebody clears it."""

    def spent(self, p: Tensor) -> bool:
        return not self.loop.counted and super().spent(p)


class CountsWhatIsWritten(Naive):
    """Takes a spent gradient that somebody has written to for a new one."""

    events = ("edit_spent",)

    def update(self) -> None:
        super().update()
        self.copies = {id(final): final.clone() for final in self.final if final is not None}

    def spent(self, p: Tensor) -> bool:
        known = super().spent(p)
        return known and (not self.loop.counted or torch.equal(dense(self.copies[id(p.grad)]), dense(p.grad)))


class DoesNotClip(Naive):
    feature = "clips"

    def clip(self) -> float:
        return 1.0


class ClipsByTheFirst(Naive):
    feature = "clips"

    def clip(self) -> float:
        sums = self.sums
        self.sums = dict(list(sums.items())[:1])
        factor = super().clip()
        self.sums = sums
        return factor


class LosesTheFrozenOnRestart(Naive):
    """Its checkpoints hold no sums of frozen parameters."""

    events, soon = ("freeze", "copy"), 3

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return state | {"sums": {i: s for i, s in state["sums"].items() if self.params[i].requires_grad}}


class MeasuresTooSoon(Exposing):
    """Takes the norm at the end of the backward."""

    feature = "clips"
    early = 1.0

    def after_backward(self, several: bool, by_hand: bool = False) -> None:
        super().after_backward(several, by_hand)
        if self.shows:
            self.micro_step += 1
            self.early = super().clip()
            self.micro_step -= 1

    def clip(self) -> float:
        early, self.early = self.early, 1.0
        return early


class UpdatesFromItsOwn(Exposing):
    """What it shows is a copy."""

    def take_back(self) -> None:
        for p in self.params:
            p.grad = None if self.shows else p.grad
        self.shows = False


class BringsBackTheRemoved(Exposing):
    """Updates from its sum where the user has set `p.grad` to None."""

    change = "remove"

    def take_back(self) -> None:
        sums = self.sums if self.shows else {}
        super().take_back()
        self.sums = sums | self.sums


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
    LeavesIgnored,
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
    CountsTheSpent,
    CountsWhatIsWritten,
    DoesNotClip,
    ClipsByTheFirst,
    LosesTheFrozenOnRestart,
    MeasuresTooSoon,
    UpdatesFromItsOwn,
    BringsBackTheRemoved,
)
