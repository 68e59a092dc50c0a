"""One micro-batch of a window: whether its backward has run, and what it weighs."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor


def check_weight(weight: Any) -> float | Tensor:
    """`weight` as a float, or as a 0-dim float32 tensor where it is on another device than the CPU.

    What is on a device is not waited for: a weight there that is negative or not finite shows at the update.

    Raises:
        TypeError: neither a real number nor a 0-dim real tensor.
        ValueError: negative, infinite or nan.
    """
    if isinstance(weight, Tensor) and weight.ndim == 0 and not weight.is_complex():
        if not _on_host(weight):
            return weight.detach().to(torch.float32)
        weight = weight.item()
    if not isinstance(weight, Real):
        raise TypeError(f"weight must be a real number or a 0-dim tensor, got {_described(weight)}")
    value = float(weight)
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"weight must be finite and at least 0, got {value}")
    return value


def _on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _described(value: Any) -> str:
    kind = type(value).__name__
    return f"a {value.dtype} tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else kind


class MicroBatch:
    """What is known of the micro-batch at hand; `accumulate()` yields it, and `weight` may be set late."""

    def __init__(self, reduction: str, weight: float | Tensor | None = None) -> None:
        self._reduction = reduction
        self._weight: float | Tensor | None = None
        self._given: Any = None
        #: Whether a backward has ended in this micro-batch.
        self.ran = False
        #: How many of its backwards have ended, those inside others aside.
        self.num_backwards = 0
        #: Whether a pipeline schedule's `step()` runs, whose backwards are not counted one by one.
        self.in_schedule = False
        #: Whether its gradients were left unsynchronised in `p.grad`, to be collected with a later one's.
        self.deferred = False
        if weight is not None:
            self.weight = weight

    @property
    def weight(self) -> float | Tensor | None:
        """The weight of this micro-batch: tokens or samples, a number or a 0-dim tensor; None until set.

        A tensor on a device stays there. A weight of 0 there cannot leave the micro-batch out, so that an inf
        or nan of its gradient reaches the sums.

        Settable before the backward for "weighted", before `step()` for "normalized". Setting raises
        ValueError where the reduction takes no weight or the value is negative or not finite, TypeError for
        what is no number, RuntimeError when it comes too late.
        """
        return self._weight

    @weight.setter
    def weight(self, weight: float | Tensor) -> None:
        if self._reduction not in ("weighted", "normalized"):
            raise ValueError(
                f"weight={weight!r} was given, but reduction={self._reduction!r} takes none; allowed with "
                "'weighted' and 'normalized'"
            )
        value = check_weight(weight)
        on_device = isinstance(value, Tensor) or isinstance(self._weight, Tensor)
        late = self.ran and (weight is not self._given if on_device else value != self._weight)
        if late and self._weight is not None:
            raise RuntimeError(
                f"weight={value} came after the backward of a micro-batch of weight {self._weight}; a "
                "micro-batch has one weight, and step() ends it"
            )
        if late and self._reduction == "weighted":
            raise RuntimeError(
                f"weight={value} came after the backward; with reduction='weighted' it scales the gradients "
                "as they arrive: set it before"
            )
        if late and not on_device and value == 0:
            raise ValueError(
                "weight=0 came after the backward, whose gradients can no longer be left out: set a weight "
                "of 0 before"
            )
        self._weight, self._given = value, weight
