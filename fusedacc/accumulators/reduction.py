"""The reductions: how the gradients of a window become one gradient.

To add a reduction, add an entry to `REDUCTIONS`. It must be a sum divided by another sum, because ranks and
partly filled windows add up both.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True)
class Reduction:
    """One way to reduce the gradients of a window to one gradient.

    Attributes:
        name: the value of the wrapper's `reduction` argument.
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
        """Return the factor of the final sums, or None if they would be divided by 0. divided_by: the divisor
        already applied to each gradient. micro_batches, weight: of all ranks.
        """
        if not self.divides:
            return 1.0
        total = weight if self.weighs else micro_batches
        if isinstance(total, Tensor):
            return divided_by / total
        return divided_by / total if total > 0 else None


REDUCTIONS = (
    Reduction("mean", counts=True),
    Reduction("sum"),
    Reduction("weighted", weighs=True, scales_by_weight=True),
    Reduction("normalized", weighs=True),
)
NAMES = tuple(reduction.name for reduction in REDUCTIONS)
#: The names of the reductions that need weights.
WEIGHING = tuple(reduction.name for reduction in REDUCTIONS if reduction.weighs)


def reduction_of(name: str) -> Reduction:
    """Return the reduction of this name. Raises ValueError if there is none."""
    for reduction in REDUCTIONS:
        if reduction.name == name:
            return reduction
    raise ValueError(f"reduction must be one of {', '.join(map(repr, NAMES))} or None, got {name!r}")
