"""The accumulation window: the factors that multiply gradients. `window_counts.py` counts its micro-batches.

Its only tensors are weights, on their own device.

Note [The window's scales]
Five factors multiply gradients. Let g_i be the gradient of the window's i-th micro-batch. At any time

    deferred_scale * accumulator  =  sum_scale * (sum over i of gradient_scale_i * g_i)

and at the update

    final gradient  =  final_scale * (sum over i of gradient_scale_i * g_i)
                    =  ratio * deferred_scale * accumulator

Example: a counted loop with the mean over k micro-batches, the default. `gradient_scale` is 1 / k for each
micro-batch; `sum_scale`, `final_scale` and the ratio are 1. If the first gradient becomes the accumulator as
it is, `deferred_scale` is 1 / k, and 1 from the second addition on. After the last micro-batch the
accumulator is the final gradient. If a `flush()` ends the window after m < k micro-batches, `final_scale` and
the ratio are k / m.

- `gradient_scale`, one per micro-batch: its weight, or 1 / (number of micro-batches * ranks), or 1. In the
  `step()` of an attached pipeline schedule it is also divided by the schedule's number of micro-batches.
- `sum_scale`, one for all accumulators: 1 until the final scale is known, usually when the window's last
  micro-batch begins. Then it is `final_scale`, and gradients are multiplied by it as they are added.
- `deferred_scale`, one per accumulator (Note [The deferred scale]): a factor not applied yet. When
  `sum_scale` changes, every accumulator must be multiplied by new / old; the next addition does this.
- `final_scale`, one per window. `Reduction.final_scale` has the formula.
- the ratio `final_scale / sum_scale`: the update multiplies by it (`Accumulation.finish_sums`), and in the
  same pass by the inverse of a GradScaler's loss scale and by the factor that clips (`Update._measure`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from ..distributed import Totals
from ..distributed.fsdp import Shards
from .window_counts import Schedule, WindowCounts


class _FinalScaleOfWeights(NamedTuple):
    """A final scale, and the weights that it was computed from.

    Attributes:
        ended: the weight of the micro-batches that have ended.
        current: that of the current one; None if it does not count.
        scale: the final scale.
    """

    ended: float | Tensor
    current: float | Tensor | None
    scale: float | Tensor | None


class _FinalScaleOfShards(NamedTuple):
    """A final scale computed over FSDP2's ranks, and after how many micro-batches."""

    micro_batches: int
    scale: float | None


