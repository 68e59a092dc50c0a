"""Passes of a backend over accumulators, and what backends have prepared for lists that come again.

A pass discharges deferred scales and records the norms that are wanted.
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

#: In how many of the lists that are kept prepared a parameter may be, on average. One is usual; models that
#: use other parameters every time would have ever new ones.
MAX_LISTS = 2


class PreparedPass:
    """What a backend has prepared for a list of accumulators, without keeping these alive.

    An accumulator is known by its identity and its address: the memory of a tensor can be swapped under it
    (`Module.to` does so with p.grad). Prepared on the second use, since adopted gradients may last for one.
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
        """Whether these are the same tensors, still at the same addresses; None is none of them."""
        known = [reference() for reference in self._references]
        if not all(map(operator.is_, accumulators, known)):
            return False
        return self._addresses == [-1 if each is None else each.data_ptr() for each in accumulators]


class Passes:
    """Chooses backends and runs them."""

    def __init__(self, record: Record, backend: str) -> None:
        self._slots, self._backend = record.grads.slots, backend
        self._deferred, self._norms, self._noise = record.deferred, record.norms, record.noise
        #: By the first of the parameters that were added together; the same come in every micro-batch.
        self.prepared: dict[Slot, PreparedPass] = {}
        self._kept = 0

    def select(self, lane: Lane) -> registry.Selection:
        """Which backend adds gradients of this lane, and why."""
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
        """Add to the accumulators of `slots`: one pass, or one for each of their deferred scales."""
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
        """One pass over the accumulators of `slots`, or over parts of them, of which it leaves no norms then.

        `exposed`: users may see the accumulators, whose versions then tell that they have changed.
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
        """Have these accumulators of one lane prepared when they come again; as `PreparedPass`."""
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
        """As `run`, for what the plan holds; None for accumulators that are private and have not changed."""
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
    """Multiplies accumulators."""

    def __init__(self, record: Record, passes: Passes) -> None:
        self._grads, self._deferred, self._norms = record.grads, record.deferred, record.norms
        self._lock, self._passes = record.lock, passes

    def defer(self, ratio: float | Tensor) -> None:
        """acc *= ratio for every accumulator: by the next addition to it, or by `apply`."""
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
        """acc *= ratio, in a pass for each dtype; with `records_norms` it leaves those that are wanted."""
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
                # A product would sum repeated indices.
                accumulator._values().mul_(to_device_of(ratio, accumulator))
            else:
                accumulator.mul_(to_device_of(ratio, accumulator))
        for slots, accumulators in groups.values():
            exposed = self._grads.exposed
            self._passes.run(
                accumulators, accumulators, ratio, True, slots, exposed, records_norms=records_norms
            )
