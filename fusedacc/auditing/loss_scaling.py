"""`GradScaler`: its loss scale, and updates that it skips."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .guard import guarded
from .optimizers import parameters_of
from .updates import Updates
from .watch_state import WatchState


class LossScaling:
    """Notes what a GradScaler does.

    Args:
        watch: the state of the watch.
        updates: notes an update that is skipped.
    """

    def __init__(self, watch: WatchState, updates: Updates) -> None:
        self.watch, self._updates = watch, updates

    def start(self) -> None:
        """Wrap the methods of GradScaler."""
        self.watch.wrap(torch.amp.GradScaler, "scale", self._scaler_scale)
        self.watch.wrap(torch.amp.GradScaler, "unscale_", self._scaler_unscale)
        self.watch.wrap(torch.amp.GradScaler, "step", self._scaler_step)

    def _scaler_scale(self, call: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        result = call(scaler, outputs)
        self._note_scale(scaler)
        return result

    @guarded
    def _note_scale(self, scaler: Any) -> None:
        scale = scaler._scale if scaler.is_enabled() else None
        self.watch.loss_scale = 1.0 if scale is None else scale.detach().clone()

    def _scaler_unscale(self, call: Callable[..., Any], scaler: Any, optimizer: Any) -> None:
        params = parameters_of(optimizer)
        changed = self._changed(params) or set()
        self._note_early_clipping(scaler, params)
        call(scaler, optimizer)
        self._remember([param for param in params if id(param) not in changed])

    @guarded
    def _note_early_clipping(self, scaler: Any, params: list[Tensor]) -> None:
        """Add a note if the norm was clipped while the gradients still had the loss scale."""
        passes = self.watch.history.passes
        is_clipped = any(self.watch.leaves.clip_factor(param) < 1 for param in params)
        if is_clipped and passes and passes[-1].clipped and scaler.get_scale() != 1:
            self.watch.history.add_note(
                f"clip_grad_norm_ at {passes[-1].clipped} clips gradients that are still multiplied by the "
                "loss scale: call scaler.unscale_(optimizer) before it. This is right only if you multiply "
                "max_norm by the scale too"
            )

    @guarded
    def _changed(self, params: list[Tensor]) -> set[int]:
        return self.watch.leaves.changed(params)

    @guarded
    def _remember(self, params: list[Tensor]) -> None:
        self.watch.leaves.remember(params)

    def _scaler_step(
        self, call: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        before = self.watch.history.num_updates
        result = call(scaler, optimizer, *args, **kwargs)
        is_skipped = self.watch.history.num_updates == before and scaler.is_enabled()
        # The wrapper of this project counts micro-batches in step().
        if is_skipped and not hasattr(optimizer, "micro_step"):
            self._updates.skip_window(optimizer)
        return result
