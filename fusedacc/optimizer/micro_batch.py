"""The current micro-batch of a window, and its weight."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..accumulators.reduction import WEIGHING, Reduction


class MicroBatch:
    """The current micro-batch. `accumulate()` yields it, and `weight` may be set later."""

    def __init__(
        self,
        reduction: Reduction,
        has_run: Callable[[], bool],
        weight: float | Tensor | None = None,
        *,
        allows_zero: bool = True,
    ) -> None:
        self._reduction = reduction
        self._allows_zero = allows_zero
        #: Returns whether a backward pass has ended in the window's current micro-batch.
        self._has_run = has_run
        #: Whether this micro-batch has ended.
        self.has_ended = False
        self._weight: float | Tensor | None = None
        #: The object that the weight was set to, to tell whether a tensor on a GPU is set again.
        self._given_weight: Any = None
        #: Which part of the gradients' synchronisation waits for the window's last micro-batch: the argument
        #: `defer` of `accumulate(model)`, or "none" outside.
        self.defer = "none"
        #: The divisor of gradients inside the `step()` of an attached pipeline schedule. None outside.
        self.schedule_divisor: int | None = None
        if weight is not None:
            self.weight = weight

    @property
    def weight(self) -> float | Tensor | None:
        """The weight of this micro-batch: tokens or samples, a number or a 0-dim tensor; None until set.

        Set it before the backward pass for "weighted", and before `step()` for "normalized". A tensor on a
        GPU stays there. A weight of 0 on a GPU cannot skip the micro-batch, so an inf or nan in its gradient
        reaches the accumulators.

        Raises:
            ValueError: the reduction takes no weights, or the value is negative or not finite, or 0 with
                `main_grad=True`.
            TypeError: the value is not a number.
            RuntimeError: it is set too late.
        """
        return self._weight

    @weight.setter
    def weight(self, weight: float | Tensor) -> None:
        if not self._reduction.weighs:
            raise ValueError(
                f"weight={weight!r} was given, but reduction={self._reduction.name!r} takes no weights; "
                f"allowed with {' and '.join(map(repr, WEIGHING))}"
            )
        value = check_weight(weight)
        if not (self._allows_zero or isinstance(value, Tensor) or value != 0):
            raise ValueError(
                "weight=0 does not go with main_grad=True, because a module that adds its gradient by itself "
                "cannot leave it out; allowed: weights above 0, or the backward pass inside ignore()"
            )
        on_device = isinstance(value, Tensor) or isinstance(self._weight, Tensor)
        # Tensors on a device are not compared, which would synchronise.
        is_new = weight is not self._given_weight if on_device else value != self._weight
        if is_new and (self.has_ended or self._has_run()):
            self._check_late_weight(value, on_device)
        self._weight = value
        self._given_weight = weight

    def _check_late_weight(self, value: float | Tensor, on_device: bool) -> None:
        """Raise unless a new weight may come after the backward pass."""
        if self._weight is not None:
            raise RuntimeError(
                f"weight={value} came after the backward of a micro-batch of weight {self._weight}; a "
                "micro-batch has one weight, and step() ends it"
            )
        if self._reduction.scales_by_weight:
            raise RuntimeError(
                f"weight={value} came after the backward; with reduction={self._reduction.name!r} it scales "
                "the gradients as they arrive: set it before"
            )
        if not on_device and value == 0:
            raise ValueError(
                "weight=0 came after the backward, whose gradients can no longer be left out: set a weight "
                "of 0 before"
            )


def check_weight(weight: Any) -> float | Tensor:
    """Return a float, or a 0-dim float32 tensor if it is on a GPU; else raise TypeError or ValueError.

    A weight on a GPU is not checked here, which would synchronise. The update checks it.
    """
    if isinstance(weight, Tensor) and weight.ndim == 0 and not weight.is_complex():
        if not _on_host(weight):
            return weight.detach().to(torch.float32)
        weight = weight.item()
    if isinstance(weight, Tensor):
        raise TypeError(
            "weight must be a real number or a 0-dim tensor, got a "
            f"{weight.dtype} tensor of shape {tuple(weight.shape)}"
        )
    if not isinstance(weight, Real):
        raise TypeError(f"weight must be a real number or a 0-dim tensor, got {type(weight).__name__}")
    value = float(weight)
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"weight must be finite and at least 0, got {value}")
    return value


def _on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"
