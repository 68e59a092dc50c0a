"""float32 master weights of low-precision parameters, which the inner optimizer updates.

While the inner optimizer steps, each parameter's memory is swapped for its master's. So the optimizer's state
is float32 and keyed by the model's parameters. Then one pass rounds the masters into the parameters.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from .. import functional
from ..accumulators import Slot
from ..kernels.local_parts import distributed_as, is_distributed, local

LOW = (torch.bfloat16, torch.float16)


class _Swap(NamedTuple):
    """A parameter whose memory is swapped for its master's.

    Attributes:
        slot: the parameter's slot.
        master: the master.
        low: a tensor with the parameter's own memory.
    """

    slot: Slot
    master: Tensor
    low: Any


class MasterWeights:
    """The master weights of the parameters in `slots`.

    If other code has changed a parameter since the last update, for example by loading weights, its master
    takes the new value in the elements that differ from the rounded master. `refresh` copies all elements.
    """

    def __init__(self, slots: list[Slot], inner: Optimizer, backend: str) -> None:
        self._slots = slots
        self._inner = inner
        self._backend = backend
        self._masters: dict[Slot, Tensor] = {}
        self._versions: dict[Slot, tuple[int, int]] = {}
        if not any(slot.param.dtype in LOW for slot in slots):
            warnings.warn(
                "master_weights=True, but no parameter is bfloat16 or float16: there is nothing to keep in "
                "higher precision; leave it out, or convert the model before it is wrapped",
                stacklevel=4,
            )

    def of(self, slot: Slot) -> Tensor | None:
        """Return the up-to-date master of a low-precision parameter; None for other parameters."""
        param = slot.param
        if param.dtype not in LOW:
            return None
        master = self._masters.get(slot)
        version = _version(param)
        if master is None or master.device != param.device or master.shape != param.shape:
            master = param.detach().to(torch.float32, memory_format=torch.preserve_format)
        elif self._versions.get(slot) != version:
            master = torch.where(master.to(param.dtype) == param.detach(), master, param.detach().float())
        self._masters[slot] = master
        self._versions[slot] = version
        return master

    def put(self, slot: Slot, master: Tensor) -> None:
        """Set a master to the exact saved values."""
        param = slot.param
        copy = torch.empty_like(param, dtype=torch.float32).copy_(distributed_as(master, param))
        self._masters[slot] = copy
        self._versions[slot] = _version(param)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy every parameter into its master. The memory stays, because a CUDA graph may use it."""
        for slot, master in list(self._masters.items()):
            param = slot.param
            if param.dtype in LOW and master.shape == param.shape and master.device == param.device:
                master.copy_(param.detach())
                self._versions[slot] = _version(param)
            else:
                self.drop([slot])

    def drop(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self._masters.pop(slot, None)
            self._versions.pop(slot, None)

    @contextlib.contextmanager
    def swapped(self, slots: Sequence[Slot], write_back: bool = True) -> Iterator[None]:
        """Swap masters into the parameters of `slots`; afterwards round the masters into the parameters."""
        swaps: list[_Swap] = []
        for slot in slots:
            master = self.of(slot)
            if master is not None:
                swaps.append(_Swap(slot, master, low=_put(slot.param, master)))
        for swap in swaps:
            self._widen_state(swap)
        try:
            yield
        finally:
            for swap in swaps:
                _put(swap.slot.param, swap.low)
        if write_back and swaps:
            functional.scale_cast_(
                [local(swap.low) for swap in swaps],
                [local(swap.master) for swap in swaps],
                1.0,
                backend=self._backend,
            )
            increment_version([swap.slot.param for swap in swaps])
            for swap in swaps:
                self._versions[swap.slot] = _version(swap.slot.param)

    def _widen_state(self, swap: _Swap) -> None:
        """Convert state that comes from a time or a checkpoint without masters to float32."""
        state: dict[str, Any] = self._inner.state.get(swap.slot.param, {})
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dtype in LOW and value.shape == swap.master.shape:
                state[name] = value.float()

    def tensors(self) -> list[Tensor]:
        """Return all masters. Each is created at its parameter's first update."""
        return list(self._masters.values())


def _version(param: Tensor) -> tuple[int, int]:
    """Return a value that changes when the parameter is written or gets other memory."""
    return local(param).data_ptr(), param._version


def _put(param: Any, data: Any) -> Any:
    """Give the parameter the memory of `data`, and return a tensor with its former memory."""
    former = param.data
    param.data = data
    if is_distributed(param):  # its memory belongs to its local tensor
        former._local_tensor = param._local_tensor
        former._spec = param._spec
        param._local_tensor = data._local_tensor
        param._spec = data._spec
    return former
