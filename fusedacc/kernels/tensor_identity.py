"""Recognises a tensor without keeping its memory alive."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from . import native_module
from .torch_private import WeakTensorRef


class _TensorIdentity:
    """Recognises a tensor. The native module has a class with the same methods.

    `torch.utils.swap_tensors` refuses a tensor to which a weak reference refers. So this object refers weakly
    to the tensor's storage instead: while it does, no other storage has the same address. A sparse tensor has
    no storage, and gets a weak reference. Unlike the native class, this one does not recognise a tensor after
    `tensor.data = other`.
    """

    __slots__ = "_address", "_reference", "_storage"

    def __init__(self, tensor: Tensor) -> None:
        self._address = tensor._cdata
        #: The address of the storage; None for a sparse tensor.
        self._storage: int | None = None
        #: Is not read. It keeps the address from being used again.
        self._reference: Any
        try:
            self._reference = StorageWeakRef(tensor.untyped_storage())
            self._storage = self._reference.cdata
        except (NotImplementedError, RuntimeError):
            self._reference = WeakTensorRef(tensor)

    def refers_to(self, tensor: Tensor) -> bool:
        """Whether it is this tensor."""
        if tensor._cdata != self._address:
            return False
        return self._storage is None or tensor.untyped_storage()._cdata == self._storage


TensorIdentity: Any = getattr(native_module.loaded(), "TensorIdentity", _TensorIdentity)
