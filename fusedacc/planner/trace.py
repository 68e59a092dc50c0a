"""A record of the memory of fake tensors: what the operators would have allocated, and when it was let go.

torch's `MemTracker` counts the same storages; but it calls what an optimizer's multi-tensor passes need in
passing its state, refuses a second micro-batch, and hooks every module and parameter, which would change what
the wrapper does. Here nothing is hooked, and kinds are told by whoever runs the step, when they are known.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .allocations import GRADIENTS, TEMPORARIES, Block, Operator, Peak, peak
from .operators import Measure, signature

#: Operators that are handed gradients on their way to a sum.
_ADDS = (torch.ops.aten._foreach_add_.List, torch.ops.aten._foreach_add_.ScalarList)


class Trace(TorchDispatchMode):
    """While it is entered: every storage that an operator returns is a block, until its last tensor dies.

    Args:
        device: storages on it count; those elsewhere do not.

    Enter it inside a `FakeTensorMode`. Storages that were there before are told by `mark`.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._moment = 0
        self._alive: dict[int, tuple[Block, weakref.ref]] = {}
        self.blocks: list[Block] = []
        self.operators: list[Operator] = []
        #: What new storages are for.
        self.kind = TEMPORARIES

    def mark(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Say what these tensors' memory is for, from its beginning on."""
        for tensor in tensors:
            block = self._block(tensor)
            if block is not None:
                block.kind = kind

    @contextlib.contextmanager
    def phase(self, kind: str) -> Iterator[None]:
        """Meanwhile new storages are for this."""
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before

    def peak(self, measure: Measure | None = None) -> Peak:
        """What was alive at the peak; with `measure`, also inside of operators that it knows."""
        inside = None if measure is None else measure({call.signature for call in self.operators})
        return peak(self.blocks, self.operators, inside)

    def bytes(self, kind: str) -> int:
        """The bytes of a kind that are alive."""
        return sum(block.bytes for block, _ in self._alive.values() if block.kind == kind)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._moment += 1
        start = self._moment
        result = func(*args, **kwargs)
        outputs = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        known = len(self.blocks)
        for tensor in outputs:
            self._block(tensor)
        own = signature(func, args, kwargs)
        if own is not None:
            self.operators.append(Operator(start, own, self.blocks[known:]))
        if func in _ADDS or func.namespace == "fusedacc":
            self._mark_terms(tree_leaves((args, kwargs)))
        return result

    def _mark_terms(self, operands: list[Any]) -> None:
        """Gradients on their way to a sum: what else such an operator is handed has a kind already."""
        for operand in operands:
            if isinstance(operand, Tensor):
                block = self._block(operand)
                if block is not None and block.kind == TEMPORARIES:
                    block.kind = GRADIENTS

    def _block(self, tensor: Tensor) -> Block | None:
        """The block that holds the tensor, which begins now if it is new."""
        if tensor.device.type != self._device.type:
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            self._moment += 1
            block = Block(storage.nbytes(), self._moment, self.kind)
            self.blocks.append(block)
            self._alive[key] = block, weakref.ref(storage, self._ending(key))
        return self._alive[key][0]

    def _ending(self, key: int) -> Callable[[Any], None]:
        held = weakref.ref(self)

        def end(_: Any) -> None:
            trace = held()
            if trace is not None:
                trace._moment += 1
                trace._alive.pop(key)[0].end = trace._moment

        return end
