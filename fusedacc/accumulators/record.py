"""State that all code that writes accumulators must keep correct: deferred scales and partial norms.

A deferred scale is a factor that an accumulator must still be multiplied by, usually with the next addition.
Partial norms are recorded by the additions of a window's last micro-batch, so that the update need not read
the accumulators again.

Note [The deferred scale]
The sum of a window so far, times `Window.sum_scale`, equals d * acc: `acc` is the tensor and d its deferred
scale, usually 1. An addition applies the deferred scale,

    acc <- scale * gradient + round(d * acc),    d <- 1

(`beta` of a backend's `accumulate_`), with the same bits as a separate multiplication before it. A separate
pass would read and write every accumulator once more. d differs from 1 in two cases: a first gradient has
become the accumulator unscaled (d is its scale), or `Window.sum_scale` has changed before the window's last
additions (d is new / old). `Rescaler.apply` multiplies the accumulators that get no further addition.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..kernels.torch_state import to_device
from .noise import NoiseSource
from .p_grad import ParamGrads
from .param import Slot


class DeferredScales:
    """The deferred scales other than 1, by slot: a float or a 0-dim tensor each."""

    def __init__(self) -> None:
        #: Empty if nothing is deferred.
        self.scales: dict[Slot, float | Tensor] = {}
        #: Number of calls that have changed a scale.
        self.num_changes = 0
        #: Tensors that a kernel on another stream may still read, by identity.
        self._held: dict[int, Tensor] = {}

    def __getitem__(self, slot: Slot) -> float | Tensor:
        """Return the deferred scale of a slot's accumulator, 1.0 by default."""
        return self.scales.get(slot, 1.0)

    def defer(self, slots: Iterable[Slot], factor: float | Tensor) -> None:
        """Multiply the deferred scales of these slots by `factor`. A tensor must not change afterwards."""
        self.num_changes += 1
        if not self.scales:
            self._held.clear()
            if not isinstance(factor, Tensor):
                self.scales.update(dict.fromkeys(slots, factor))
                return
        products: dict[float, float | Tensor] = {}  # slots with equal scales share one tensor
        for slot in slots:
            before = self.scales.get(slot)
            if before is None:
                self.scales[slot] = factor
                continue
            key = _key(before)
            if key not in products:
                products[key] = before * factor
            self.scales[slot] = products[key]
        for value in (factor, *products.values()):
            if isinstance(value, Tensor):
                self._held[id(value)] = value

    def discharge(self, slots: Iterable[Slot]) -> None:
        """Remove the scales of slots whose accumulators were multiplied or dropped."""
        self.num_changes += 1
        for slot in slots:
            self.scales.pop(slot, None)

    def clear(self) -> None:
        self.num_changes += 1
        self.scales.clear()

    def pending(self, slots: Iterable[Slot] | None = None) -> list[Slot]:
        """Return those of `slots` (None: all) that have a deferred scale."""
        return list(self.scales) if slots is None else [slot for slot in slots if slot in self.scales]

    def common(self, slots: Sequence[Slot]) -> float | Tensor | None:
        """Return the one scale of all these slots, or None if they differ."""
        groups = self.groups(slots)
        return groups[0][0] if len(groups) == 1 else None

    def groups(self, slots: Sequence[Slot]) -> list[tuple[float | Tensor, list[int]]]:
        """Group the indices of slots by their scale."""
        found: dict[float, tuple[float | Tensor, list[int]]] = {}
        for index, slot in enumerate(slots):
            factor = self.scales.get(slot, 1.0)
            found.setdefault(_key(factor), (factor, []))[1].append(index)
        return list(found.values())


def _key(factor: float | Tensor) -> float:
    """Return a dictionary key: a number's value (numbers are positive), or a tensor's identity."""
    return -id(factor) if isinstance(factor, Tensor) else factor


def is_one(scale: float | Tensor) -> bool:
    """Whether a scale is known to be 1 without synchronising with a device."""
    return not isinstance(scale, Tensor) and scale == 1.0


def scaled(tensor: Tensor, scale: float | Tensor) -> Tensor:
    """Return scale * tensor for a dense or sparse tensor, or the tensor itself if the scale is 1."""
    if is_one(scale):
        return tensor
    scale = to_device_of(scale, tensor)
    if not tensor.is_sparse:
        return tensor * scale
    # torch's product with a tensor would add up repeated indices, and so round differently from autograd. Its
    # product with a number is slow.
    return torch.sparse_coo_tensor(
        tensor._indices(),
        tensor._values() * scale,
        tensor.shape,
        check_invariants=False,
        is_coalesced=tensor.is_coalesced(),
    )


def to_device_of(scale: float | Tensor, tensor: Tensor) -> float | Tensor:
    """Return the scale on the tensor's device."""
    return to_device(scale, tensor.device) if isinstance(scale, Tensor) else scale


#: The partial norms that one launch has recorded, and its accumulators with their version counters.
Launch = tuple[Tensor, list[tuple[Slot, Tensor, int]]]


class PartialNorms:
    """The partial norms of accumulators, recorded by the launches that added to them.

    One launch records the partial norms of all its accumulators together. They are valid while every one of
    these is the same unchanged tensor.
    """

    def __init__(self) -> None:
        #: The norm type that the update will need; None for no norm.
        self.wanted: float | None = None
        #: The norm type that additions record now: `wanted` in a window's last micro-batch, else None.
        self.norm_type: float | None = None
        #: The last launch that added to each slot's accumulator.
        self.latest: dict[Slot, Launch] = {}

    def __bool__(self) -> bool:
        """Whether norms are recorded, or additions record norms now."""
        return bool(self.latest) or self.norm_type is not None

    def record(self, slots: Sequence[Slot], accumulators: Sequence[Tensor], partials: Tensor) -> None:
        """Store the partial norms of a launch that has added to these accumulators."""
        versions = [accumulator._version for accumulator in accumulators]
        self.latest |= dict.fromkeys(slots, (partials, list(zip(slots, accumulators, versions, strict=True))))

    def forget(self, slots: Iterable[Slot]) -> None:
        if self.latest:
            for slot in slots:
                self.latest.pop(slot, None)

    def clear(self) -> None:
        self.latest.clear()
        self.norm_type = None

    def take(self, slots: Sequence[Slot], accumulators: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the valid partial norms, and the accumulators that must be read instead. Forget all norms.

        If the update fails, the user may write to p.grad before the next attempt, so no norm stays valid.
        """
        if not self.latest:
            return [], accumulators
        present = dict(zip(slots, accumulators, strict=True))
        found: list[Tensor] = []
        for launch in {id(launch): launch for launch in self.latest.values()}.values():
            partials, of = launch
            if all(
                self.latest.get(slot) is launch and present.get(slot) is known and known._version == version
                for slot, known, version in of
            ):
                found.append(partials)
                for slot, _, _ in of:
                    del present[slot]
        self.latest.clear()
        return found, list(present.values())


@dataclass(frozen=True)
class Record:
    """The state that code that writes accumulators must update, and the lock to hold while it adds."""

    grads: ParamGrads
    deferred: DeferredScales
    norms: PartialNorms
    noise: NoiseSource
    lock: threading.RLock = field(default_factory=threading.RLock)
