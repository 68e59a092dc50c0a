"""The loss scale, and what GradScalers have found in the gradients: known on the device only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor



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

    def drop_if(self, flag: Tensor) -> None:
        """Drop the update too where `flag`, 0-dim float32, is 1."""
        found = self.found_inf
        near = flag if found is None else flag.to(found.device, non_blocking=True)
        self.found_inf = near if found is None else torch.maximum(found, near)

    def multiply(self, ratio: float | Tensor) -> None:
        """The sums are to be multiplied by `ratio` too."""
        if isinstance(ratio, Tensor) or ratio != 1.0:
            own = self.multiplier
            self.multiplier = ratio if own is None else own * near(ratio, own)


class LossScaleLink:
    """From a scaler to the update at hand: ours calls `run`, torch's sets attributes of the optimizer."""

    def __init__(self) -> None:
        self._scaling: Scaling | None = None
        #: A weak reference to the scaler of ours that has scaled the losses.
        self.scaled_by: Callable[[], Any] = _nobody

    def run(self, scaling: Scaling, run: Callable[[], Any]) -> Any:
        """`step` or `flush` for a GradScaler of ours; `scaling` then holds what was found."""
        self._scaling = scaling
        try:
            return run()
        finally:
            self._scaling = None

    def check(self, method: str) -> None:
        """Raise RuntimeError where a GradScaler of ours has scaled the losses and is passed by."""
        if self._scaling is None and self.scaled_by() is not None:
            raise RuntimeError(
                f"{method}() would update from gradients of scaled losses: call scaler.{method}(optimizer) "
                "of the fusedacc.amp.GradScaler that has scaled them"
            )

    def take(self, attributes: dict[str, Any], counted: bool) -> Scaling:
        """What a scaler has said of the update at hand.

        Args:
            attributes: the optimizer's, where torch's scaler leaves what it says.

        Raises:
            RuntimeError: torch's scaler has called `step()` of a counted loop.
        """
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


def _nobody() -> None:
    """A weak reference to nothing."""


def near(scale: float | Tensor, other: float | Tensor) -> float | Tensor:
    """The scale where the other number is."""
    if isinstance(scale, Tensor) and isinstance(other, Tensor):
        return scale.to(other.device, non_blocking=True)
    return scale
