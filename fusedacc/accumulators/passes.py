"""Runs a backend over lists of accumulators, and prepares backends for lists that recur.

A pass applies deferred scales: factors that an accumulator must still be multiplied by, usually with the next
addition. All code that writes accumulators must keep them correct.

Note [The deferred scale]
The sum of a window so far, times `Window.sum_scale`, equals d * acc: `acc` is the tensor and d its deferred
scale, usually 1. An addition applies the deferred scale,

    acc <- scale * gradient + round(d * acc),    d <- 1

(`beta` of a backend's `accumulate_`), with the same bits as a separate multiplication before it. A separate
pass would read and write every accumulator once more. d differs from 1 in two cases: a first gradient has
become the accumulator unscaled (d is its scale), or `Window.sum_scale` has changed before the window's last
additions (d is new / old). `Passes.apply_scales` multiplies the accumulators that get no further addition.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..kernels import checks, registry
from ..kernels.dtypes import PAIRS
from ..kernels.local_parts import is_distributed, local
from ..kernels.registry import SELF_CHECKING, Backend, Run
from ..kernels.tensor_identity import TensorIdentity
from ..kernels.torch_state import to_device
from .noise import NoiseSource
from .p_grad import ParamGrads
from .param import Lane, Slot


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
        products: dict[float, float | Tensor] = {1.0: factor}  # slots with equal scales share one tensor
        for slot in slots:
            before = self.scales.get(slot, 1.0)
            key = _key(before)
            if key not in products:
                products[key] = before * factor
            self.scales[slot] = products[key]
        self._held.update((id(value), value) for value in products.values() if isinstance(value, Tensor))

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
    return with_rows(tensor, tensor._indices(), tensor._values() * scale, tensor.is_coalesced())


def with_rows(tensor: Tensor, indices: Tensor, values: Tensor, coalesced: bool = False) -> Tensor:
    """Return a sparse tensor of the same shape with these rows."""
    shape = tensor.shape
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False, is_coalesced=coalesced)


def to_device_of(scale: float | Tensor, other: float | Tensor) -> float | Tensor:
    """Return the scale, moved to the other number's device if both are tensors."""
    if isinstance(scale, Tensor) and isinstance(other, Tensor):
        return to_device(scale, other.device)
    return scale


#: The most prepared lists per parameter, on average. One is usual. A model that uses other parameters in
#: every micro-batch would add lists without end.
MAX_LISTS = 2


class PreparedPass:
    """A backend's prepared call for a list of accumulators, which it does not keep alive.

    An accumulator is recognised by its identity and its address, because the memory of a tensor can be
    swapped (`Module.to` does so with p.grad). A list is prepared on its second use: a gradient that became
    an accumulator may last for one window only.
    """

    def __init__(
        self, backend: Backend, slots: Sequence[Slot], accumulators: Sequence[Tensor], generation: int
    ) -> None:
        self.slots = slots
        self.generation = generation
        self.run: Run | None = None
        self.backend = backend
        self._known = [TensorIdentity(accumulator) for accumulator in accumulators]
        self._addresses = [accumulator.data_ptr() for accumulator in accumulators]

    def holds(self, accumulators: Sequence[Tensor | None]) -> bool:
        """Whether these are the same tensors at the same addresses; None matches no tensor."""
        for known, accumulator in zip(self._known, accumulators, strict=True):
            if accumulator is None or not known.refers_to(accumulator):
                return False
        return self._addresses == [-1 if each is None else each.data_ptr() for each in accumulators]


