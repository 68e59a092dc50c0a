"""Casts of weights to autocast's dtype, made in a window's first forward pass and kept until the update."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..accumulators import Slot
from ..kernels import torch_state
from ..kernels.torch_private import (
    FakeTensor,
    FakeTensorMode,
    dispatch_modes,
    num_dispatch_modes,
    runs_as_written,
)

#: Elements of a weight that are compared in each forward pass.
SAMPLED = 8


class _Kept(NamedTuple):
    """A kept cast, and the state of the weight from which it was made."""

    cast: Tensor
    state: tuple
    #: Refers to the weight's storage, so that no later storage gets its address.
    storage: StorageWeakRef
    #: A view of `SAMPLED` elements of the weight, and a copy of their values; None for fake tensors and on
    #: other devices, where a comparison would synchronise.
    sampled: tuple[Tensor, Tensor] | None


class KeptCasts:
    """The casts of a window's weights. The owner drops them before weights may change unnoticed."""

    def __init__(self) -> None:
        self._kept: dict[Slot, _Kept] = {}

    def of(self, slot: Slot, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the slot's weight in `dtype`: the kept cast if it is up to date, else a new one.

        Returns None if no cast may be kept: autocast's cache is off, a CUDA graph is captured, a torch
        dispatch mode traces operators, or the weight is not dense. Raises RuntimeError if a sampled element
        has changed, but the weight's version has not.
        """
        if (
            not torch.is_autocast_cache_enabled()
            or torch.is_inference_mode_enabled()
            or torch_state.capturing()
            or (num_dispatch_modes() and _is_traced())
        ):
            return None
        kept = self._kept.get(slot)
        # It changes with the weight, unless code bypasses the version counter.
        state = (
            dtype,
            weight.dtype,
            weight._version,
            weight.untyped_storage()._cdata,
            weight.data_ptr(),
            weight.shape,
            weight.stride(),
            torch_state.raw_stream(weight),
        )
        if kept is None or kept.state != state:
            if not torch.ops.aten.is_non_overlapping_and_dense(weight):
                return None
            kept = self._kept[slot] = _made(weight, dtype, state)
        elif kept.sampled is not None and not torch.equal(*kept.sampled) and _is_written(*kept.sampled):
            self._kept.pop(slot, None)
            raise RuntimeError(
                f"parameter {slot.name!r} was written in mid-window where autograd does not see it "
                "(param.data), but keep_casts=True has kept its former cast, which later micro-batches may "
                "have used. Call discard(), and write parameters under torch.no_grad(), or keep no casts"
            )
        return kept.cast

    def forget(self, slots: Iterable[Slot]) -> None:
        """Drop the casts of these slots."""
        for slot in slots:
            self._kept.pop(slot, None)

    def drop(self) -> None:
        """Drop all casts."""
        self._kept.clear()

    @contextlib.contextmanager
    def dropped(self) -> Iterator[None]:
        """Drop all casts before and after a block that changes weights."""
        self.drop()
        try:
            yield
        finally:
            self.drop()


def _made(weight: Tensor, dtype: torch.dtype, state: tuple) -> _Kept:
    detached = weight.detach()
    sampled = None
    count = min(SAMPLED, weight.numel())
    if weight.device.type == "cpu" and count and not isinstance(weight, FakeTensor):
        live = detached.as_strided((count,), ((weight.numel() - 1) // max(1, count - 1),))
        sampled = live, live.clone()
    return _Kept(detached.to(dtype), state, StorageWeakRef(weight.untyped_storage()), sampled)


def _is_written(live: Tensor, sample: Tensor) -> bool:
    """Whether elements that compare as different differ in their bits, because nan is not equal to itself."""
    return not torch.equal(live.clone().view(torch.uint8), sample.view(torch.uint8))


def _is_traced() -> bool:
    """Whether a torch dispatch mode may trace this forward pass, or match its operators with a second pass.

    Selective checkpoints match operators. An earlier cast would be a constant in one pass and an operator in
    the other. Fake tensor modes do not count, because fake tensors behave like ordinary ones.
    """
    return any(
        type(mode).__module__.startswith("torch.") and not isinstance(mode, FakeTensorMode)
        for mode in dispatch_modes()
    )


class CastFunction(torch.autograd.Function):
    """Compute `weight.to(kept.dtype)` without a copy: the output shares the memory of `kept`.

    The gradient is cast as in autocast.
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
