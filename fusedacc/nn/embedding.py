"""An Embedding whose backward pass adds only to the accumulator's rows that were looked up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import functional as F

from ..kernels.checks import ORDINARY_TYPES
from ..kernels.lists import accumulate_rows_
from ..kernels.rounding import Noise
from ..kernels.torch_state import runs_as_written
from . import compiled
from .patched_forward import PATCHED, TRACED, PatchedForward


class PatchedEmbedding(PatchedForward):
    """An `nn.Embedding`: weight (rows, features)."""

    path = "embedding"
    native_function = "lookup"

    def adds(self, indices: Tensor, gradients: Tensor, armed: bool, padding: int, by_frequency: bool) -> bool:
        """Add gradients of rows for the native function in its backward pass; return whether that is done.

        armed: whether the graph ends in the node that has the weight's hook. padding (-1 for none),
        by_frequency: of the module at the time of the forward pass.
        """
        return armed and self.add_rows(self.node, indices, gradients, padding, by_frequency)

    def add_rows(
        self, node: Any, indices: Tensor, gradients: Tensor, padding: int, by_frequency: bool
    ) -> bool:
        """Try to add gradients of rows to the sum. `node`: as in `accumulate_in_place`."""

        def write(total: Tensor, scale: float | Tensor, beta: float | Tensor, noise: Noise | None) -> None:
            accumulate_rows_(  # the sum has no deferred scale
                total,
                indices,
                gradients,
                scale,
                padding_idx=None if padding < 0 else padding,
                scale_grad_by_freq=by_frequency,
                backend=self.backend,
                noise=noise,
            )

        return self.accumulate_in_place(node, write, (gradients,), by_rows=True)

    def _lookup(self, module: Any, input: Any) -> Tensor | None:
        """Return the output of the native function, or None if the Python function must compute it."""
        hook, weight = self.slot.native, module._parameters.get("weight")
        if (
            hook is None
            or self._recorded is None
            or module.max_norm is not None
            or module.sparse
            or weight is not self.slot.param
            or type(module).forward is not self._stock
            or type(input) not in ORDINARY_TYPES
            or forward_ad._current_level >= 0
        ):
            return None
        padding = _padding(module, len(weight))
        return self._recorded(self._native, hook, input, weight, padding, module.scale_grad_by_freq)

    @staticmethod
    def forward(module: Any, input: Tensor) -> Tensor:
        if is_compiling():  # first, because a compiler makes a guard of every value that is read before
            return _compiled(module, input)
        patched = module.__dict__.get(PATCHED)
        if patched is None:
            return type(module).forward(module, input)
        output = patched._lookup(module, input)
        if output is not None:
            return output
        if patched.uses_stock_forward(module, input) or module.sparse:
            return type(module).forward(module, input)
        return EmbeddingFunction.apply(module.weight, input, patched)


def _compiled(module: Any, input: Tensor) -> Tensor:
    """Run the forward pass in a graph of torch.compile."""
    traced, weight = getattr(module, TRACED), module.weight
    if module.max_norm is not None or module.sparse or not compiled.accumulates(traced, weight):
        return type(module).forward(module, input)
    padding = _padding(module, weight.shape[0])
    return compiled.embedding(input, weight, traced.ticket, padding, module.scale_grad_by_freq)


def _padding(module: Any, rows: int) -> int:
    return -1 if module.padding_idx is None else module.padding_idx % max(rows, 1)


class EmbeddingFunction(torch.autograd.Function):
    """Compute weight[indices], with the module's `padding_idx`, `max_norm` and `scale_grad_by_freq`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, indices: Tensor, patched: PatchedEmbedding) -> Tensor:
        module = patched.module
        ctx.save_for_backward(indices)
        ctx.set_materialize_grads(False)
        ctx.patched, ctx.rows = patched, weight.shape[0]
        ctx.options = _padding(module, ctx.rows), module.scale_grad_by_freq
        options = module.padding_idx, module.max_norm, module.norm_type, module.scale_grad_by_freq
        return F.embedding(indices, weight, *options, sparse=False)

    @staticmethod
    @runs_as_written
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None, None
        (indices,) = ctx.saved_tensors
        if ctx.patched.add_rows(ctx.next_functions[0][0], indices, gradient, *ctx.options):
            return None, None, None
        dense = torch.ops.aten.embedding_dense_backward(gradient, indices, ctx.rows, *ctx.options)
        return dense, None, None
