"""A hand-written wrapper of the obvious kind, to prove the harness: it passes, its copies in `broken` fail.

It collects `p.grad` at `step()`, so it cannot show the final gradient before that (`exposes=False`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .ignoring import Ignoring
from .oracle import LOW, Loop, dense
from .scaling import PlainScaler, all_finite


class Naive:
    scaler_kind = PlainScaler
    #: The feature of a loop without which this one does nothing wrong.
    feature: str | None = None
    #: The change of `p.grad` without which it does nothing wrong.
    change: str | None = None
    #: The kinds of events without which it does nothing wrong.
    events: tuple[str, ...] = ()
    #: Within how many events the second of those must come after the first.
    soon: int | None = None

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
    def state(self) -> dict[Tensor, Any]:
        return self.optimizer.state

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
        self.before_backward()
        ignored = Ignoring()
        with ignored.around(self.params):
            yield
        ignored.clear(self.params)

    def spent(self, p: Tensor) -> bool:
        return p.grad is not None and any(p.grad is gradient for gradient in self.final)

    def ran(self) -> bool:
        return any(p.grad is not None and not self.spent(p) for p in self.params)

    def before_backward(self) -> None:
        for index, p in enumerate(self.params):
            if self.spent(p):
                if not self.loop.counted:
                    self.sums[index] = p.grad
                p.grad = None
        self.final = []

    def regroup(self, before: list[Tensor]) -> None:
        """The groups have been changed by hand: what is kept by index follows its parameter."""
        places = {id(p): index for index, p in enumerate(self.params)}
        sums = {places.get(id(before[index])): total for index, total in self.sums.items()}
        self.sums = {index: total for index, total in sums.items() if index is not None}
        masters = dict(zip(map(id, before), self.masters, strict=False))
        if masters:
            kept = [masters.get(id(p)) for p in self.params]
            self.masters = [
                p.detach().float() if m is None or m.shape != p.shape else m
                for p, m in zip(self.params, kept, strict=True)
            ]

    def collect(self, weight: float) -> None:
        factor = weight if self.loop.reduction == "weighted" else 1.0
        for index, p in enumerate(self.params):
            if p.grad is None or (self.loop.counted and self.spent(p)):
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

    def holds_gradients(self) -> bool:
        """Zeros that `zero_grad(set_to_none=False)` has left are none."""
        return any(
            p.grad is not None and bool(dense(p.grad).any()) and not self.spent(p) for p in self.params
        )

    def flush(self) -> None:
        self.has_updated = False
        if self.holds_gradients():
            self.end_micro_batch()
        if self.micro_step:
            self.update()

    def reduced(self, total: Tensor) -> Tensor:
        divisor = {"mean": self.micro_step, "sum": 1}.get(self.loop.reduction, self.weight)
        return total / divisor / self.loss_scale

    def clip(self) -> float:
        finals = [self.reduced(total).double().flatten() for total in self.sums.values()]
        if not self.loop.clips or not finals:
            return 1.0
        norm = torch.linalg.vector_norm(torch.cat(finals), self.loop.norm_type).item()
        return min(1.0, self.loop.clip / (norm + 1e-6))

    def drops(self) -> bool:
        return self.loop.watches and not all_finite(self.sums.values())

    def update(self) -> None:
        self.found, clip = self.drops(), self.clip()
        with self.widened():
            for index, p in enumerate(self.params):
                total = self.sums.get(index)
                p.grad = None if total is None else torch.empty_like(p).copy_(self.reduced(total) * clip)
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
        for p in self.params if self.loop.counted else ():
            p.grad = None


class Exposing(Naive):
    """Shows the final gradient in `p.grad` between a counted window's last backward and its update.

    For means and sums of parameters that are not cast, without loss scaling.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, loop: Loop) -> None:
        super().__init__(optimizer, loop)
        self.shows = self.backwards = False

    @staticmethod
    def takes(case: Any) -> bool:
        loop, model = case.loop, case.model
        plain = loop.reduction in ("mean", "sum") and loop.accumulate_dtype is None and loop.scaling is None
        return loop.counted and plain and model.dtype in ("float32", "float64") and model.front != "sparse"

    def before_backward(self) -> None:
        super().before_backward()
        self.take_back()

    def after_backward(self, several: bool, by_hand: bool = False) -> None:
        if by_hand or self.shows:
            return
        self.collect(1.0)
        self.backwards = True
        if not self.will_update or self.loop.private:
            return
        self.shows = True
        for index, p in enumerate(self.params):
            total = self.sums.get(index)
            p.grad = None if total is None else (total / self.divisor).to(p.dtype)

    @property
    def divisor(self) -> int:
        return self.micro_step + 1 if self.loop.reduction == "mean" else 1

    def take_back(self) -> None:
        """The sums are what stands in `p.grad`, whoever wrote it."""
        if self.shows:
            self.sums = {i: p.grad * self.divisor for i, p in enumerate(self.params) if p.grad is not None}
            for p in self.params:
                p.grad = None
        self.shows = False

    def ran(self) -> bool:
        return self.backwards or super().ran()

    def holds_gradients(self) -> bool:
        return self.backwards or super().holds_gradients()

    def end_micro_batch(self) -> None:
        super().end_micro_batch()
        self.backwards = False

    def collect(self, weight: float) -> None:
        if self.shows:
            self.take_back()
        else:
            super().collect(weight)

    def discard(self) -> None:
        super().discard()
        self.shows = self.backwards = False
