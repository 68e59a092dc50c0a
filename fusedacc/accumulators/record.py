"""What every writer of accumulators keeps right: the scales that they lack, and the norms that are known.

Deferred scales are factors by which accumulators are yet to be multiplied, as a rule by the next addition.
Partial norms are recorded by the additions of a window's last micro-batch, so that none need be read again.

Note [The deferred scale]
What a window has summed up so far, times `Window.sum_scale`, is d * acc: `acc` is the tensor, d its deferred
scale, 1 as a rule. An addition discharges it,

    acc <- scale * gradient + round(d * acc),    d <- 1

(`beta` of a backend's `accumulate_`), to the bits of a pass that multiplies before. That pass would read and
write every accumulator once more; an addition has it at hand anyway. d is not 1 after a first gradient has
become the accumulator as it was (d is the scale that it came with), and once `Window.sum_scale` has
changed, before the window's last additions (d is new / old). `Rescaler.apply` multiplies what no addition
has.
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
    """By slot: a factor other than 1, a float or 0-dim tensor, by which to multiply its accumulator."""

    def __init__(self) -> None:
        #: Empty where nothing is deferred.
        self.scales: dict[Slot, float | Tensor] = {}
        #: Counts the calls that have changed them.
        self.num_changes = 0
        #: Tensors that a launch on another stream may still have to read, by identity.
        self._held: dict[int, Tensor] = {}

    def __getitem__(self, slot: Slot) -> float | Tensor:
        """The deferred scale of a slot's accumulator; 1.0 where there is none."""
        return self.scales.get(slot, 1.0)

    def defer(self, slots: Iterable[Slot], factor: float | Tensor) -> None:
        """Multiply these accumulators by `factor` too, later. A tensor must not change any more."""
        self.num_changes += 1
        if not self.scales:
            self._held.clear()
            if not isinstance(factor, Tensor):
                self.scales.update(dict.fromkeys(slots, factor))
                return
        products: dict[float, float | Tensor] = {}  # one tensor for all that had one before
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
        """These slots' accumulators have been multiplied, or are gone."""
        self.num_changes += 1
        for slot in slots:
            self.scales.pop(slot, None)

    def clear(self) -> None:
        self.num_changes += 1
        self.scales.clear()

    def pending(self, slots: Iterable[Slot] | None = None) -> list[Slot]:
        """Those of `slots` (None: of all) that have one."""
        return list(self.scales) if slots is None else [slot for slot in slots if slot in self.scales]

    def common(self, slots: Sequence[Slot]) -> float | Tensor | None:
        """The scale of all of these slots' accumulators; None where they differ."""
        groups = self.groups(slots)
        return groups[0][0] if len(groups) == 1 else None

    def groups(self, slots: Sequence[Slot]) -> list[tuple[float | Tensor, list[int]]]:
        """The indices of slots whose accumulators have the same scale, with that."""
        found: dict[float, tuple[float | Tensor, list[int]]] = {}
        for index, slot in enumerate(slots):
            factor = self.scales.get(slot, 1.0)
            found.setdefault(_key(factor), (factor, []))[1].append(index)
        return list(found.values())


def _key(factor: float | Tensor) -> float:
    """Equal for equal numbers, which are above 0, and for a tensor and itself."""
    return -id(factor) if isinstance(factor, Tensor) else factor


def is_one(scale: float | Tensor) -> bool:
    """Whether there is nothing to multiply; what is on a device is not asked."""
    return not isinstance(scale, Tensor) and scale == 1.0


def scaled(tensor: Tensor, scale: float | Tensor) -> Tensor:
    """scale * tensor, sparse or not; the tensor itself where the scale is 1."""
    if is_one(scale):
        return tensor
    scale = to_device_of(scale, tensor)
    if not tensor.is_sparse:
        return tensor * scale
    # torch's product with a tensor would sum repeated indices, and so round elsewhere than autograd does; its
    # product with a number is slow.
    return torch.sparse_coo_tensor(
        tensor._indices(),
        tensor._values() * scale,
        tensor.shape,
        check_invariants=False,
        is_coalesced=tensor.is_coalesced(),
    )


def to_device_of(scale: float | Tensor, tensor: Tensor) -> float | Tensor:
    """The scale where the tensor is."""
    return to_device(scale, tensor.device) if isinstance(scale, Tensor) else scale


#: The partial norms that one launch has left, and the accumulators to which it has added, in their versions.
Launch = tuple[Tensor, list[tuple[Slot, Tensor, int]]]


class PartialNorms:
    """Which partial norms there are, and of which accumulators they still are the norms.

    One launch records the partial norms of all its accumulators together: they count as long as each of these
    is the same tensor, unchanged, and none has been added to since.
    """

    def __init__(self) -> None:
        #: What an update will ask for; None: no norm.
        self.wanted: float | None = None
        #: What additions are to record now: `wanted` in a window's last micro-batch, else None.
        self.norm_type: float | None = None
        #: The launch that has last added to a slot's accumulator.
        self.latest: dict[Slot, Launch] = {}

    def __bool__(self) -> bool:
        """Whether there are any, or additions are to record some."""
        return bool(self.latest) or self.norm_type is not None

    def record(self, slots: Sequence[Slot], accumulators: Sequence[Tensor], partials: Tensor) -> None:
        """A launch has added to these accumulators and left their partial norms."""
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
        """The partial norms that still hold, and those of the accumulators that have to be read. None holds
        after this: should the update fail, p.grad can be written to before the next try."""
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
    """What code that writes accumulators has to keep right, and the lock to hold while it adds."""

    grads: ParamGrads
    deferred: DeferredScales
    norms: PartialNorms
    noise: NoiseSource
    lock: threading.RLock = field(default_factory=threading.RLock)
