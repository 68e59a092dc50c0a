"""Weights in autocast's dtype, cast in a window's first forward and kept until its update."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..accumulators import Slot
from ..kernels import torch_state
from ..kernels.torch_state import runs_as_written

#: Elements of a weight that are looked at in each forward.
SAMPLED = 8


@dataclass
class _Kept:
    """One cast, of what it was made, and a few elements of that.

    Attributes:
        cast: the weight in autocast's dtype, outside of any graph.
        state: as `_state_of`.
        storage: the weight's, so that none after it has its address.
        sampled: `SAMPLED` elements of the weight where they are, which holds their storage, and as they were;
            None off the CPU, where to compare them is to wait, and of fake tensors.
    """

    cast: Tensor
    state: tuple
    storage: StorageWeakRef
    sampled: tuple[Tensor, Tensor] | None


class KeptCasts:
    """The casts of a window's weights; their owner drops them before whatever may change weights unseen."""

    def __init__(self) -> None:
        self._kept: dict[Slot, _Kept] = {}

    def of(self, slot: Slot, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The slot's weight in `dtype`: the kept one while it is up to date, else a new one.

        None where none may be kept: autocast's cache is off, a CUDA graph is captured, a mode of torch's
        own looks at the operators, or the weight's elements lie apart.

        Raises:
            RuntimeError: a sampled element has changed, and the weight's version has not.
        """
        if (
            not torch.is_autocast_cache_enabled()
            or torch.is_inference_mode_enabled()
            or torch_state.capturing()
            or (torch._C._len_torch_dispatch_stack() and _is_traced())
        ):
            return None
        state, kept = _state_of(weight, dtype), self._kept.get(slot)
        if kept is None or kept.state != state:
            if not torch.ops.aten.is_non_overlapping_and_dense(weight):
                return None
            kept = self._kept[slot] = _made(weight, dtype, state)
        elif kept.sampled is not None and not torch.equal(*kept.sampled) and _is_written(*kept.sampled):
            self._kept.pop(slot, None)
            raise RuntimeError(
                f"parameter {slot.name!r} was written in mid-window where autograd does not see it "
                "(param.data), and keep_casts=True has kept its cast from before: micro-batches since may "
                "have used that. Call discard(), and write parameters under torch.no_grad(), or keep no casts"
            )
        return kept.cast

    def forget(self, slots: Iterable[Slot]) -> None:
        """Let the casts of these slots go."""
        for slot in slots:
            self._kept.pop(slot, None)

    def drop(self) -> None:
        """Let all go."""
        self._kept.clear()

    @contextlib.contextmanager
    def dropped(self) -> Iterator[None]:
        """Context in which weights change: no cast lives on in it, or after it."""
        self.drop()
        try:
            yield
        finally:
            self.drop()


def _state_of(weight: Tensor, dtype: torch.dtype) -> tuple:
    """What is the same as long as a cast is up to date, if nobody writes past the version."""
    return (
        dtype,
        weight.dtype,
        weight._version,
        weight.untyped_storage()._cdata,
        weight.data_ptr(),
        weight.shape,
        weight.stride(),
        torch_state.raw_stream(weight),
    )


def _made(weight: Tensor, dtype: torch.dtype, state: tuple) -> _Kept:
    detached = weight.detach()
    sampled, count = None, min(SAMPLED, weight.numel())
    if weight.device.type == "cpu" and count and not isinstance(weight, FakeTensor):
        live = detached.as_strided((count,), ((weight.numel() - 1) // max(1, count - 1),))
        sampled = live, live.clone()
    return _Kept(detached.to(dtype), state, StorageWeakRef(weight.untyped_storage()), sampled)


def _is_written(live: Tensor, sample: Tensor) -> bool:
    """Whether elements that are not equal differ in their bits: a nan is not equal to itself."""
    return not torch.equal(live.clone().view(torch.uint8), sample.view(torch.uint8))


def _is_traced() -> bool:
    """Whether a mode of torch's own may trace this forward, or pair its operators with those of another.

    Selective checkpoints pair them. A cast from before would be a constant to the one, and none to the other.
    Fake tensors stand for ordinary ones.
    """
    return any(
        type(mode).__module__.startswith("torch.") and not isinstance(mode, FakeTensorMode)
        for mode in _get_current_dispatch_mode_stack()
    )


class CastFunction(torch.autograd.Function):
    """`weight.to(kept.dtype)` without a copy: `kept` has its elements already, and the output has its memory.

    The gradient is cast as autocast casts it.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, kept: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        ctx.set_materialize_grads(False)
        return kept.detach()

    @staticmethod
    @runs_as_written
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        return None if gradient is None else gradient.to(ctx.dtype), None