class Passes:
    """Chooses backends and runs them, and multiplies accumulators."""

    def __init__(
        self,
        grads: ParamGrads,
        deferred: DeferredScales,
        noise: NoiseSource,
        backend: str,
    ) -> None:
        self.grads, self.deferred, self.noise = grads, deferred, noise
        self._backend = backend
        #: Held while accumulators are written.
        self.lock = threading.RLock()
        #: By the first parameter of each list; the same lists come in every micro-batch.
        self.prepared: dict[Slot, PreparedPass] = {}
        self._kept = 0

    def select(self, lane: Lane) -> registry.Selection:
        """Return the backend that adds gradients of this lane, and the reason."""
        device, gradient, accumulator = lane
        return registry.select(device, accumulator, gradient, self._backend)

    def add(
        self,
        accumulators: list[Tensor],
        terms: list[Tensor],
        scale: float | Tensor,
        overwrite: bool | list[bool],
        slots: Sequence[Slot],
        exposed: bool,
    ) -> None:
        """Add to the accumulators of `slots` in one pass, or one for each distinct deferred scale."""
        if not self.deferred.scales or overwrite is True:
            self.run(accumulators, terms, scale, overwrite, slots, exposed)
            return
        for beta, chosen in self.deferred.groups(slots):
            flags = overwrite if isinstance(overwrite, bool) else [overwrite[index] for index in chosen]
            of = [slots[index] for index in chosen]
            former, fresh = [accumulators[index] for index in chosen], [terms[index] for index in chosen]
            self.run(former, fresh, scale, flags, of, exposed, beta)
            self.deferred.discharge(of)

    def run(
        self,
        accumulators: list[Tensor],
        terms: list[Tensor],
        scale: float | Tensor,
        overwrite: bool | list[bool],
        slots: Sequence[Slot],
        exposed: bool,
        beta: float | Tensor = 1.0,
    ) -> None:
        """Run one pass over the accumulators of `slots`. If the user can see the accumulators (`exposed`),
        their version counters are incremented.
        """
        if not accumulators:
            return
        first = accumulators[0]
        chosen = self.select((first.device, terms[0].dtype, first.dtype)).backend
        scale, beta = to_device_of(scale, first), to_device_of(beta, first)
        chosen.accumulate_(accumulators, terms, scale, overwrite, beta, self.noise.of(slots, first.dtype))
        if exposed:
            increment_version(accumulators)

    def keep(self, slots: Sequence[Slot], accumulators: Sequence[Tensor], generation: int) -> None:
        """Remember these accumulators of one lane, to prepare the backend at their next use."""
        former = self.prepared.pop(slots[0], None)
        self._kept += len(slots) - (0 if former is None else len(former.slots))
        if self._kept > MAX_LISTS * len(self.grads.slots):
            self.clear()
            self._kept = len(slots)
        backend = self.select(slots[0].lane).backend
        self.prepared[slots[0]] = PreparedPass(backend, slots, accumulators, generation)

    def clear(self) -> None:
        self.prepared.clear()
        self._kept = 0

    def run_prepared(
        self,
        prepared: PreparedPass,
        accumulators: list[Tensor] | None,
        gradients: list[Tensor],
        scale: float | Tensor,
        beta: float | Tensor,
    ) -> None:
        """Do the same as `run` for a prepared list; pass None for private, unchanged accumulators."""
        if isinstance(scale, Tensor) or isinstance(beta, Tensor):
            scale, beta = to_device_of(scale, gradients[0]), to_device_of(beta, gradients[0])
        slots = prepared.slots
        noise = self.noise.of(slots, slots[0].lane[2])
        # Only the native backends prepare without keeping the tensors alive.
        if prepared.run is None and accumulators is not None and prepared.backend.name in SELF_CHECKING:
            prepared.run = prepared.backend.prepare(accumulators)
        if prepared.run is not None:
            prepared.run(gradients, scale, False, beta, noise)
        else:
            assert accumulators is not None
            prepared.backend.accumulate_(accumulators, gradients, scale, False, beta, noise)
        if self.deferred.scales:
            self.deferred.discharge(slots)

    # Multiplying accumulators, now or with their next addition

    def defer_scale(self, ratio: float | Tensor) -> None:
        """Multiply every accumulator by `ratio`, with its next addition or in `apply_scales`."""
        if not is_one(ratio):
            with self.lock:
                present = self.grads.with_accumulator(self.grads.slots)
                self.deferred.defer([slot for slot, _ in present], ratio)

    def apply_scales(self, slots: Iterable[Slot] | None = None) -> None:
        """Multiply the accumulators of these slots (None: all) by their deferred scales, in one pass."""
        if not self.deferred.scales:
            return
        with self.lock:
            pending = self.deferred.pending(slots)
            for factor, chosen in self.deferred.groups(pending):
                of = [pending[index] for index in chosen]
                self.rescale(self.grads.with_accumulator(of), factor)
                self.deferred.discharge(of)

    def rescale(self, held: Iterable[tuple[Slot, Tensor]], ratio: float | Tensor) -> None:
        """Multiply accumulators by `ratio`, in one pass per dtype."""
        groups: dict[tuple, tuple[list[Slot], list[Tensor]]] = {}
        for slot, accumulator in held:
            part = local(accumulator)
            if checks.is_plain(part) and (part.dtype, part.dtype) in PAIRS:
                chosen = groups.setdefault((part.device, part.dtype), ([], []))
                chosen[0].append(slot)
                chosen[1].append(part)
                if is_distributed(accumulator) and self.grads.exposed:
                    increment_version([accumulator])
            elif accumulator.is_sparse:
                # torch's product would add up rows with the same index.
                accumulator._values().mul_(to_device_of(ratio, accumulator))
            else:
                accumulator.mul_(to_device_of(ratio, accumulator))
        exposed = self.grads.exposed
        for slots, parts in groups.values():
            self.run(parts, parts, ratio, True, slots, exposed)
