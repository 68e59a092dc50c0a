"""Sums of sparse gradients: the rows of one gradient after another's, repeated indices included.

Autograd adds up sparse gradients in the same way. What uses the sum adds up the rows of equal index.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .buffers import storage_users
from .deferred_scale import is_one, to_device_of


def owned(gradient: Tensor, dtype: torch.dtype, sole: bool) -> Tensor:
    """Return a sparse gradient in `dtype`, in memory that nothing else uses.

    An embedding's gradient has the tokens themselves as indices, and its values may be a tensor that the user
    passed to `backward()`. Those are copied; memory that belongs to the gradient alone is kept.

    Args:
        gradient: a sparse tensor.
        dtype: of the result.
        sole: nothing else refers to the gradient itself.
    """

    def own(part: Tensor) -> Tensor:
        # Two users: the gradient, and the variable here.
        return part if sole and part.is_contiguous() and storage_users(part) == 2 else part.clone()

    values = gradient._values()
    values = own(values) if values.dtype == dtype else values.to(dtype)
    return _like(gradient, own(gradient._indices()), values, gradient.is_coalesced())


def joined(total: Tensor, beta: float | Tensor, gradient: Tensor, scale: float | Tensor) -> Tensor:
    """Return beta * total + scale * gradient, reading and writing each row once.

    Args:
        total: a sparse tensor; its dtype is that of the result.
        beta: multiplies `total`.
        gradient: a sparse tensor of the same shape and number of sparse dimensions.
        scale: multiplies `gradient`.
    """
    rows, more = total._values(), gradient._values().to(total.dtype)
    indices = torch.cat((total._indices(), gradient._indices()), 1)
    if is_one(beta) and is_one(scale):
        values = torch.cat((rows, more))
    else:
        values = rows.new_empty((len(rows) + len(more), *rows.shape[1:]))
        torch.mul(rows, to_device_of(beta, rows), out=values[: len(rows)])
        torch.mul(more, to_device_of(scale, more), out=values[len(rows) :])
    found = _like(total, indices, values, coalesced=False)
    # As autograd does: the list of rows must not outgrow the dense tensor without limit.
    return found.coalesce() if len(values) > total.numel() else found


def may_join(total: Tensor, gradient: Tensor) -> bool:
    """Whether `joined` takes both. torch merges two coalesced tensors, and their sum stays coalesced."""
    coalesced = total.is_coalesced() and gradient.is_coalesced()
    return gradient.is_sparse and total.sparse_dim() == gradient.sparse_dim() and not coalesced


def _like(tensor: Tensor, indices: Tensor, values: Tensor, coalesced: bool) -> Tensor:
    return torch.sparse_coo_tensor(
        indices, values, tensor.shape, check_invariants=False, is_coalesced=coalesced
    )
