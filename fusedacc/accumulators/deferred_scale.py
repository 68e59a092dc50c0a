"""Factors by which accumulators must still be multiplied, usually with their next addition.

Note [The deferred scale]
Add up the window's gradients so far, each times its `gradient_scale`, and multiply the result by
`Window.sum_scale`. That equals beta * accumulator, where beta is the accumulator's deferred scale, usually 1.
An addition applies the deferred scale:

    accumulator <- scale * gradient + round(beta * accumulator),    beta <- 1

This has the same bits as a separate multiplication before it. A separate pass would read and write every
accumulator once more. beta differs from 1 in two cases: a first gradient has become the accumulator unscaled
(beta is its scale), or `Window.sum_scale` has changed before the window's last additions (beta is new / old).
`Passes.apply_scales` multiplies the accumulators that get no further addition.

All code that writes accumulators must keep their deferred scales correct.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from ..kernels.dtypes import Number
from ..kernels.torch_state import to_device
from .param import Slot


class ScaleGroup(NamedTuple):
    """Slots with one deferred scale, by their indices in the list that was grouped."""

    scale: Number
    indices: list[int]


class DeferredScales:
    """The deferred scales of these slots, in `Slot.beta`: a float or a 0-dim tensor each, 1 by default."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        #: Tensors that a kernel on another stream may still read, by identity.
        self._tensors_in_use: dict[int, Tensor] = {}

    def select_deferred(self, slots: Iterable[Slot] | None = None) -> list[Slot]:
        """Return those of `slots` (None: all) that have a deferred scale."""
        return [slot for slot in (self._slots if slots is None else slots) if not is_one(slot.beta)]

    def defer(self, slots: Iterable[Slot], factor: Number) -> None:
        """Multiply the deferred scales of these slots by `factor`. A tensor must not change afterwards."""
        if not self.select_deferred():
            self._tensors_in_use.clear()
        products: dict[float, Number] = {1.0: factor}  # slots with equal scales share one tensor
        for slot in slots:
            key = _key(slot.beta)
            if key not in products:
                products[key] = slot.beta * factor
            slot.beta = products[key]
        for product in products.values():
            if isinstance(product, Tensor):
                self._tensors_in_use[id(product)] = product

    def discharge(self, slots: Iterable[Slot] | None = None) -> None:
        """Remove the scales of slots (None: all) whose accumulators were multiplied or dropped."""
        for slot in self._slots if slots is None else slots:
            slot.beta = 1.0

    def group(self, slots: Sequence[Slot]) -> list[ScaleGroup]:
        """Group slots by their deferred scale."""
        groups: dict[float, ScaleGroup] = {}
        for index, slot in enumerate(slots):
            scale = slot.beta
            groups.setdefault(_key(scale), ScaleGroup(scale, [])).indices.append(index)
        return list(groups.values())


def _key(scale: Number) -> float:
    """Return a dictionary key: a number's value (numbers are positive), or a tensor's identity."""
    return -id(scale) if isinstance(scale, Tensor) else scale


def is_one(scale: Number) -> bool:
    """Whether a scale is known to be 1 without synchronising with a device."""
    return not isinstance(scale, Tensor) and scale == 1.0


def to_device_of(scale: Number, other: Number) -> Number:
    """Return the scale, moved to the other number's device if both are tensors."""
    if isinstance(scale, Tensor) and isinstance(other, Tensor):
        return to_device(scale, other.device)
    return scale
