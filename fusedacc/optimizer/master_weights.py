"""float32 master copies of low-precision parameters, on which the inner optimizer runs.

A parameter's memory is swapped for its master's while the inner optimizer steps, so the optimizer's state is
keyed by the model's parameters and is float32. Then one pass rounds the masters into the parameters.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from .. import functional
from ..accumulators import Slot
from ..kernels.local_parts import distributed_as, is_distributed, local

LOW = (torch.bfloat16, torch.float16)


class MasterWeights:
    """The masters of the parameters in `slots`.

    A parameter that was changed from outside since the last update (weights were loaded, say) gives its value
    to its master, in the elements where it is not the master's own, rounded; with `refresh` in all.
    """

    def __init__(self, slots: list[Slot], inner: Optimizer, backend: str) -> None:
        self._slots, self._inner, self._backend = slots, inner, backend
        self._masters: dict[Slot, Tensor] = {}
        self._versions: dict[Slot, tuple[int, int]] = {}
        if not any(slot.param.dtype in LOW for slot in slots):
            warnings.warn(
                "master_weights=True, but no parameter is bfloat16 or float16: there is nothing to keep in "
                "higher precision; leave it out, or convert the model before it is wrapped",
                stacklevel=4,
            )

    def of(self, slot: Slot) -> Tensor | None:
        """The master of a low-precision parameter, up to date; None for another."""
        param = slot.param
        if param.dtype not in LOW:
            return None
        master, version = self._masters.get(slot), _version(param)
        if master is None or master.device != param.device or master.shape != param.shape:
            master = param.detach().to(torch.float32, memory_format=torch.preserve_format)
        elif self._versions.get(slot) != version:
            master = torch.where(master.to(param.dtype) == param.detach(), master, param.detach().float())
        self._masters[slot], self._versions[slot] = master, version
        return master

    def put(self, slot: Slot, master: Tensor) -> None:
        """Take a saved master over, exactly."""
        param = slot.param
        kept = torch.empty_like(param, dtype=torch.float32).copy_(distributed_as(master, param))
        self._masters[slot], self._versions[slot] = kept, _version(param)

    @torch.no_grad()
    def refresh(self) -> None:
        """Take every master anew from its parameter, in the memory that it has: a CUDA graph may know it."""
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
        """While inside, the parameters of `slots` are their masters; then they are these, rounded."""
        pairs = [(slot, master) for slot in slots if (master := self.of(slot)) is not None]
        low = [_put(slot.param, master) for slot, master in pairs]
        self._widen_state(pairs)
        try:
            yield
        finally:
            for (slot, _), data in zip(pairs, low, strict=True):
                _put(slot.param, data)
        if write_back and pairs:
            masters = [local(master) for _, master in pairs]
            functional.scale_cast_([local(data) for data in low], masters, 1.0, backend=self._backend)
            increment_version([slot.param for slot, _ in pairs])
            for slot, _ in pairs:
                self._versions[slot] = _version(slot.param)

    def _widen_state(self, pairs: Sequence[tuple[Slot, Tensor]]) -> None:
        """State from before there were masters, or of a checkpoint without them, becomes float32."""
        for slot, master in pairs:
            state: dict[str, Any] = self._inner.state.get(slot.param, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dtype in LOW and value.shape == master.shape:
                    state[name] = value.float()

    def tensors(self) -> list[Tensor]:
        """The masters there are; each is made at its parameter's first update."""
        return list(self._masters.values())

    @property
    def nbytes(self) -> int:
        return sum(local(master).nbytes for master in self._masters.values())


def _version(param: Tensor) -> tuple[int, int]:
    """What is another once somebody has written to the parameter, or given it other memory."""
    return local(param).data_ptr(), param._version


def _put(param: Any, data: Any) -> Any:
    """Give the parameter the memory of `data`; what has the memory that it had."""
    former = param.data
    param.data = data
    if is_distributed(param):  # whose memory is another tensor's
        former._local_tensor, former._spec = param._local_tensor, param._spec
        param._local_tensor, param._spec = data._local_tensor, data._spec
    return former
