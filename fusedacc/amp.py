"""Loss scaling for the counted loop: torch's GradScaler, called on every micro-batch.

scaler = fusedacc.amp.GradScaler("cuda")
for x, y in loader:
    with torch.autocast("cuda", torch.float16):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)       # every k-th call updates
    scaler.update()              # and only then may the scale change
    optimizer.zero_grad()
scaler.flush(optimizer)          # a last window that is not full
scaler.update()
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from .kernels.torch_state import common_device, to_device
from .optimizer import AccumulatingOptimizer
from .optimizer.loss_scale import LossScaleLink
from .optimizer.update import Scaling

__all__ = ["GradScaler"]

#: Key, among the states that torch's scaler reads, of the inf checks that have waited. It is no optimizer's
#: id.
_WAITED = 0


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler that acts only on a window's last micro-batch.

    For an `AccumulatingOptimizer` in a counted loop, `unscale_`, `step` and `update` change neither the scale
    nor the gradients before that. Then loss scale and clipping are one factor on the device, and the pass
    that computes the norm also looks for inf and nan. Nothing waits for the device if the inner optimizer is
    one of torch's with `fused=True`. In a manual loop every `step` ends a window. Other optimizers work as
    with torch's scaler.

    While a window of any optimizer is partly filled, `update()` keeps the inf checks and the scale.

    Arguments and checkpoints are those of torch.amp.GradScaler.
    """

    def __init__(self, device: str = "cuda", *arguments: Any, **settings: Any) -> None:
        super().__init__(device, *arguments, **settings)
        #: The optimizers whose window may be partly filled.
        self._open: weakref.WeakSet[AccumulatingOptimizer] = weakref.WeakSet()
        #: The inf checks that wait until no window is partly filled.
        self._waiting_checks: list[Tensor] = []
        #: Of the optimizers that this scaler has stepped.
        self._links: weakref.WeakSet[LossScaleLink] = weakref.WeakSet()

    def scale(self, outputs: Any) -> Any:
        """As torch.amp.GradScaler.scale."""
        if self.is_enabled():
            for link in self._links:
                link.set_scaled(True)
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """As torch's, on the window's last micro-batch; before that, it does nothing.

        Raises:
            RuntimeError: it was called twice for an update, after its step, on the inner optimizer of a
                wrapper, or before the weight of the last micro-batch was set.
        """
        if not self.is_enabled():
            return
        if isinstance(optimizer, AccumulatingOptimizer):
            self._check_inner(optimizer)
            if not optimizer._loop.collect_for_step():
                self._open.add(optimizer)
                return
            optimizer._loss_scale.show_final()
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """End the micro-batch. On the window's last one, update unless the gradient holds inf or nan.

        Keyword arguments are passed to `optimizer.step`, as by torch's scaler.

        Raises:
            TypeError: the optimizer takes no such argument; the micro-batch is not counted.
            RuntimeError: it was called twice for an update without `update()` between, with a closure, or
                after `unscale_` on the inner optimizer.
        """
        if not self.is_enabled() or not isinstance(optimizer, AccumulatingOptimizer):
            return super().step(optimizer, *args, **kwargs)
        if args or "closure" in kwargs:
            raise RuntimeError("GradScaler.step() takes no closure")
        optimizer._check_arguments(kwargs)
        self._check_inner(optimizer)
        if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update()")
        optimizer._loss_scale.note(self)
        self._links.add(optimizer._loss_scale)
        if not optimizer._loop.collect_for_step():
            if optimizer.has_partial_window:
                self._open.add(optimizer)
            return optimizer._loss_scale.run(Scaling(), optimizer.step)
        return self._close(optimizer, functools.partial(optimizer.step, **kwargs))

    def flush(self, optimizer: AccumulatingOptimizer, **kwargs: Any) -> None:
        """Call `optimizer.flush(**kwargs)` for a window of scaled losses; call `update()` afterwards, as
        after `step`.

        If other ranks have more windows and this rank takes part in them, it calls `update()` between them,
        as those ranks do, so that all ranks have the same scale.

        Raises:
            TypeError: `optimizer` is no AccumulatingOptimizer, or takes no such argument.
            RuntimeError: as `step`.
        """
        if not isinstance(optimizer, AccumulatingOptimizer):
            raise TypeError(f"optimizer must be an AccumulatingOptimizer, got {type(optimizer).__name__}")
        if not self.is_enabled() or not (optimizer.has_partial_window or optimizer._takes_part):
            return optimizer._loss_scale.run(Scaling(), functools.partial(optimizer.flush, **kwargs))
        optimizer._check_arguments(kwargs)
        self._check_inner(optimizer)
        self._make_scale()  # a rank may have scaled no loss
        return self._close(optimizer, functools.partial(optimizer.flush, **kwargs))

    def _close(self, optimizer: AccumulatingOptimizer, run: Any) -> Any:
        """Update with the loss scale, and keep the inf checks for `update()`."""
        scaling = self._scaling_of(optimizer)
        updates_before = optimizer.num_updates

        def go_on() -> Scaling:
            nonlocal scaling, updates_before
            self._keep_check(optimizer, scaling)
            self.update()
            scaling = self._scaling_of(optimizer)
            updates_before = optimizer.num_updates
            scaling.go_on = go_on
            return scaling

        scaling.go_on = go_on
        result = optimizer._loss_scale.run(scaling, run)
        if optimizer.num_updates > updates_before:  # False if no rank had gradients
            self._keep_check(optimizer, scaling)
        self._open.discard(optimizer)
        return result

    def _scaling_of(self, optimizer: AccumulatingOptimizer) -> Scaling:
        """Return what is known before an update."""
        scale, _ = self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is not OptState.UNSCALED:
            return Scaling(scale, checks=True)
        checks = [check.to(scale.device) for check in state["found_inf_per_device"].values()]
        return Scaling(None, torch.stack(checks).amax() if checks else None)

    def _keep_check(self, optimizer: AccumulatingOptimizer, scaling: Scaling) -> None:
        """Keep the inf check of an update for `update()`."""
        found_inf = scaling.found_inf
        if found_inf is None:  # no parameter has a gradient
            scale, _ = self._check_scale_growth_tracker("step")
            found_inf = torch.zeros((), device=scale.device)
        state = self._per_optimizer_states[id(optimizer)]
        state["found_inf_per_device"] = {found_inf.device: found_inf}
        state["stage"] = OptState.STEPPED

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """As torch's, once no window is partly filled; before that, keep the inf checks.

        Raises:
            RuntimeError: `new_scale` is given while a window is partly filled, whose sums have the old scale.
        """
        if not self.is_enabled():
            return
        new_checks = [
            check
            for state in self._per_optimizer_states.values()
            for check in state["found_inf_per_device"].values()
        ]
        if any(optimizer.has_partial_window for optimizer in self._open):
            if new_scale is not None:
                raise RuntimeError(
                    f"update(new_scale={new_scale!r}) in mid-window: the gradients in the sums have the old "
                    "scale; call it after the window's update"
                )
            self._waiting_checks += new_checks
            self._per_optimizer_states.clear()
            return
        if not new_checks and not self._waiting_checks and new_scale is None:
            return
        if self._waiting_checks:
            device = common_device(self._waiting_checks)
            checks = torch.stack([to_device(check, device) for check in self._waiting_checks])
            self._per_optimizer_states[_WAITED]["found_inf_per_device"] = {device: checks.amax()}
            self._waiting_checks = []
        super().update(new_scale)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's. A window loaded from a checkpoint may end before another loss is scaled."""
        super().load_state_dict(state_dict)
        if self.is_enabled():
            self._make_scale()

    def _make_scale(self) -> None:
        """Create the scale, though no loss has been scaled yet."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_open": None, "_links": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # The next `step` adds its optimizer.
        self._open = weakref.WeakSet()
        self._links = weakref.WeakSet()

    def _check_inner(self, optimizer: AccumulatingOptimizer) -> None:
        inner = self._per_optimizer_states.get(id(optimizer.optimizer))
        if inner is not None and inner["stage"] is not OptState.READY:
            raise RuntimeError(
                "unscale_() or step() was called on the inner optimizer: the gradients would be unscaled "
                "twice. Call them on the AccumulatingOptimizer"
            )
