"""torch's clipping: by which factor `clip_grad_norm_` shrinks, and what `clip_grad_value_` was given."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import torch_private
from .call_sites import call_site
from .guard import guarded
from .leaves import grad_state, is_distributed, local_part
from .watch_state import WatchState


class Clipping:
    """Notes what torch's clipping does.

    Args:
        watch: the state of the watch.
    """

    def __init__(self, watch: WatchState) -> None:
        self.watch = watch

    def start(self) -> None:
        """Wrap the functions that clip."""
        # clip_grad_norm_ calls the first by its private name.
        self.watch.wrap(nn.utils.clip_grad, torch_private.CLIP_GRADS_WITH_NORM, self._clip)
        self.watch.wrap(nn.utils, "clip_grads_with_norm_", self._clip)
        for module in (nn.utils, nn.utils.clip_grad):
            self.watch.wrap(module, "clip_grad_value_", self._clip_values)

    def _clip(self, call: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        """Run torch's clipping, and measure its factor on one element."""
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        before, changed = self._largest_element(params), self._changed(params)
        result = call(params, *args, **kwargs)
        self._note_clipped(params, before, changed or set())
        return result

    @guarded
    def _changed(self, params: list[Tensor]) -> set[int]:
        return self.watch.leaves.changed(params)

    @guarded
    def _largest_element(self, params: list[Tensor]) -> tuple[Tensor, float] | None:
        """Return a view of the largest element of the first gradient that is not zero, and its size."""
        for param in params:
            if param.grad is None or param.grad.layout is not torch.strided:
                continue
            gradient = local_part(param.grad)
            if gradient.numel():
                index = torch.unravel_index(gradient.abs().argmax(), gradient.shape)
                element = gradient[tuple(map(int, index))]  # a view in any memory format
                size = float(element.abs())
                if size and math.isfinite(size):
                    return element, size
        return None

    @guarded
    def _note_clipped(
        self, params: list[Tensor], before: tuple[Tensor, float] | None, changed: set[int]
    ) -> None:
        factor = 1.0
        if before is not None:
            element, size = before
            factor = float(element.abs()) / size
        factor = factor if math.isfinite(factor) else 1.0
        for param in params:
            self.watch.leaves.multiply_clip_factor(param, factor)
            if id(param) in self.watch.unclipped and id(param) not in changed and param.grad is not None:
                sketch, _ = self.watch.unclipped[id(param)]
                self.watch.unclipped[id(param)] = sketch * factor, grad_state(param.grad)
        if self.watch.history.passes:
            self.watch.history.passes[-1].clipped = call_site().line
        # A gradient that other code had changed before still counts as changed.
        self.watch.leaves.remember(param for param in params if id(param) not in changed)

    def _clip_values(self, call: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        """Sketch gradients before torch clips their elements, because afterwards they are no sum."""
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        before = self._sketch_gradients(params)
        result = call(params, *args, **kwargs)
        self._note_values_clipped(params, before or {})
        return result

    @guarded
    def _sketch_gradients(self, params: list[Tensor]) -> dict[int, Tensor]:
        gradients = [(param, param.grad) for param in params]
        return {
            id(param): self.watch.sketch(gradient, param.shape)
            for param, gradient in gradients
            if gradient is not None and not is_distributed(gradient)
        }

    @guarded
    def _note_values_clipped(self, params: list[Tensor], before: dict[int, Tensor]) -> None:
        changed = self.watch.leaves.changed(params)
        for param in params:
            if id(param) in before and param.grad is not None:
                self.watch.unclipped[id(param)] = before[id(param)], grad_state(param.grad)
        if changed:
            self.watch.history.add_note("clip_grad_value_ clips elements; the weights are those before it")
        self.watch.leaves.remember(params)
