"""An Embedding whose backward adds to the rows of the sum that were looked up, and to no others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..rows import accumulate_rows_
from .site import Site


class EmbeddingSite(Site):
    """An `nn.Embedding`: weight (rows, features)."""

    path = "embedding"

    def __call__(self, input: Tensor) -> Tensor:
        module = self.module
        if self.stands_aside(input) or module.sparse:
            return type(module).forward(module, input)
        return Lookup.apply(module.weight, input, self)


class Lookup(torch.autograd.Function):
    """weight[indices], with the module's `padding_idx`, `max_norm` and `scale_grad_by_freq`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, indices: Tensor, site: EmbeddingSite) -> Tensor:
        module = site.module
        ctx.save_for_backward(indices)
        ctx.set_materialize_grads(False)
        ctx.site, ctx.rows = site, weight.shape[0]
        ctx.padding, ctx.by_freq = module.padding_idx, module.scale_grad_by_freq
        return F.embedding(
            indices, weight, ctx.padding, module.max_norm, module.norm_type, ctx.by_freq, sparse=False
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None, None
        (indices,) = ctx.saved_tensors

        def write(total: Tensor, scale: float | Tensor, keep: float | Tensor) -> None:
            accumulate_rows_(
                total,
                indices,
                gradient,
                scale,
                padding_idx=ctx.padding,
                scale_grad_by_freq=ctx.by_freq,
                backend=ctx.site.backend,
            )

        if ctx.site.takes(ctx.next_functions[0][0], write, (gradient,), indices):
            return None, None, None
        padding = -1 if ctx.padding is None else ctx.padding % ctx.rows
        dense = torch.ops.aten.embedding_dense_backward(gradient, indices, ctx.rows, padding, ctx.by_freq)
        return dense, None, None
