"""How the gradients of a window become one.

A new reduction is an entry in `REDUCTIONS`. It must be a sum, divided by something that is a sum too: ranks,
checkpoints of several ranks, and windows that end early add up what they have.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True)
class Reduction:
    """One way of making one gradient of those of a window.

    Attributes:
        name: what users call it.
        counts: the sum is divided by the number of micro-batches.
        weighs: each micro-batch has a weight, and the sum is divided by the sum of the weights.
        scales_by_weight: each gradient is multiplied by its micro-batch's weight as it is added.
    """

    name: str
    counts: bool = False
    weighs: bool = False
    scales_by_weight: bool = False

    @cached_property
    def divides(self) -> bool:
        """Whether the sum is divided. A sum that is not divided is final once the last gradient is added."""
        return self.counts or self.weighs

    def final_scale(
        self, divided_by: int, micro_batches: float | Tensor, weight: float | Tensor
    ) -> float | Tensor | None:
        """By what sums are multiplied in the end; None where what they are divided by is 0.

        `divided_by`: by what gradients were divided as they were added. The others are of all ranks.
        """
        if not self.divides:
            return 1.0
        total = weight if self.weighs else micro_batches
        if isinstance(total, Tensor):
            return divided_by / total
        return divided_by / total if total > 0 else None

    def scale_for_ranks(self, counted: bool, before: int, now: int) -> float:
        """By what sums that were made for `before` ranks are multiplied where `now` ranks go on with them.

        A counted mean divides gradients by the micro-batches of all ranks as they are added. In a manual loop
        a sum is the mean over ranks, which the reduction takes.
        """
        if counted:
            return before / now if self.counts else 1.0
        return 1.0 if self.divides else now / before


REDUCTIONS = (
    Reduction("mean", counts=True),
    Reduction("sum"),
    Reduction("weighted", weighs=True, scales_by_weight=True),
    Reduction("normalized", weighs=True),
)
NAMES = tuple(each.name for each in REDUCTIONS)
#: The names of those that need weights.
WEIGHING = tuple(each.name for each in REDUCTIONS if each.weighs)


def reduction_of(name: str) -> Reduction:
    for each in REDUCTIONS:
        if each.name == name:
            return each
    raise ValueError(f"reduction must be one of {', '.join(map(repr, NAMES))} or None, got {name!r}")
