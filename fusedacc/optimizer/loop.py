"""What both loops do: end windows by the inner optimizer's step, or clear them."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.optim import Optimizer

from ..accumulators import Slot
from ..autograd.capture import Capture
from ..kernels import launch_events
from .accumulation import Accumulation
from .loss_scale import Scaling
from .master_weights import Masters
from .micro_batch import MicroBatch
from .parameters import Roster
from .update import Update


class Loop(abc.ABC):
    """What the wrapper's methods do; `CountedLoop` and `ManualLoop` differ in when a window ends.

    Args:
        inner: the inner optimizer.
        parameters: which are accumulated.
        capture: their hooks.
        accumulation: the window and its accumulators.
        update: runs the inner optimizer.
        masters: the parameters' float32 masters, if there are any.
    """

    def __init__(
        self,
        inner: Optimizer,
        parameters: Roster,
        capture: Capture,
        accumulation: Accumulation,
        update: Update,
        masters: Masters | None,
    ) -> None:
        self._inner, self._update, self._masters = inner, update, masters
        self._parameters, self._capture, self._registry = parameters, capture, capture.registry
        self._accumulation = accumulation
        self._window, self._accumulators = accumulation.window, accumulation.accumulators
        self._slots = self._accumulators.slots

    @abc.abstractmethod
    def step(self, closure: Callable[[], Any] | None, scaling: Scaling, arguments: Mapping[str, Any]) -> Any:
        """The wrapper's `step()`.

        Args:
            closure: as torch's.
            scaling: what a GradScaler has said of this update.
            arguments: the inner optimizer's own, of this step.
        """

    @abc.abstractmethod
    def closes_window(self) -> bool:
        """Whether a `step()` now would update; takes in what is in p.grad, as that would."""

    @abc.abstractmethod
    def show_final(self) -> None:
        """Before an update: put the final gradient into p.grad, all of it."""

    @abc.abstractmethod
    def zero_grad(self, set_to_none: bool) -> None:
        """The wrapper's `zero_grad()`."""

    @abc.abstractmethod
    def around(
        self, model: torch.nn.Module | None, micro: MicroBatch
    ) -> contextlib.AbstractContextManager[None]:
        """Context around a micro-batch."""

    def _run(
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
            with launch_events.phase("update"), self._on_masters():
                return self._update.step(scaling, arguments)
        except BaseException:
            if self._update.applied:
                self._window.taint("an exception has interrupted an update that had scaled its gradients")
            raise

    @contextlib.contextmanager
    def _on_masters(self, slots: list[Slot] | None = None) -> Iterator[None]:
        """While inside, `slots` (else those with gradients) are their float32 masters, if there are any."""
        if self._masters is None:
            yield
            return
        if slots is None:
            slots = [slot for slot, _ in self._accumulators.finals()]
        try:
            with self._masters.swapped(slots):
                yield
        finally:
            self._registry.reregister(slots)

    def follow(self) -> list[Slot]:
        """Be in step with what users have done to parameters; the slots that are new.

        Raises as `Roster.follow` and `Capture.refresh`.
        """
        fresh = self._parameters.follow(self._capture, self._masters)
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
            for name, value in self._inner.state.get(slot.param, {}).items():
                shape = value.shape if isinstance(value, Tensor) and value.dim() else slot.shape
                if shape in former and shape != slot.param.shape:
                    raise RuntimeError(
                        f"the optimizer's state {name!r} of parameter {slot.name!r} is of shape "
                        f"{tuple(shape)}, which the parameter had before; it is {tuple(slot.param.shape)} "
                        "now. Delete optimizer.state[parameter], or give it tensors of that shape, and call "
                        "step() again"
                    )

    def _end_update(self, skipped: bool) -> None:
        """An update was attempted: the next window begins."""
        self._window.end_update(skipped)
        self._registry.reshaped.clear()
        self._registry.refresh()

    def _clear(self, set_to_none: bool) -> None:
        """Begin a window from nothing; zeros stay in p.grad unless `set_to_none`."""
        self._parameters.follow(self._capture, self._masters)
        self._window.clear()
        # As torch's own zero_grad names itself in a profile (torch/optim/optimizer.py).
        with record_function(f"Optimizer.zero_grad#{type(self._inner).__name__}.zero_grad"):
            if set_to_none:
                self._accumulators.clear()
            else:
                self._accumulators.zero()
        self._registry.refresh()

    # Distributed checkpoint's way of making the state of an empty optimizer appear: it assigns zero gradients
    # by hand, sets every lr to 0 and calls step() once (torch.distributed.checkpoint.state_dict,
    # `_init_optim_state`).

    def _is_asked_for_state(self) -> bool:
        """Whether a `step()` now is that call."""
        if self._inner.state or any(group.get("lr", 1.0) != 0.0 for group in self._inner.param_groups):
            return False
        given = [
            None if slot.param.grad is slot.placed() else slot.param.grad
            for slot in self._slots
            if slot.param.requires_grad
        ]
        # Reading the zeros waits for the device, but only while there is no state yet and every lr is 0.
        return bool(given) and all(g is not None and g.grad_fn is None and not g.any() for g in given)

    def _make_state(self) -> None:
        """Let the inner optimizer make its state from the zeros in p.grad."""
        with_zeros = [slot for slot in self._slots if slot.param.grad is not None]
        with self._on_masters(with_zeros):
            for slot in with_zeros if self._masters is not None else ():
                gradient, slot.param.grad = slot.param.grad, None
                slot.param.grad = gradient.to(slot.param.dtype)  # type: ignore[union-attr]
            self._inner.step()
