"""Runs a backend over lists of accumulators, and prepares backends for lists that recur.

A pass applies deferred scales, and records norms if they are wanted.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.autograd.graph import increment_version

from ..kernels import checks, registry
from ..kernels.dtypes import PAIRS
from ..kernels.local_parts import is_distributed, local
from ..kernels.registry import SELF_CHECKING, Backend, Run
from .param import Lane, Slot
from .record import Record, is_one, to_device_of

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
        self._references = [weakref.ref(accumulator) for accumulator in accumulators]
        self._addresses = [accumulator.data_ptr() for accumulator in accumulators]

    def holds(self, accumulators: Sequence[Tensor | None]) -> bool:
        """Whether these are the same tensors at the same addresses; None matches no tensor."""
        known = [reference() for reference in self._references]
        if not all(map(operator.is_, accumulators, known)):
            return False
        return self._addresses == [-1 if each is None else each.data_ptr() for each in accumulators]


class Passes:
    """Chooses backends and runs them."""

    def __init__(self, record: Record, backend: str) -> None:
        self._slots, self._backend = record.grads.slots, backend
        self._deferred, self._norms, self._noise = record.deferred, record.norms, record.noise
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
        if not self._deferred.scales or overwrite is True:
            self.run(accumulators, terms, scale, overwrite, slots, exposed)
            return
        for beta, chosen in self._deferred.groups(slots):
            flags = overwrite if isinstance(overwrite, bool) else [overwrite[index] for index in chosen]
            of = [slots[index] for index in chosen]
            former, fresh = [accumulators[index] for index in chosen], [terms[index] for index in chosen]
            self.run(former, fresh, scale, flags, of, exposed, beta)
            self._deferred.discharge(of)

    def run(
        self,
        accumulators: list[Tensor],
        terms: list[Tensor],
        scale: float | Tensor,
        overwrite: bool | list[bool],
        slots: Sequence[Slot],
        exposed: bool,
        beta: float | Tensor = 1.0,
        records_norms: bool = True,
    ) -> None:
        """Run one pass over the accumulators of `slots`, or over parts of them with `records_norms=False`.

        `exposed` says whether the user can see the accumulators. Their version counters are then incremented.
        """
        if not accumulators:
            return
        first = accumulators[0]
        chosen = self.select((first.device, terms[0].dtype, first.dtype)).backend
        scale, beta = to_device_of(scale, first), to_device_of(beta, first)
        norm_type = self._norms.norm_type if records_norms else None
        if norm_type is None:
            self._norms.forget(slots)
        noise = self._noise.of(slots, first.dtype)
        partials = chosen.accumulate_(accumulators, terms, scale, overwrite, beta, norm_type, noise)
        if exposed:
            increment_version(accumulators)
        if partials is not None:
            self._norms.record(slots, accumulators, partials)

    def keep(self, slots: Sequence[Slot], accumulators: Sequence[Tensor], generation: int) -> None:
        """Remember these accumulators of one lane, to prepare the backend at their next use."""
        former = self.prepared.pop(slots[0], None)
        self._kept += len(slots) - (0 if former is None else len(former.slots))
        if self._kept > MAX_LISTS * len(self._slots):
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
        source = self._noise
        noise = None if source.seed is None else source.of(slots, slots[0].accumulate_dtype)
        # Only the native backends prepare without keeping the tensors alive.
        if prepared.run is None and accumulators is not None and prepared.backend.name in SELF_CHECKING:
            prepared.run = prepared.backend.prepare(accumulators)
        how = scale, False, beta, self._norms.norm_type, noise
        if prepared.run is not None:
            partials = prepared.run(gradients, *how)
        else:
            assert accumulators is not None
            partials = prepared.backend.accumulate_(accumulators, gradients, *how)
        if self._deferred.scales:
            self._deferred.discharge(slots)
        if partials is None:
            if self._norms.latest:
                self._norms.forget(slots)
        else:
            self._norms.record(slots, accumulators or [slot.accumulator for slot in slots], partials)  # type: ignore[misc]


class Rescaler:
    """Multiplies accumulators, now or with their next addition."""

    def __init__(self, record: Record, passes: Passes) -> None:
        self._grads, self._deferred, self._norms = record.grads, record.deferred, record.norms
        self._lock, self._passes = record.lock, passes

    def defer(self, ratio: float | Tensor) -> None:
        """Multiply every accumulator by `ratio`, with its next addition or in `apply`."""
        if not is_one(ratio):
            with self._lock:
                present = self._grads.with_accumulator(self._grads.slots)
                self._deferred.defer([slot for slot, _ in present], ratio)

    def apply(self, slots: Iterable[Slot] | None = None) -> None:
        """Multiply the accumulators of these slots (None: all) by their deferred scales, in one pass."""
        if not self._deferred.scales:
            return
        with self._lock:
            pending = self._deferred.pending(slots)
            for factor, chosen in self._deferred.groups(pending):
                of = [pending[index] for index in chosen]
                self.rescale(self._grads.with_accumulator(of), factor, records_norms=True)
                self._deferred.discharge(of)

    def rescale(
        self, held: Iterable[tuple[Slot, Tensor]], ratio: float | Tensor, records_norms: bool = False
    ) -> None:
        """Multiply accumulators by `ratio`, in one pass per dtype, which may record norms."""
        groups: dict[tuple, tuple[list[Slot], list[Tensor]]] = {}
        for slot, accumulator in held:
            self._norms.forget([slot])
            dtypes, part = (accumulator.dtype, accumulator.dtype), local(accumulator)
            if checks.is_plain(part) and dtypes in PAIRS:
                chosen = groups.setdefault((part.device, part.dtype), ([], []))
                chosen[0].append(slot)
                chosen[1].append(part)
                if is_distributed(accumulator) and self._grads.exposed:
                    increment_version([accumulator])
            elif accumulator.is_sparse:
                # torch's product would add up rows with the same index.
                accumulator._values().mul_(to_device_of(ratio, accumulator))
            else:
                accumulator.mul_(to_device_of(ratio, accumulator))
        for slots, accumulators in groups.values():
            exposed = self._grads.exposed
            self._passes.run(
                accumulators, accumulators, ratio, True, slots, exposed, records_norms=records_norms
            )
