"""An Embedding whose backward pass adds only to the accumulator's rows that were looked up."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import functional as F

from ..kernels import native_module
from ..kernels.checks import ORDINARY_TYPES
from ..kernels.lists import accumulate_rows_
from . import compiled
from .patched_forward import PATCHED, TRACED, PatchedForward, WeightSum

#: The native functions. Without them no module is patched.
_native: Any = native_module.loaded()
#: Why PyTorch computes a call, for `explain()`.
SPARSE = "a forward has read sparse=True, and PyTorch computed that call"


class Options(NamedTuple):
    """The arguments of `F.embedding` after the weight, in the order in which the module reads them."""

    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    sparse: bool


class RowSum(WeightSum):
    """The sum of a weight (rows, features), to which gradients of rows are added."""

    def add_rows(
        self, node: Any, indices: Tensor, gradients: Tensor, padding: int, by_frequency: bool
    ) -> bool:
        """Try to add gradients of rows to the sum, and return whether the gradient needs no further work.

        node: as in `Capture.take_in_place`. padding: a row that gets no gradient, or -1. by_frequency:
        whether a row gets the mean of its gradients.
        """

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


class PatchedEmbedding(PatchedForward, RowSum):
    """An `nn.Embedding`: weight (rows, features)."""

    path = "embedding"

    def output(self, input: Any, weight: Any, options: Options) -> Tensor | None:
        """Return the module's output for the weight and options that it has now.

        Returns None if PyTorch must compute it, or raise.
        """
        if self.left_to_torch(weight, input):
            return None
        padding = _padding(options.padding_idx, len(weight))
        if padding is None or input.dtype not in (torch.int64, torch.int32):
            return None
        if options.sparse:
            self.note(SPARSE)
            return None
        if options.max_norm is not None:
            indices = input.contiguous()
            torch.embedding_renorm_(weight.detach(), indices, options.max_norm, options.norm_type)
        return _native.embedding(input, weight, self.ticket, padding, options.scale_grad_by_freq)

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
        # Try the function for ordinary calls first, with as few calls as possible.
        if (
            weight is patched.slot.param
            and options.max_norm is None
            and not options.sparse
            and type(input) in ORDINARY_TYPES
            and forward_ad._current_level < 0
        ):
            padding = _padding(options.padding_idx, len(weight))
            if padding is not None:
                output = _native.try_embedding(
                    input, weight, patched.ticket, padding, options.scale_grad_by_freq
                )
                if output is not None:
                    return output
        output = patched.output(input, weight, options)
        return F.embedding(input, weight, *options) if output is None else output


def _options(module: Any) -> Options:
    return Options(
        module.padding_idx, module.max_norm, module.norm_type, module.scale_grad_by_freq, module.sparse
    )


def _compiled(traced: Any, input: Tensor, weight: Any, options: Options) -> Tensor | None:
    """Return the output in a graph of torch.compile; None if PyTorch must compute it, or raise."""
    if options.max_norm is not None or options.sparse or not compiled.accumulates(traced, weight):
        return None
    padding = _padding(options.padding_idx, weight.shape[0])
    if padding is None:
        return None
    return compiled.embedding(input, weight, traced.ticket, padding, options.scale_grad_by_freq)


def _padding(padding_idx: int | None, rows: int) -> int | None:
    """Return the row that gets no gradient, or -1; None if there is no such row, which PyTorch refuses."""
    if padding_idx is None:
        return -1
    return padding_idx % rows if -rows <= padding_idx < rows else None
