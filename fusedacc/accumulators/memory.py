"""Memory of gradients and sums: who uses it, and where new sums are.

Only memory that nothing else uses may become a sum or be overwritten by one.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.local_parts import local
from ..kernels.torch_private import FakeTensor, storage_use_count, tensor_references

#: Views in a segment start at multiples of this many bytes: a cache line, and the widest vector load.
ALIGNMENT = 128


class Segment:
    """The memory of a bucket of accumulators that are all-reduced together. buffers: the number of its views
    that belong to the bucket.
    """

    def __init__(self, memory: Tensor, buffers: int) -> None:
        self.memory = memory
        self.buffers = buffers

    def is_shared(self) -> bool:
        """Whether another tensor shares the memory: a user may still hold an old p.grad, or a part of it."""
        return storage_users(self.memory) > self.buffers + 1


def storage_users(tensor: Tensor) -> int:
    """Return how many tensors share the memory of this one, itself included. A program that keeps the object
    `untyped_storage()` counts as one more.
    """
    storage = tensor.untyped_storage()
    kept = sys.getrefcount(storage) > _references_to_storage()
    return storage_use_count(storage._cdata) - 1 + kept  # less the object just made


@functools.cache
def _references_to_storage() -> int:
    """Return what `storage_users` counts where nothing else has the object. torch releases differ."""
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


def owns_memory(tensor: Tensor) -> bool:
    """Whether only the tensor, and the base that it is a view of, use its memory."""
    users = storage_users(tensor)
    if tensor._base is None:
        return users == 1
    # For a fake view of a view torch also keeps the tensor in between, as in a product's transposed gradient.
    return users == 2 or (users == 3 and type(tensor) is FakeTensor)


def _count_references(tensors: list[Tensor], index: int) -> int:
    tensor = tensors[index]
    return sys.getrefcount(tensor)


def _count_base_references(view: Tensor) -> int:
    base = view._base
    return sys.getrefcount(base)


#: References to an entry of a list in a function: the list's, the variable's and the argument's.
_PICKED = _count_references([torch.empty(0)], 0)
#: References to the base of a view. Some torch releases count one reference from C++.
_PICKED_BASE = _count_base_references(torch.empty(2)[:1])


def is_sole(gradients: list[Tensor], index: int) -> bool:
    """Whether only the list refers to a gradient and its memory, so that it may become an accumulator.

    This is stricter than AccumulateGrad, which counts the tensor's references only and can give the same
    memory to two parameters (two views of one gradient). A view keeps its base alive, so the base must have
    no other user. A gradient with a graph or a lazy negation never qualifies.
    """
    gradient = gradients[index]
    if gradient.requires_grad or gradient.is_neg() or gradient._is_zerotensor():
        return False
    if sys.getrefcount(gradient) > _PICKED or tensor_references(gradient) != 1:
        return False
    base = gradient._base
    if base is None:
        return owns_memory(gradient)
    # The view and this variable refer to the base; every fake view refers to it twice.
    fake = type(gradient) is FakeTensor
    known = 2 * storage_users(gradient) - 1 if fake else 2
    sole = sys.getrefcount(base) <= _PICKED_BASE and tensor_references(base) == known
    return sole and owns_memory(gradient)


def cut(
    layouts: Sequence[tuple[torch.Size, Sequence[int]]], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """Allocate one piece of uninitialised memory, and return it with views of these shapes and strides."""
    unit = ALIGNMENT // dtype.itemsize
    offsets = [0, *itertools.accumulate(-(-shape.numel() // unit) * unit for shape, _ in layouts)]
    memory = torch.empty(offsets[-1], dtype=dtype, device=device)
    views = [
        memory.as_strided(shape, strides, offset)
        for (shape, strides), offset in zip(layouts, offsets, strict=False)
    ]
    return memory, views


def bytes_of(accumulator: Tensor) -> int:
    """Return the bytes of this rank's part of a dense or sparse tensor."""
    part = local(accumulator)
    return part._values().nbytes + part._indices().nbytes if part.is_sparse else part.nbytes


def like(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return uninitialised tensors of another dtype, with the shapes, layouts and device of `tensors`."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        return [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    return cut([(tensor.shape, tensor.stride()) for tensor in tensors], dtype, tensors[0].device)[1]
