"""One pass of a backend over sums, which pays what they owe and leaves the norms that are wanted."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import increment_version

from . import backends
from .binding import Binding
from .debts import Debts
from .factors import near
from .left_norms import LeftNorms
from .slot import Lane, Slot

#: In how many of the lists that are kept bound a parameter may be, on average. One is usual; models that use
#: other parameters every time would bind ever new ones.
MAX_BINDINGS = 2


class Launches:
    """Chooses backends and runs them.

    Args:
        slots: the parameters; a list shared with its owner, who may append.
        backend: as in `AccumulatingOptimizer`.
    """

    def __init__(self, slots: Sequence[Slot], backend: str) -> None:
        self.slots = slots
        self.backend = backend
        #: What a window's last additions leave for the update.
        self.norms = LeftNorms()
        #: What sums that stand private are still to be multiplied by.
        self.debts = Debts()
        #: By the first of the parameters that were added together; the same come in every micro-batch.
        self.bindings: dict[Slot, Binding] = {}
        self._bound = 0

    def select(self, lane: Lane) -> backends.Selection:
        """Which backend adds gradients of this lane, and why."""
        device, gradient, accumulator = lane
        return backends.select(device, accumulator, gradient, self.backend)

    def add(
        self,
        sums: list[Tensor],
        terms: list[Tensor],
        scale: float | Tensor,
        overwrite: bool | list[bool],
        slots: Sequence[Slot],
        shown: bool,
    ) -> None:
        """Add to the sums of `slots`, which pay what they owe: one pass, or one for each factor owed."""
        if not self.debts or overwrite is True:
            self.run(sums, terms, scale, overwrite, slots, shown)
            return
        for keep, chosen in self.debts.groups(slots):
            flags = overwrite if isinstance(overwrite, bool) else [overwrite[index] for index in chosen]
            payers = [slots[index] for index in chosen]
            owing, fresh = [sums[index] for index in chosen], [terms[index] for index in chosen]
            self.run(owing, fresh, scale, flags, payers, shown, keep)
            self.debts.pay(payers)

    def run(
        self,
        sums: list[Tensor],
        terms: list[Tensor],
        scale: float | Tensor,
        overwrite: bool | list[bool],
        slots: Sequence[Slot],
        shown: bool,
        keep: float | Tensor = 1.0,
    ) -> None:
        """One pass. It leaves the norms of what are the sums of `slots`, if they are wanted.

        shown: whether users may see the sums, whose versions then tell that they have changed.
        """
        if not sums:
            return
        chosen = self.select((sums[0].device, terms[0].dtype, sums[0].dtype)).backend
        scale, keep = near(scale, sums[0]), near(keep, sums[0])
        norm_type = self.norms.norm_type if slots else None
        partials = None
        if norm_type is None:
            self.norms.forget(slots)
            chosen.accumulate_(sums, terms, scale, overwrite, keep)
        else:
            partials = chosen.accumulate_with_norm_(sums, terms, scale, overwrite, norm_type, keep)
        if shown:
            increment_version(sums)
        if partials is not None:
            self.norms.leave(slots, sums, partials)

    def bind(self, slots: Sequence[Slot], sums: Sequence[Tensor], generation: int) -> None:
        """Keep these sums of one lane bound to their backend; `generation` as `Binding` has it."""
        former = self.bindings.pop(slots[0], None)
        self._bound += len(slots) - (0 if former is None else len(former.slots))
        if self._bound > MAX_BINDINGS * len(self.slots):
            self.unbind()
            self._bound = len(slots)
        self.bindings[slots[0]] = Binding(self.select(slots[0].lane).backend, slots, sums, generation)

    def unbind(self) -> None:
        """Forget all that is bound."""
        self.bindings.clear()
        self._bound = 0

    def run_bound(
        self,
        binding: Binding,
        slots: Sequence[Slot],
        sums: list[Tensor] | None,
        gradients: list[Tensor],
        scale: float | Tensor,
        keep: float | Tensor,
    ) -> None:
        """As `run`, for sums that are bound; None for those that are private and have not changed."""
        scale, keep = near(scale, gradients[0]), near(keep, gradients[0])
        partials = binding.add(sums, gradients, scale, self.norms.norm_type, keep)
        if self.debts:
            self.debts.pay(slots)
        if partials is None:
            self.norms.forget(slots)
        else:
            self.norms.leave(slots, sums or [slot.sum for slot in slots], partials)  # type: ignore[misc]
