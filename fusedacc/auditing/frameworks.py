"""Optimizers that are not torch's: those of fastai, and of Keras on PyTorch.

Their function that makes an update is wrapped once the script has imported their module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

FASTAI = "fastai.optimizer"
KERAS = "keras.src.backend.torch.optimizers.torch_parallel_optimizer"
#: The method of Keras's optimizers on PyTorch that makes an update.
KERAS_UPDATE = "_backend_update_step"
#: Its method that clips.
KERAS_CLIPPING = "_clip_gradients"


class FrameworkOptimizers:
    """Wraps the optimizers of frameworks.

    Args:
        wrap: replaces a function, given its owner, its name, and what to call instead.
        record: records the gradients that an optimizer is about to use, and returns the open update.
        finish: keeps that update.
    """

    def __init__(
        self,
        wrap: Callable[[Any, str, Callable[..., Any]], None],
        record: Callable[[Any, list[Tensor], Sequence[Tensor | None]], Any],
        finish: Callable[[Any, Any], None],
    ) -> None:
        self._wrap, self._record, self._finish = wrap, record, finish
        self._wrapped: set[str] = set()
        #: Of the Keras optimizer that makes an update: by a clipped gradient's id, both gradients.
        self._clipped: dict[int, tuple[Tensor, Tensor]] = {}

    def wrap_imported(self) -> None:
        """Wrap the optimizers of the frameworks that are imported by now."""
        for name, wrap in ((FASTAI, self._wrap_fastai), (KERAS, self._wrap_keras)):
            module = sys.modules.get(name)
            if module is not None and name not in self._wrapped:
                self._wrapped.add(name)
                wrap(module)

    def _wrap_fastai(self, module: Any) -> None:
        def step(call: Callable[..., Any], optimizer: Any, *args: Any) -> None:
            params = [param for group in optimizer.param_lists for param in group]
            update = self._record(optimizer, params, [param.grad for param in params])
            call(optimizer, *args)
            self._finish(optimizer, update)

        self._wrap(module.Optimizer, "step", step)

    def _wrap_keras(self, module: Any) -> None:
        def clip(call: Callable[..., Any], optimizer: Any, grads: Any) -> Any:
            clipped = call(optimizer, grads)
            self._clipped = {
                id(after): (after, before)
                for after, before in zip(clipped, grads, strict=True)
                if after is not None
            }
            return clipped

        def update_step(
            call: Callable[..., Any], optimizer: Any, grads: Any, variables: Any, *args: Any
        ) -> None:
            # `clipnorm` and `clipvalue` change each parameter by itself, so look at what they were given.
            unclipped = [self._clipped.get(id(grad), (grad, grad))[1] for grad in grads]
            self._clipped = {}
            gradients = {id(each.value): grad for each, grad in zip(variables, unclipped, strict=True)}
            params = [each.value for each in optimizer._trainable_variables]
            update = self._record(optimizer, params, [gradients.get(id(param)) for param in params])
            call(optimizer, grads, variables, *args)
            self._finish(optimizer, update)

        self._wrap(module.TorchParallelOptimizer, KERAS_CLIPPING, clip)
        self._wrap(module.TorchParallelOptimizer, KERAS_UPDATE, update_step)
