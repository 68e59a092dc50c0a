"""The end of a window: the inner optimizer's step on its sums, or their being cleared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.autograd.profiler import record_function
from torch.optim import Optimizer

from . import observers
from .accumulators import Slot
from .accumulation import Accumulation
from .capture import Capture
from .masters import Masters
from .roster import Roster
from .update import Scaling, Update


class Ending:
    """Ends windows, in either loop.

    Args:
        inner: the inner optimizer.
        roster: the parameters.
        capture: their hooks.
        accumulation: the window that ends, and its accumulators.
        update: runs the inner optimizer.
        masters: the parameters' float32 masters, if there are any.
    """

    def __init__(
        self,
        inner: Optimizer,
        roster: Roster,
        capture: Capture,
        accumulation: Accumulation,
        update: Update,
        masters: Masters | None,
    ) -> None:
        self.inner, self.update, self.masters = inner, update, masters
        self._roster, self._capture, self._registry = roster, capture, capture.registry
        self._window, self._accumulators = accumulation.window, accumulation.accumulators

    def run(
        self, ratio: float | Tensor | None, scaling: Scaling, arguments: Mapping[str, Any]
    ) -> tuple[Any, bool]:
        """The inner optimizer's step on the sums times `ratio`; None drops it, for all weights are 0.

        Args:
            scaling: what a GradScaler has said of this update.
            arguments: the inner optimizer's own, of this step.

        Returns:
            The step's result, and whether the host has decided to drop it.
        """
        if ratio is None:
            return None, True
        self._check_state()
        faulty = self._window.faulty
        if faulty is not None:
            scaling.drop_if(faulty)
        scaling.multiply(ratio)
        try:
            with observers.phase("update"), self.on_masters():
                return self.update.step(scaling, arguments)
        except BaseException:
            if self.update.applied:
                self._window.taint("an exception has interrupted an update that had scaled its gradients")
            raise

    @contextlib.contextmanager
    def on_masters(self, slots: list[Slot] | None = None) -> Iterator[None]:
        """While inside, `slots` (else those with gradients) are their float32 masters, if there are any."""
        if self.masters is None:
            yield
            return
        if slots is None:
            slots = [slot for slot, _ in self._accumulators.finals()]
        try:
            with self.masters.swapped(slots):
                yield
        finally:
            self._registry.reregister(slots)

    def follow(self) -> list[Slot]:
        """Be in step with what users have done to parameters; the slots that are new.

        Raises as `Roster.follow` and `Capture.refresh`.
        """
        fresh = self._roster.follow(self._capture, self.masters)
        if self._registry.reshaped:
            self._registry.refresh()
        return fresh

    def _check_state(self) -> None:
        """Raise RuntimeError where the inner optimizer's state has a shape that its parameter had before.

        torch's fused kernels would write beyond its end.
        """
        for slot, former in self._registry.reshaped.items():
            if self._accumulators.grads.current(slot) is None:
                continue
            for name, value in self.inner.state.get(slot.param, {}).items():
                shape = value.shape if isinstance(value, Tensor) and value.dim() else slot.shape
                if shape in former and shape != slot.param.shape:
                    raise RuntimeError(
                        f"the optimizer's state {name!r} of parameter {slot.name!r} is of shape "
                        f"{tuple(shape)}, which the parameter had before; it is {tuple(slot.param.shape)} "
                        "now. Delete optimizer.state[parameter], or give it tensors of that shape, and call "
                        "step() again"
                    )

    def count(self, skipped: bool) -> None:
        """An update was attempted: the next window begins."""
        self._window.end_update(skipped)
        self._registry.reshaped.clear()
        self._registry.refresh()

    def clear(self, set_to_none: bool) -> None:
        """Begin a window from nothing; zeros stay in p.grad unless `set_to_none`."""
        self._roster.follow(self._capture, self.masters)
        self._window.clear()
        # As torch's own zero_grad names itself in a profile (torch/optim/optimizer.py).
        with record_function(f"Optimizer.zero_grad#{type(self.inner).__name__}.zero_grad"):
            if set_to_none:
                self._accumulators.clear()
            else:
                self._accumulators.zero()
        self._registry.refresh()