class Window(WindowCounts):
    """A window, which counts micro-batches and updates, and computes the scale of each gradient.

    Args:
        schedule: the wrapper's argument `gradient_accumulation_steps`.
        reduction: the wrapper's argument; None for "mean" when counted and "sum" when manual.
        adds_unscaled: whether gradients are added as they are, because modules add some of them to
            `main_grad` by themselves. Then the sums are divided when the last backward pass has ended.
    """

    def __init__(self, schedule: Schedule, reduction: str | None, *, adds_unscaled: bool = False) -> None:
        self.adds_unscaled = adds_unscaled
        #: The number of ranks that the wrapper reduces over; 1 without attached ranks.
        self.ranks = 1
        #: Whether autograd stores all gradients in p.grad, because there is no native engine.
        self.autograd_stores = False
        #: The parameters whose gradients FSDP2 averages over the ranks; falsy if there are none.
        self.shards: Shards | None = None
        super().__init__(schedule, reduction)

    def reset(self) -> None:
        """Open an empty window."""
        super().reset()
        self.weight_total: float | Tensor = 0.0
        #: The weights in `weight_total`, except those loaded from a checkpoint.
        self.weights: list[float | Tensor] = []
        #: If weights are on a GPU: a 0-dim bool tensor, whether one was negative or nan.
        self.bad_weights: Tensor | None = None
        #: The micro-batches and the weight of all ranks, once the accumulators are reduced.
        self.totals: Totals | None = None
        #: Whether another backward pass has begun after the reduction.
        self.reopened = False
        #: The final scale computed from `totals`.
        self._final_of_totals: float | Tensor | None = None
        self._final_of_weights: _FinalScaleOfWeights | None = None
        self._final_of_shards: _FinalScaleOfShards | None = None

    # The current micro-batch

    @property
    def may_scale(self) -> bool:
        """Whether gradients may be scaled as they are added."""
        return self.reduction.scales_by_weight or self.divided_by > 1

    @property
    def divided_by(self) -> int:
        """Return the number that gradients are divided by as they are added."""
        return 1 if self.adds_unscaled else self._usual_divisor

    @property
    def _usual_divisor(self) -> int:
        """Return what `divided_by` is if gradients may be scaled."""
        if not self.counted or self.reduction.weighs:
            return 1
        return self.ranks * (self.steps if self.reduction.counts else 1)

    @property
    def scale_left_out(self) -> float:
        """Return the factor that gradients are not multiplied by as they are added, because of
        `adds_unscaled`. Checkpoints save it as a deferred scale of the sums.
        """
        return 1.0 / self._usual_divisor if self.adds_unscaled else 1.0

    @property
    def gradient_scale(self) -> float | Tensor:
        """The factor of the current micro-batch's gradients (Note [The window's scales]). Raises RuntimeError
        if a weight is missing, or a manual loop needs `accumulate()` to count micro-batches.
        """
        if not self.counted and self.reduction.divides and not self.in_context:
            raise RuntimeError(
                f"reduction={self.reduction.name!r} in a manual loop needs `with optimizer.accumulate():` "
                "around each micro-batch, to count it"
            )
        divisor = self.micro.schedule_divisor or 1
        if self.reduction.scales_by_weight:
            if self.micro.weight is None:
                raise RuntimeError(
                    f"reduction={self.reduction.name!r} needs a weight before the backward: `with "
                    "optimizer.accumulate(weight=...):` around the micro-batch"
                )
            return self.micro.weight if divisor == 1 else self.micro.weight / divisor
        return 1.0 / (self.divided_by * divisor)

    def scale_of_next_window(self) -> float | None:
        """Return the `gradient_scale` of the next window, for a reduction without weights. None if it is not
        known yet, because a schedule is called when the window begins, or if the window has one micro-batch.
        """
        if not self.counted or self.adds_unscaled:
            return 1.0
        steps = self.schedule if self._steps is None else self._steps
        if not isinstance(steps, int) or steps == 1:
            return None
        return 1.0 / (self.ranks * (steps if self.reduction.counts else 1))

    @property
    def adds_stored(self) -> bool:
        """Whether gradients that autograd stores in p.grad are added later, times `gradient_scale`."""
        return self.counted or self.reduction.weighs or self.micro.schedule_divisor is not None

    @property
    def has_zero_weight(self) -> bool:
        """Whether to skip the current micro-batch because its weight is 0. Always False with FSDP2."""
        weight = self.micro.weight
        return self.reduction.weighs and not isinstance(weight, Tensor) and weight == 0 and not self.shards

    def end_micro_batch(self) -> None:
        """Count the current micro-batch and begin the next. RuntimeError, with nothing changed, if it has no
        weight.
        """
        if self.reduction.weighs:
            self._add_weight(self.micro.weight)
        super().end_micro_batch()

    def _add_weight(self, weight: float | Tensor | None) -> None:
        """Add the weight of a micro-batch that ends."""
        if weight is None:
            raise RuntimeError(
                f"reduction={self.reduction.name!r} needs a weight for each micro-batch; this one has "
                "none: use `with optimizer.accumulate(weight=...) as micro_batch:` or set "
                "`micro_batch.weight`"
            )
        if isinstance(weight, Tensor):
            is_bad = ~(weight >= 0)
            self.bad_weights = is_bad if self.bad_weights is None else self.bad_weights | is_bad
        self.weight_total = self.weight_total + weight
        self.weights.append(weight)

    @property
    def is_last_usual_backward(self) -> bool:
        """Whether as many backward passes have ended in this micro-batch as in the one before."""
        return self.num_backwards >= self.usual_backwards

    @property
    def is_divided(self) -> bool:
        """Whether the sums were divided or reduced already, so that nothing may be added as it is."""
        return self.totals is not None or isinstance(self.sum_scale, Tensor) or self.sum_scale != 1.0

    # The final scale

    @property
    def weights_invalid(self) -> Tensor | None:
        """Return, if weights are on a GPU, a 0-dim float32 flag: 1 if they are invalid or all 0."""
        total = self.weight_total if self.totals is None else self.totals.weight
        if not (self.reduction.weighs and isinstance(total, Tensor)):
            return None
        is_bad = ~((total > 0) & total.isfinite())
        return (is_bad if self.bad_weights is None else is_bad | self.bad_weights).float()

    def final_scale(self, *, ending: bool = False, partial: bool = False) -> float | Tensor | None:
        """Return the final scale of the accumulators, or None if it is not known or all weights are 0.

        If it is a tensor, the same object is returned until the weights change.

        Args:
            ending: whether to count the current micro-batch.
            partial: whether the window ends now even if it is not full.
        """
        if not self.reduction.divides:
            return self.scale_left_out
        if self.ranks > 1:
            return self._final_scale_of_ranks()
        micro_batches = self.micro_step + ending
        if self.reduction.counts:
            # In a counted loop, each gradient was divided by the number of micro-batches of a full window.
            is_full = not (partial and 0 < micro_batches < self.steps)
            if self.counted and is_full and not self.adds_unscaled:
                return 1.0
            return self.reduction.final_scale(self.divided_by, max(micro_batches, 1), 0.0)
        if ending and self.micro.weight is None:
            return None
        current = self.micro.weight if ending else None
        if self.shards:
            return self._final_scale_of_shards(self.shards, micro_batches, current)
        return self._final_scale_of_weights(micro_batches, current)

    def _final_scale_of_ranks(self) -> float | Tensor | None:
        if self.totals is not None:
            return self._final_of_totals
        return 1.0 if self.counted and self.reduction.counts else None

    def _final_scale_of_shards(
        self, shards: Shards, micro_batches: int, current: float | Tensor | None
    ) -> float | None:
        known = self._final_of_shards
        if known is None or known.micro_batches != micro_batches:
            is_bad = self.bad_weights is not None and bool(self.bad_weights.item())
            weight = float(self.weight_total) + float(0.0 if current is None else current)
            known = _FinalScaleOfShards(micro_batches, shards.factor(math.nan if is_bad else weight))
            self._final_of_shards = known
        return known.scale

    def _final_scale_of_weights(
        self, micro_batches: int, current: float | Tensor | None
    ) -> float | Tensor | None:
        ended = self.weight_total
        known = self._final_of_weights
        if known is None or known.ended is not ended or known.current is not current:
            total = ended if current is None else ended + current
            scale = self.reduction.final_scale(self.divided_by, micro_batches, total)
            known = _FinalScaleOfWeights(ended, current, scale)
            self._final_of_weights = known
        return known.scale

    def set_totals(self, totals: Totals) -> None:
        """Store the numbers of all ranks after the accumulators were reduced."""
        self.totals = totals
        self.bad_weights = totals.bad_weights
        self._final_of_totals = self.reduction.final_scale(
            self.divided_by, totals.micro_batches, totals.weight
        )
