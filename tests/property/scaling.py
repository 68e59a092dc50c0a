"""Loss scaling as torch documents it, with a Python number and a count."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scaling:
    """Which scaler a case uses: "torch" or "fusedacc". Scales are powers of two, which round nothing."""

    kind: str
    init_scale: float
    growth_interval: int


class PlainScaler:
    """A GradScaler for one oracle, which knows the scale of each loss and whether gradients are finite."""

    def __init__(self, scaling: Scaling, optimizer: Any) -> None:
        self.scaling, self.optimizer = scaling, optimizer
        self.value, self.successes = scaling.init_scale, 0
        self.ready = False  # a loss has been scaled since the last update
        self.found: bool | None = None  # None: no update since the last `update()`

    def scale(self, loss: Tensor) -> Tensor:
        self.optimizer.loss_scale, self.ready = self.value, True
        return loss * torch.tensor(self.value)

    def unscale_(self, optimizer: Any) -> None:
        optimizer.unscale()

    def step(self, optimizer: Any) -> None:
        optimizer.step()
        self.note()

    def flush(self, optimizer: Any) -> None:
        optimizer.flush()
        self.note()

    def note(self) -> None:
        if self.optimizer.has_updated:
            self.found, self.ready = self.optimizer.found, False

    def update(self) -> None:
        if self.found is None:
            return
        self.successes = 0 if self.found else self.successes + 1
        if self.found:
            self.value *= 0.5
        elif self.successes == self.scaling.growth_interval:
            self.value, self.successes = self.value * 2.0, 0
        self.found = None

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.value, "_growth_tracker": self.successes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """torch's scaler needs a scaled loss after loading. A window of ours may end without one."""
        self.value, self.successes = state["scale"], state["_growth_tracker"]
        self.ready, self.optimizer.loss_scale = self.scaling.kind == "fusedacc", self.value


def values(gradient: Tensor) -> Tensor:
    return gradient._values() if gradient.is_sparse else gradient


def all_finite(tensors: Iterable[Tensor | None]) -> bool:
    return all(bool(values(tensor).isfinite().all()) for tensor in tensors if tensor is not None)


def spoilt(gradient: Tensor, value: float) -> Tensor:
    """Return a gradient with `value` in its first element, or multiplied by it if it is sparse."""
    if gradient.is_sparse:
        return gradient * value
    gradient = gradient.clone()
    if gradient.numel():
        gradient[(0,) * gradient.ndim] = value
    return gradient
