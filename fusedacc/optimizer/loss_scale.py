"""Passes the loss scale of a GradScaler to the update."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..accumulators.param import nothing
from .loops import CountedLoop, ManualLoop
from .update import Scaling


class LossScaleLink:
    """Passes a scaler's scale to the update. fusedacc's scaler calls `run`; torch's sets attributes."""

    def __init__(self, loop: CountedLoop | ManualLoop) -> None:
        self._loop = loop
        self._update = loop._update
        self._window = loop._window
        self._scaling: Scaling | None = None
        #: Whether a loss of the current window is scaled, and a weak reference to the scaler that scaled it.
        self._is_scaled = False
        self._scaled_by: Callable[[], Any] = nothing
        #: Raises an error where losses must not be scaled.
        self.check: Callable[[], None] | None = None

    def note(self, scaler: Any) -> None:
        """Record that a fusedacc GradScaler has scaled a loss. Raises RuntimeError in `Join([optimizer])`."""
        if self.check is not None:
            self.check()
        self._scaled_by = weakref.ref(scaler)
        self.set_scaled(True)

    def set_scaled(self, is_scaled: bool) -> None:
        """Set whether a loss of the current window is scaled."""
        self._is_scaled = is_scaled
        self._loop.leave_to_python("a loss is scaled", is_scaled)
        self._update.expect_norm(is_scaled)

    def show_final(self) -> None:
        """Put the final gradient into p.grad, where the scaler may change it; raises as the loop's method."""
        self._loop.show_final()

    def run(self, scaling: Scaling, run: Callable[[], Any]) -> Any:
        """Run `step` or `flush` for a fusedacc GradScaler, which reads the result from `scaling`."""
        self._scaling = scaling
        updates = self._window.num_updates
        try:
            return run()
        finally:
            self._scaling = None
            if self._window.num_updates > updates:
                self.set_scaled(False)

    def take(self, method: str, attributes: dict[str, Any]) -> Scaling:
        """Return the scale and the inf check of a scaler for this update. Raises RuntimeError if a fusedacc
        GradScaler has scaled the losses but does not run this update, or if torch's scaler has called
        `step()` of a counted loop.

        method: the wrapper's method, for messages. attributes: the wrapper's; torch's scaler sets some.
        """
        if self._is_scaled and self._scaling is None:
            if self._scaled_by() is not None:
                raise RuntimeError(
                    f"{method}() would update from gradients of scaled losses: call "
                    f"scaler.{method}(optimizer) of the fusedacc.amp.GradScaler that has scaled them"
                )
            self.set_scaled(False)
        if self._window.counted and "grad_scale" in attributes:
            del attributes["grad_scale"], attributes["found_inf"]
            raise RuntimeError(
                "torch.amp.GradScaler cannot scale a counted loop: it would change its scale inside the "
                "window. Use fusedacc.amp.GradScaler, in the same places"
            )
        if self._scaling is not None:
            return self._scaling
        found_inf = attributes.get("found_inf")
        return Scaling(attributes.get("grad_scale"), found_inf if isinstance(found_inf, Tensor) else None)
