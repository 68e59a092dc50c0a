"""Loss scaling for the counted loop: torch's GradScaler, called on every micro-batch as one would write it.

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

#: Where torch's scaler looks for what has been found; the key of an entry that is no optimizer's.
_HELD = 0


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler whose decisions fall on a window's last micro-batch only.

    For an `AccumulatingOptimizer` in a counted loop, `unscale_`, `step` and `update` do nothing to the scale
    or the gradients before that. Then loss scale and clipping are one number on the device, inf and nan are
    looked for in the pass that yields the norm, and nothing waits for the device where the inner optimizer is
    one of torch's with `fused=True`. A manual loop has a window in every `step`. For other optimizers it is
    torch's.

    While a window of any optimizer is part-filled, `update()` keeps what was found and the scale as it is.

    Arguments and checkpoints are torch's.
    """

    def __init__(self, device: str = "cuda", *arguments: Any, **settings: Any) -> None:
        super().__init__(device, *arguments, **settings)
        self._open: weakref.WeakSet[AccumulatingOptimizer] = weakref.WeakSet()
        self._held: list[Tensor] = []
        #: Of the optimizers that it has stepped.
        self._links: weakref.WeakSet[LossScaleLink] = weakref.WeakSet()

    def scale(self, outputs: Any) -> Any:
        """As torch's."""
        for link in self._links if self._enabled else ():
            link.set_scaled(True)
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """As torch's, on the window's last micro-batch; before, it returns at once.

        Raises:
            RuntimeError: called twice for an update, after its step, on the inner optimizer of a wrapper, or
                before the weight of the last micro-batch was set.
        """
        if not self._enabled:
            return
        if isinstance(optimizer, AccumulatingOptimizer):
            self._check_inner(optimizer)
            if not optimizer._loss_scale.closes_window():
                self._open.add(optimizer)
                return
            optimizer._loss_scale.show_final()
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Ends the micro-batch; on the window's last, updates, unless the gradient holds inf or nan.

        Keyword arguments go to `optimizer.step`, as torch's scaler hands them on.

        Raises:
            TypeError: the optimizer takes no such argument; nothing is counted then.
            RuntimeError: called twice for an update without `update()` between, with a closure, or after
                `unscale_` on the inner optimizer.
        """
        if not self._enabled or not isinstance(optimizer, AccumulatingOptimizer):
            return super().step(optimizer, *args, **kwargs)
        if args or "closure" in kwargs:
            raise RuntimeError("GradScaler.step() takes no closure")
        optimizer._check_arguments(kwargs)
        self._check_inner(optimizer)
        if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update()")
        optimizer._loss_scale.note(self)
        self._links.add(optimizer._loss_scale)
        if not optimizer._loss_scale.closes_window():
            if optimizer.has_partial_window:
                self._open.add(optimizer)
            return optimizer._loss_scale.run(Scaling(), optimizer.step)
        return self._close(optimizer, functools.partial(optimizer.step, **kwargs))

    def flush(self, optimizer: AccumulatingOptimizer, **kwargs: Any) -> None:
        """`optimizer.flush(**kwargs)` for a window of scaled losses; `update()` afterwards, as after `step`.

        Where it takes part in several windows, of ranks that have more of them, it calls `update()` between
        them, as those ranks do: so all have the same scale.

        Raises:
            TypeError: `optimizer` is no AccumulatingOptimizer, or takes no such argument.
            RuntimeError: as `step`.
        """
        if not isinstance(optimizer, AccumulatingOptimizer):
            raise TypeError(f"optimizer must be an AccumulatingOptimizer, got {type(optimizer).__name__}")
        if not self._enabled or not (optimizer.has_partial_window or optimizer._takes_part):
            return optimizer._loss_scale.run(Scaling(), functools.partial(optimizer.flush, **kwargs))
        optimizer._check_arguments(kwargs)
        self._check_inner(optimizer)
        self._make_scale()  # a rank may have had no losses
        return self._close(optimizer, functools.partial(optimizer.flush, **kwargs))

    def _close(self, optimizer: AccumulatingOptimizer, run: Any) -> Any:
        """The update of a window, with the loss scale; keeps what was found for `update()`."""
        scaling, updates = self._scaling_of(optimizer), optimizer.num_updates

        def go_on() -> Scaling:
            nonlocal scaling, updates
            self._keep_found(optimizer, scaling)
            self.update()
            scaling, updates = self._scaling_of(optimizer), optimizer.num_updates
            scaling.go_on = go_on
            return scaling

        scaling.go_on = go_on
        result = optimizer._loss_scale.run(scaling, run)
        if optimizer.num_updates > updates:  # no rank may have had anything
            self._keep_found(optimizer, scaling)
        self._open.discard(optimizer)
        return result

    def _scaling_of(self, optimizer: AccumulatingOptimizer) -> Scaling:
        """What is known of an update that is to come."""
        scale, _ = self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is not OptState.UNSCALED:
            return Scaling(scale, checks=True)
        found = [flag.to(scale.device) for flag in state["found_inf_per_device"].values()]
        return Scaling(None, torch.stack(found).amax() if found else None)

    def _keep_found(self, optimizer: AccumulatingOptimizer, scaling: Scaling) -> None:
        """An update was made: keep for `update()` what was found in it."""
        found_inf = scaling.found_inf
        if found_inf is None:  # no parameter has a gradient
            scale, _ = self._check_scale_growth_tracker("step")
            found_inf = torch.zeros((), device=scale.device)
        state = self._per_optimizer_states[id(optimizer)]
        state["found_inf_per_device"] = {found_inf.device: found_inf}
        state["stage"] = OptState.STEPPED

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """As torch's, once no window is part-filled; else it keeps what was found and returns.

        Raises:
            RuntimeError: `new_scale` is given while a window is part-filled: its sums have the old scale.
        """
        if not self._enabled:
            return
        found = [
            flag
            for state in self._per_optimizer_states.values()
            for flag in state["found_inf_per_device"].values()
        ]
        if any(optimizer.has_partial_window for optimizer in self._open):
            if new_scale is not None:
                raise RuntimeError(
                    f"update(new_scale={new_scale!r}) in mid-window: the gradients that are in the sums have "
                    "the old scale; call it after the window's update"
                )
            self._held += found
            self._per_optimizer_states.clear()
            return
        if not found and not self._held and new_scale is None:
            return
        if self._held:
            device = common_device(self._held)
            together = torch.stack([to_device(flag, device) for flag in self._held])
            self._per_optimizer_states[_HELD]["found_inf_per_device"] = {device: together.amax()}
            self._held = []
        super().update(new_scale)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's. A window that a checkpoint brings may end before another loss is scaled."""
        super().load_state_dict(state_dict)
        if self._enabled:
            self._make_scale()

    def _make_scale(self) -> None:
        """Have a scale, though no loss has been scaled yet."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_open": None, "_links": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # The next `step` puts its optimizer in.
        self._open, self._links = weakref.WeakSet(), weakref.WeakSet()

    def _check_inner(self, optimizer: AccumulatingOptimizer) -> None:
        inner = self._per_optimizer_states.get(id(optimizer.optimizer))
        if inner is not None and inner["stage"] is not OptState.READY:
            raise RuntimeError(
                "unscale_() or step() was called on the inner optimizer: the gradients would be unscaled "
                "twice. Call them on the AccumulatingOptimizer"
            )
