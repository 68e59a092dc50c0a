"""What the memory that operators touch is for: bytes are booked by it, and its kind may show later."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..kernels.local_parts import is_distributed, local
from .operands import Operand, tensors_in
from .report import Cell, Counts


@dataclass
class Memory:
    """A piece of memory: its kind, as far as it is known, and its bytes by phase, operator and device."""

    reference: weakref.ref[torch.UntypedStorage] | None = None
    kind: str | None = None
    cells: dict[tuple[str, str, str], Cell] = field(default_factory=dict)

    def add(self, phase: str, op: str, operand: Operand) -> None:
        where = phase, op, operand.device if operand.tensor is None else str(operand.tensor.device)
        self.cells[where] = self.cells.get(where, Cell()).plus(Cell(operand.read, operand.written))

    def book(self, counts: Counts) -> None:
        for (phase, op, device), cell in self.cells.items():
            counts.add(phase, op, self.kind or "other", device, cell)


class Ledger:
    """Bytes of memories, whose kind is asked for when a memory has gone or the figures are wanted."""

    def __init__(self) -> None:
        self.counts = Counts()
        self._leaves: dict[int, weakref.ref[Tensor]] = {}
        #: The memories that tensors have, by address, and the addresses whose memory has gone. At 0 there is
        #: none: sums of which no tensor is to hand.
        self._memories = {0: Memory(kind="gradients")}
        self._gone: deque[int] = deque()

    def memory(self, tensor: Tensor | None) -> Memory:
        """The tensor's, which may be where another was before; for None, that of all sums without one."""
        self._close_the_gone()
        if tensor is None:
            return self._memories[0]
        storage = tensor.untyped_storage()
        key, gone = storage._cdata, self._gone
        if key not in self._memories:
            self._memories[key] = Memory(weakref.ref(storage, lambda _: gone.append(key)))
        return self._memories[key]

    def snapshot(self) -> Counts:
        """A copy of the counts, every byte with the kind that is known by now."""
        self._close_the_gone()
        copy = self.counts.copy()
        for memory in self._memories.values():
            memory.book(copy)
        return copy

    def reset(self) -> None:
        """Back to zero. What is known about tensors is kept."""
        self.counts = Counts()
        for memory in self._memories.values():
            memory.cells.clear()

    def _close_the_gone(self) -> None:
        """Books what memory that is gone has moved, with the kind that it had."""
        while self._gone:
            self._memories.pop(self._gone.popleft()).book(self.counts)
            if len(self._leaves) > 2 * len(self._memories):
                self._leaves = {name: leaf for name, leaf in self._leaves.items() if leaf() is not None}

    # What tensors are

    def know(self, leaf: Tensor) -> None:
        """A leaf that requires a gradient: its memory holds weights."""
        if id(leaf) not in self._leaves or self._leaves[id(leaf)]() is not leaf:
            self._leaves[id(leaf)] = weakref.ref(leaf)
        for part in _plain_parts(leaf):
            self.memory(part).kind = "weights"

    def know_gradient(self, tensor: Tensor | None) -> None:
        """What stands in a leaf's `.grad`; it may be known as something else already."""
        for part in _plain_parts(tensor):
            memory = self.memory(part)
            memory.kind = memory.kind or "gradients"

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
                    self.memory(part).kind = "optimizer"


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
    if is_distributed(tensor):  # which names its mesh among its parts
        yield from _plain_parts(local(tensor))
    elif is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _plain_parts(getattr(tensor, name))
    elif tensor.layout is torch.strided and not tensor.is_nested:
        yield tensor
