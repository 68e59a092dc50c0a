"""What the memory that operators touch is for: bytes are booked by it, and its kind may show later."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .operands import Operand, tensors_in
from .report import Cell, Counts


class Ledger:
    """Bytes of memories, whose kind is asked for when a memory has gone or the figures are wanted.

    A memory is known by its address (`key`), which may have been another's before.
    """

    def __init__(self) -> None:
        self.counts = Counts()
        self.kinds: dict[int, str] = {}
        self._leaves: dict[int, weakref.ref[Tensor]] = {}
        #: The memories that tensors have, by address, and the addresses whose memory has gone.
        self._memories: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._gone: deque[int] = deque()
        self._open: dict[int, dict[tuple[str, str, str], Cell]] = {}

    def key(self, tensor: Tensor) -> int:
        """The tensor's memory."""
        self._close_the_gone()
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memories:
            gone = self._gone  # and not `self`, which the memory would keep
            self._memories[key] = weakref.ref(storage, lambda _: gone.append(key))
        return key

    def kind(self, tensor: Tensor) -> str | None:
        """What the tensor's memory is known to hold."""
        return self.kinds.get(self.key(tensor))

    def book(self, key: int | None, operand: Operand, phase: str, op: str, kind: str | None) -> None:
        """Adds an operand's bytes to those of its memory; where that is not to hand, of gradients.

        kind: of the memory, where it is not known yet.
        """
        cell = Cell(operand.read, operand.written)
        if key is None:
            self.counts.add(phase, op, "gradients", operand.device, cell)
            return
        assert operand.tensor is not None
        if kind is not None:
            self.kinds.setdefault(key, kind)
        where, cells = (phase, op, str(operand.tensor.device)), self._open.setdefault(key, {})
        cells[where] = cells.get(where, Cell()).plus(cell)

    def snapshot(self) -> Counts:
        """A copy of the counts, every byte with the kind that is known by now."""
        self._close_the_gone()
        copy = self.counts.copy()
        for key, cells in self._open.items():
            copy.book(cells, self.kinds.get(key, "other"))
        return copy

    def reset(self) -> None:
        """Back to zero. What is known about tensors is kept."""
        self.counts = Counts()
        self._open.clear()

    def _close_the_gone(self) -> None:
        """Books what memory that is gone has moved, with the kind that it had."""
        while self._gone:
            key = self._gone.popleft()
            self._memories.pop(key, None)
            self.counts.book(self._open.pop(key, {}), self.kinds.pop(key, "other"))
            if len(self._leaves) > 2 * len(self._memories):
                self._leaves = {name: leaf for name, leaf in self._leaves.items() if leaf() is not None}

    # What tensors are

    def know(self, leaf: Tensor) -> None:
        """A leaf that requires a gradient: its memory holds weights."""
        if id(leaf) not in self._leaves or self._leaves[id(leaf)]() is not leaf:
            self._leaves[id(leaf)] = weakref.ref(leaf)
        for part in _plain_parts(leaf):
            self.kinds[self.key(part)] = "weights"

    def know_gradient(self, tensor: Tensor | None) -> None:
        """What stands in a leaf's `.grad`; it may be known as something else already."""
        for part in _plain_parts(tensor):
            self.kinds.setdefault(self.key(part), "gradients")

    def know_gradients(self) -> None:
        """Of all leaves that are known."""
        for reference in list(self._leaves.values()):
            leaf = reference()
            self.know_gradient(leaf.grad if leaf is not None and leaf.is_leaf else None)

    def know_state(self, optimizer: Optimizer) -> None:
        """The optimizer's own tensors."""
        for state in list(optimizer.state.values()):
            for tensor in tensors_in(state):
                for part in _plain_parts(tensor):
                    self.kinds[self.key(part)] = "optimizer"


def leaves_of(parameters: Any) -> list[Tensor]:
    """The tensors of a module, an optimizer or an iterable; TypeError for anything else."""
    if parameters is None:
        return []
    if isinstance(parameters, torch.nn.Module):
        return list(parameters.parameters())
    if isinstance(parameters, Optimizer):
        return [parameter for group in parameters.param_groups for parameter in group["params"]]
    allowed = "a torch.nn.Module, a torch.optim.Optimizer or an iterable of tensors"
    if isinstance(parameters, Tensor) or not isinstance(parameters, Iterable):
        raise TypeError(f"parameters must be {allowed}, got {type(parameters).__name__}")
    leaves = list(parameters)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise TypeError(f"parameters must be {allowed}; it holds {type(leaf).__name__}")
    return leaves


def _plain_parts(tensor: Any) -> Iterator[Tensor]:
    """The tensors with memory of their own that a tensor is made of: itself, or those that it wraps."""
    if tensor is None:
        return
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _plain_parts(getattr(tensor, name))
    elif tensor.layout is torch.strided and not tensor.is_nested:
        yield tensor
