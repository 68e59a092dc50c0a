"""Accumulators times a factor: deferred, or in a pass of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from torch import Tensor
from torch.autograd.graph import increment_version

from ..kernels import checks
from ..kernels.dtypes import PAIRS
from ..kernels.local_parts import is_distributed, local
from .deferred_scale import DeferredScales, is_one, to_device_of
from .p_grad import ParamGrads
from .param import Slot
from .partial_norms import PartialNorms
from .plan_cache import PlanCache


class Rescaler:
    """Multiplies accumulators.

    Args:
        grads: where the accumulators are.
        plans: runs the passes.
        deferred: what is still to be multiplied by.
        norms: of accumulators before they are multiplied.
        lock: held while accumulators are added to.
    """

    def __init__(
        self,
        grads: ParamGrads,
        plans: PlanCache,
        deferred: DeferredScales,
        norms: PartialNorms,
        lock: threading.RLock,
    ) -> None:
        self._grads, self._plans, self._deferred, self._norms = grads, plans, deferred, norms
        self._lock = lock

    def defer(self, ratio: float | Tensor) -> None:
        """acc *= ratio for every accumulator: by the next addition to it, or by `apply`."""
        if not is_one(ratio):
            with self._lock:
                self._deferred.defer([slot for slot, _ in self._grads.held(self._grads.slots)], ratio)

    def apply(self, slots: Iterable[Slot] | None = None) -> None:
        """Multiply the accumulators of these slots (None: all) by their deferred scales, in one pass."""
        if not self._deferred.scales:
            return
        with self._lock:
            pending = self._deferred.pending(slots)
            for factor, chosen in self._deferred.groups(pending):
                of = [pending[index] for index in chosen]
                self.rescale(self._grads.held(of), factor, records_norms=True)
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
            self._plans.run(
                accumulators, accumulators, ratio, True, slots, exposed, records_norms=records_norms
            )
