"""Sums of sparse gradients: the rows of all gradients one after another, repeated indices included.

The code that uses the sum adds up rows with the same index. Autograd's own sum merges some of these rows
earlier, so its last bits differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.dtypes import Number
from .deferred_scale import is_one, to_device_of
from .memory import storage_users


def with_rows(tensor: Tensor, indices: Tensor, values: Tensor, *, is_coalesced: bool = False) -> Tensor:
    """Return a sparse tensor of the same shape with these rows."""
    return torch.sparse_coo_tensor(
        indices, values, tensor.shape, check_invariants=False, is_coalesced=is_coalesced
    )


def scaled(tensor: Tensor, scale: Number) -> Tensor:
    """Return scale * tensor for a dense or sparse tensor, or the tensor itself if the scale is 1."""
    if is_one(scale):
        return tensor
    scale = to_device_of(scale, tensor)
    if not tensor.is_sparse:
        return tensor * scale
    # torch's product with a tensor would add up repeated indices, and so round differently from autograd. Its
    # product with a number is slow.
    values = tensor._values() * scale
    return with_rows(tensor, tensor._indices(), values, is_coalesced=tensor.is_coalesced())


def owned_rows(gradient: Tensor, dtype: torch.dtype, *, is_unshared: bool) -> Tensor:
    """Return a sparse gradient in `dtype`, in memory that nothing else uses.

    An embedding's gradient has the tokens themselves as indices, and its values may be a tensor that the user
    passed to `backward()`. Those are copied; memory that belongs to the gradient alone is kept. is_unshared:
    whether only the caller refers to the gradient.
    """

    def own(part: Tensor) -> Tensor:
        # Two users: the gradient, and the variable here.
        is_free = is_unshared and part.is_contiguous() and storage_users(part) == 2
        return part if is_free else part.clone()

    values = gradient._values()
    values = own(values) if values.dtype == dtype else values.to(dtype)
    indices = own(gradient._indices())
    return with_rows(gradient, indices, values, is_coalesced=gradient.is_coalesced())


def append_rows(
    total: Tensor, beta: Number, gradient: Tensor, scale: Number, expected_rows: int | None
) -> Tensor:
    """Return beta * total + scale * gradient of sparse tensors, reading and writing each row at most once.

    expected_rows: how many rows the sum is likely to get. Memory for them is allocated at once, and later
    gradients are appended to the rows. None: other code may hold `total`, so it is copied.
    """
    rows = total._values()
    more_rows = gradient._values()
    indices = torch.cat((total._indices(), gradient._indices()), 1)
    if more_rows.dtype is not rows.dtype:
        more_rows = more_rows.to(rows.dtype)
    num_before = rows.shape[0]
    num_rows = num_before + more_rows.shape[0]
    if expected_rows is not None and is_one(beta) and _has_room(rows, num_rows):
        values = rows.resize_(num_rows, *rows.shape[1:])  # `rows` is another tensor than the sum's own
    else:
        values = rows.new_empty((max(num_rows, expected_rows or 0), *rows.shape[1:]))[:num_rows]
        torch.mul(rows, to_device_of(beta, rows), out=values[:num_before])
    torch.mul(more_rows, to_device_of(scale, more_rows), out=values[num_before:])
    joined = with_rows(total, indices, values)
    # As in autograd, the list of rows must not outgrow the dense tensor without limit.
    return joined.coalesce() if num_rows > total.numel() else joined


def _has_room(rows: Tensor, num_rows: int) -> bool:
    """Return whether the memory of these rows has room for `num_rows` rows, and nothing else uses it."""
    # Two users: the sum's tensor of values, and `rows`, which is another tensor.
    if storage_users(rows) != 2 or rows.storage_offset() != 0 or not rows.is_contiguous():
        return False
    memory = rows.untyped_storage()
    # Memory that torch has not allocated cannot be resized.
    return memory.resizable() and memory.nbytes() >= num_rows * rows.stride(0) * rows.element_size()
