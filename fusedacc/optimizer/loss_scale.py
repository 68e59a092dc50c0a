"""The loss scale, and what GradScalers have found in the gradients: known on the device only."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..accumulators.partial_norms import PartialNorms
from ..kernels.torch_state import to_device

if TYPE_CHECKING:
    from .loops import Loop
    from .update import Update


class Scaling:
    """What is known on the device only: by what the sums are multiplied, and whether they are finite.

    Args:
        loss_scale: 0-dim; the sums are divided by it. None: they are not scaled.
        found_inf: 0-dim float32, 1 where the update must be dropped; None where nobody has looked yet.
        checks: whether somebody needs `found_inf`.
    """

    def __init__(
        self, loss_scale: Tensor | None = None, found_inf: Tensor | None = None, checks: bool = False
    ) -> None:
        # In float64: float64 sums keep their digits, and the reciprocal of a large scale is not one ulp off.
        self.multiplier: float | Tensor | None = None
        if loss_scale is not None:
            self.multiplier = loss_scale.double().reciprocal()
        self.found_inf = found_inf
        self.checks = checks
        #: Called after an update of a `flush()` that goes on with another window: what is known of that one.
        self.go_on: Callable[[], Scaling] | None = None

    def drop_if(self, flag: Tensor) -> None:
        """Drop the update too where `flag`, 0-dim float32, is 1."""
        found = self.found_inf
        moved = flag if found is None else to_device(flag, found.device)
        self.found_inf = moved if found is None else torch.maximum(found, moved)

    def multiply(self, ratio: float | Tensor) -> None:
        """The sums are to be multiplied by `ratio` too."""
        if isinstance(ratio, Tensor) or ratio != 1.0:
            own = self.multiplier
            self.multiplier = ratio if own is None else own * near(ratio, own)


class LossScaleLink:
    """From a scaler to the update at hand: ours calls `run`, torch's sets attributes of the optimizer."""

    def __init__(self, loop: Loop, update: Update, norms: PartialNorms) -> None:
        self._loop, self._update, self._norms = loop, update, norms
        self._scaling: Scaling | None = None
        #: A weak reference to the scaler of ours that has scaled the losses.
        self._scaled_by: Callable[[], Any] | None = None
        #: Raises where losses may not be scaled.
        self.check: Callable[[], None] | None = None

    def note(self, scaler: Any) -> None:
        """A GradScaler of ours has scaled the losses: the update will look for what is not finite.

        Raises:
            RuntimeError: in `Join([optimizer])`.
        """
        if self.check is not None:
            self.check()
        self._scaled_by = weakref.ref(scaler)
        self._update.expect_norm()

    def is_false_in_middle(self) -> list[tuple[object, str]]:
        """Attributes that are None while no GradScaler of ours is in use."""
        return [(self, "_scaling"), (self, "_scaled_by")]

    def closes_window(self) -> bool:
        """Whether a `step()` now would update; takes in what is in p.grad, as that would."""
        return self._loop.closes_window()

    def show_final(self) -> None:
        """Put the final gradient into p.grad for somebody who will change it there.

        Raises:
            RuntimeError: as `Loop.show_final`.
        """
        self._loop.show_final()
        self._norms.clear()  # torch bumps no version there

    def run(self, scaling: Scaling, run: Callable[[], Any]) -> Any:
        """`step` or `flush` for a GradScaler of ours; `scaling` then holds what was found."""
        self._scaling = scaling
        try:
            return run()
        finally:
            self._scaling = None

    def take(self, method: str, attributes: dict[str, Any], counted: bool) -> Scaling:
        """What a scaler has said of the update at hand.

        Args:
            method: the wrapper's, for messages.
            attributes: the optimizer's, where torch's scaler leaves what it says.
            counted: whether the loop is.

        Raises:
            RuntimeError: a GradScaler of ours has scaled the losses and is passed by, or torch's scaler has
                called `step()` of a counted loop.
        """
        if self._scaling is None and self._scaled_by is not None and self._scaled_by() is not None:
            raise RuntimeError(
                f"{method}() would update from gradients of scaled losses: call scaler.{method}(optimizer) "
                "of the fusedacc.amp.GradScaler that has scaled them"
            )
        if counted and "grad_scale" in attributes:
            del attributes["grad_scale"], attributes["found_inf"]
            raise RuntimeError(
                "torch.amp.GradScaler cannot scale a counted loop: it would change its scale inside the "
                "window. Use fusedacc.amp.GradScaler, in the same places"
            )
        if self._scaling is not None:
            return self._scaling
        found = attributes.get("found_inf")
        return Scaling(attributes.get("grad_scale"), found if isinstance(found, Tensor) else None)


def near(scale: float | Tensor, other: float | Tensor) -> float | Tensor:
    """The scale where the other number is."""
    if isinstance(scale, Tensor) and isinstance(other, Tensor):
        return to_device(scale, other.device)
    return scale
