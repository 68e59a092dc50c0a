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
from ..kernels.torch_state import runs_as_written
from . import compiled
from .patched_forward import PATCHED, TRACED, PatchedForward

#: Why PyTorch computes a call, for `explain()`.
SPARSE = "a forward has read sparse=True, and PyTorch computed that call"


class PatchedEmbedding(PatchedForward):
    """An `nn.Embedding`: weight (rows, features)."""

    path = "embedding"
    native_function = "lookup"

    def try_add(
        self, indices: Tensor, gradients: Tensor, armed: bool, padding: int, by_frequency: bool
    ) -> bool:
        """Add gradients of rows for the native function in its backward pass; return whether that is done.

        armed: whether the graph ends in the node that has the weight's hook. padding (-1 for none),
        by_frequency: of the module at the time of the forward pass.
        """
        return armed and self.add_rows(self.node, indices, gradients, padding, by_frequency)

    def add_rows(
        self, node: Any, indices: Tensor, gradients: Tensor, padding: int, by_frequency: bool
    ) -> bool:
        """Try to add gradients of rows to the sum. `node`: as in `accumulate_in_place`."""

        def write(total: Tensor, scale: float | Tensor, beta: float | Tensor) -> None:
            accumulate_rows_(  # the sum has no deferred scale
                total,
                indices,
                gradients,
                scale,
                padding_idx=None if padding < 0 else padding,
                scale_grad_by_freq=by_frequency,
                backend=self.backend,
            )

        return self.accumulate_in_place(node, write, (gradients,), by_rows=True)

    def output(self, input: Any, weight: Any, options: tuple) -> Tensor | None:
        """Return the module's output for the weight and options that it has now.

        Returns None if PyTorch must compute it, or raise. options: those of `F.embedding` after the weight.
        """
        padding_idx, *_, sparse = options
        if self.left_to_torch(weight, input) or _padding(padding_idx, len(weight)) is None:
            return None
        if sparse:
            self.note(SPARSE)
            return None
        return EmbeddingFunction.apply(weight, input, options, self)

    @staticmethod
    def forward(module: Any, input: Tensor) -> Tensor:
        if is_compiling():  # first, because a compiler makes a guard of every value that is read before
            traced = getattr(module, TRACED)
            if not compiled.replaces(traced, module):
                return type(module).forward(module, input)
            weight = module.weight
            options = _options(module)
            output = _compiled(traced, input, weight, options)
            return F.embedding(input, weight, *options) if output is None else output
        patched = module.__dict__.get(PATCHED)
        if patched is None or type(module).forward is not patched.stock:
            return type(module).forward(module, input)
        weight = patched.read(module, "weight")
        options = _options(module)
        padding_idx, max_norm, _, by_frequency, sparse = options
        slot = patched.slot
        hook = slot.native_hook  # try the native function first, with as few calls as possible
        if (
            hook is not None
            and weight is slot.param
            and patched._recorded is not None
            and max_norm is None
            and not sparse
            and type(input) in ORDINARY_TYPES
            and forward_ad._current_level < 0
        ):
            padding = _padding(padding_idx, len(weight))
            if padding is not None:
                output = patched._recorded(patched._native, hook, input, weight, padding, by_frequency)
                if output is not None:
                    return output
        output = patched.output(input, weight, options)
        return F.embedding(input, weight, *options) if output is None else output


def _options(module: Any) -> tuple:
    """Return the arguments of `F.embedding` after the weight, in the order in which the module reads them."""
    return module.padding_idx, module.max_norm, module.norm_type, module.scale_grad_by_freq, module.sparse


def _compiled(traced: Any, input: Tensor, weight: Any, options: tuple) -> Tensor | None:
    """Return the output in a graph of torch.compile; None if PyTorch must compute it, or raise."""
    padding_idx, max_norm, _, by_frequency, sparse = options
    if max_norm is not None or sparse or not compiled.accumulates(traced, weight):
        return None
    padding = _padding(padding_idx, weight.shape[0])
    if padding is None:
        return None
    return compiled.embedding(input, weight, traced.ticket, padding, by_frequency)


def _padding(padding_idx: int | None, rows: int) -> int | None:
    """Return the row that gets no gradient, or -1; None if there is no such row, which PyTorch refuses."""
    if padding_idx is None:
        return -1
    return padding_idx % rows if -rows <= padding_idx < rows else None


class EmbeddingFunction(torch.autograd.Function):
    """Compute weight[indices]. options: those of `F.embedding` after the weight."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, indices: Tensor, options: tuple, patched: PatchedEmbedding
    ) -> Tensor:
        padding_idx, _, _, by_frequency, _ = options
        ctx.save_for_backward(indices)
        ctx.set_materialize_grads(False)
        ctx.patched = patched
        ctx.rows = weight.shape[0]
        ctx.options = _padding(padding_idx, ctx.rows), by_frequency
        return F.embedding(indices, weight, *options)

    @staticmethod
    @runs_as_written
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None, None, None
        (indices,) = ctx.saved_tensors
        if ctx.patched.add_rows(ctx.next_functions[0][0], indices, gradient, *ctx.options):
            return None, None, None, None
        dense = torch.ops.aten.embedding_dense_backward(gradient, indices, ctx.rows, *ctx.options)
        return dense, None, None, None
