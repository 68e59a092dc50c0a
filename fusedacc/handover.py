"""What GradScalers hand over: the loss scale, and what they have found in the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .update import Scaling


class Handover:
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
