"""The accumulation window: what counts, what it weighs and when it is full. No tensors here, but for weights
that stay on the device.

Sums are kept in a unit, `factor`: every sum, times what it owes, is `factor` times what was put in. It is 1
until the final scale of the window is known (`target`), as a rule when its last micro-batch begins. From then
on gradients are added in the final unit; the sums that there are owe the ratio, which these additions pay.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from ..distributed import Totals
from ..distributed.fsdp import Shards
from .micro_batch import MicroBatch

REDUCTIONS = ("mean", "sum", "weighted", "normalized")
Schedule = int | Callable[[int], int] | None


def check_schedule(schedule: Any) -> Schedule:
    """`gradient_accumulation_steps` as given, if it is an int >= 1, a callable or None.

    Raises:
        TypeError: something else. ValueError: an int below 1.
    """
    if schedule is None or (callable(schedule) and not isinstance(schedule, type)):
        return schedule
    if isinstance(schedule, bool) or not isinstance(schedule, int):
        raise TypeError(
            "gradient_accumulation_steps must be an int, a callable of the number of updates, or None, got "
            f"{schedule!r}"
        )
    if schedule < 1:
        raise ValueError(f"gradient_accumulation_steps must be at least 1, got {schedule}")
    return schedule


class Window:
    """Counts micro-batches and updates, and says by what each gradient is scaled.

    Args:
        schedule: `gradient_accumulation_steps`; None for the manual loop.
        reduction: one of `REDUCTIONS`; None for "mean" when counted and "sum" when manual.
        private: final gradients are not put into p.grad before the update; for counted loops only.

    Raises:
        TypeError, ValueError: an argument is none of those.
    """

    micro: MicroBatch
    in_context: bool

    def __init__(self, schedule: Schedule, reduction: str | None, private: bool = False) -> None:
        self.schedule = check_schedule(schedule)
        self.counted = schedule is not None
        if reduction is None:
            reduction = "sum" if schedule is None else "mean"
        if reduction not in REDUCTIONS:
            raise ValueError(
                f"reduction must be one of {', '.join(map(repr, REDUCTIONS))} or None, got {reduction!r}"
            )
        if private and schedule is None:
            raise ValueError(
                "private_gradients=True needs a counted loop: in a manual one p.grad is the accumulator; "
                "allowed: private_gradients=False, or gradient_accumulation_steps of 1 or more"
            )
        self.reduction = reduction
        self.private = private
        #: Whether backwards do not count (`ignore()`).
        self.ignoring = False
        #: How many ranks' gradients come together.
        self.ranks = 1
        self.num_updates = 0
        self.num_skipped = 0
        self.has_updated = False
        #: How many backwards the last micro-batch had; 0 before there was one.
        self.usual_backwards = 0
        #: The parameters whose gradients FSDP2 has averaged over the ranks, false where there are none.
        self.shards: Shards | None = None
        self.reset()

    def restart(self) -> None:
        """Open an empty window in the place of this one, inside `accumulate()` or not."""
        in_context, micro = self.in_context, self.micro
        self.reset()
        self.in_context = in_context
        if in_context and not micro.ran:
            self.micro = micro

    def reset(self) -> None:
        """Open an empty window."""
        self.micro_step = 0
        #: Micro-batches in the sums beside those counted here: of ranks that there were when it was saved.
        self.carried = 0
        self.weight_total: float | Tensor = 0.0
        self.factor: float | Tensor = 1.0
        #: Where weights are on a device: a 0-dim bool tensor, whether one was negative or nan.
        self.bad_weights: Tensor | None = None
        self.tainted: str | None = None
        #: Whether gradients wait in p.grad that were not synchronised over the ranks.
        self.unsynchronised = False
        #: Whether FSDP2 keeps gradients that were not synchronised.
        self.withheld = False
        self.micro = MicroBatch(self.reduction)
        self.in_context = False
        #: What the ranks have agreed upon last, and after how many micro-batches.
        self._agreed: tuple[int, float | None] | None = None
        self._steps: int | None = None
        #: The micro-batches and the weight of all ranks, once the sums are those of all ranks.
        self.totals: Totals | None = None
        #: Whether they were, and more is to come.
        self.reopened = False
        #: Whether no backward has come since the ranks' sums were made equal.
        self.reduced = False
        #: What `target` is with `totals`.
        self._final: float | Tensor | None = None
        #: The last final factor that was asked for on a device, and the weights it is of.
        self._reciprocal: tuple[Tensor | float, Tensor | float | None, Tensor] | None = None

    def clear(self) -> None:
        """Give up what has come into this window, if anything; what tainted it goes with it."""
        if not self.empty:
            self.restart()
        self.tainted = None

    @property
    def weighs(self) -> bool:
        """Whether micro-batches have weights."""
        return self.reduction in ("weighted", "normalized")

    @property
    def scales(self) -> bool:
        """Whether gradients are multiplied by anything but 1 as they are added."""
        if self.ranks > 1 and self.counted and self.reduction in ("mean", "sum"):
            return True
        return self.reduction == "weighted" or (self.counted and self.reduction == "mean" and self.steps > 1)

    @property
    def steps(self) -> int:
        """Micro-batches in this window (1 in a manual loop); a schedule is asked once per window.

        Raises:
            TypeError, ValueError: the schedule returned something that is no int >= 1.
        """
        if self._steps is None:
            steps = self.schedule(self.num_updates) if callable(self.schedule) else self.schedule
            if callable(self.schedule) and (steps is None or callable(steps)):
                raise TypeError(
                    f"gradient_accumulation_steps({self.num_updates}) must return an int, got {steps!r}"
                )
            self._steps = 1 if steps is None else int(check_schedule(steps))  # type: ignore[arg-type]
        return self._steps

    @property
    def empty(self) -> bool:
        return self.micro_step == 0 and not self.micro.ran

    @property
    def full(self) -> bool:
        """Whether all micro-batches have ended and the update is to come; one that fails leaves this."""
        return self.schedule is not None and 0 < self.micro_step >= (self._steps or self.steps)

    @property
    def will_update(self) -> bool:
        return self.schedule is None or self.micro_step + 1 >= (self._steps or self.steps)

    @property
    def base_scale(self) -> float | Tensor:
        """By what a gradient is multiplied as it is added, before the unit of the sums.

        Raises:
            RuntimeError: a weight is needed and not set, or a manual loop that counts is outside
                `accumulate()`.
        """
        if not self.counted and self.reduction != "sum" and not self.in_context:
            raise RuntimeError(
                f"reduction={self.reduction!r} in a manual loop needs `with optimizer.accumulate():` around "
                "each micro-batch, to count it"
            )
        if self.reduction == "weighted":
            if self.micro.weight is None:
                raise RuntimeError(
                    "reduction='weighted' needs a weight before the backward: `with "
                    "optimizer.accumulate(weight=...):` around the micro-batch"
                )
            return self.micro.weight
        if not self.counted or self.reduction == "normalized":
            return 1.0
        return 1.0 / (self.ranks * (self.steps if self.reduction == "mean" else 1))

    @property
    def leaves_out(self) -> bool:
        """Whether the micro-batch at hand has weight 0 and adds nothing; other ranks' may add something."""
        return self.weighs and _is_zero(self.micro.weight) and not self.shards

    @property
    def faulty(self) -> Tensor | None:
        """Where weights are on a device: 0-dim float32, 1 if no mean can be taken over them."""
        total = self.weight_total if self.totals is None else self.totals.weight
        if not (self.weighs and isinstance(total, Tensor)):
            return None
        wrong = ~((total > 0) & total.isfinite())
        return (wrong if self.bad_weights is None else wrong | self.bad_weights).float()

    def target(self, ending: bool = False, partial: bool = False) -> float | Tensor | None:
        """The final factor of the window's sums, or None where it is not known or all weights are 0.

        A tensor is the same object as long as the weights are.

        Args:
            ending: count the micro-batch at hand in.
            partial: the window ends here, full or not.
        """
        if self.reduction == "sum":
            return 1.0
        if self.ranks > 1:
            return self._target_over_ranks()
        count = self.micro_step + ending + self.carried
        if self.reduction == "mean":
            if not self.counted:
                return 1.0 / max(count, 1)
            short = partial and count < self.steps
            return self.steps / count if count > 0 and (short or self.carried) else 1.0
        if ending and self.micro.weight is None:
            return None
        ended, weight = self.weight_total, self.micro.weight if ending else None
        if self.shards:
            if self._agreed is None or self._agreed[0] != count:
                self._agreed = count, self.shards.factor(self._weight_of(ended, weight))
            return self._agreed[1]
        if isinstance(ended, Tensor) or isinstance(weight, Tensor):
            known = self._reciprocal
            if known is None or known[0] is not ended or known[1] is not weight:
                total = ended if weight is None else ended + weight
                known = self._reciprocal = ended, weight, total.reciprocal()  # type: ignore[union-attr]
            return known[2]
        total = ended if weight is None else ended + weight
        return 1.0 / total if total > 0 else None

    def _target_over_ranks(self) -> float | Tensor | None:
        """`target`, of the sums of all ranks; None before they are that, but for what is likely then."""
        if self.totals is None:
            return 1.0 if self.counted and self.reduction == "mean" else None
        return self._final

    def settle(self, totals: Totals) -> None:
        """The sums are those of all ranks now, and these are their numbers."""
        self.totals, self.bad_weights = totals, totals.bad_weights
        if self.weighs:
            self._final = totals.share_of(1, totals.weight)
        else:
            self._final = totals.share_of(
                self.steps * self.ranks if self.counted else 1, totals.micro_batches
            )

    def _weight_of(self, ended: float | Tensor, weight: float | Tensor | None) -> float:
        """The window's weight on the host, nan if one was none."""
        bad = self.bad_weights is not None and bool(self.bad_weights.item())
        return math.nan if bad else (_number(ended) or 0.0) + (_number(weight) or 0.0)

    def open(self, weight: float | Tensor | None) -> MicroBatch:
        """Enter `accumulate()`.

        Raises:
            RuntimeError: entered twice. ValueError, TypeError: as `MicroBatch.weight`.
        """
        if self.in_context:
            raise RuntimeError("accumulate() is already entered; contexts do not nest: one per micro-batch")
        if not self.micro.ran:  # what was said of a micro-batch that never came is forgotten
            self.micro = MicroBatch(self.reduction, weight)
        elif weight is not None:
            self.micro.weight = weight
        self.in_context = True
        return self.micro

    def end_micro_batch(self) -> None:
        """Count the micro-batch at hand and open the next.

        Raises:
            RuntimeError: it needs a weight and has none; nothing is changed, so that it may be set.
        """
        if self.weighs:
            if self.micro.weight is None:
                raise RuntimeError(
                    f"reduction={self.reduction!r} needs a weight for each micro-batch; this one has none: "
                    "use `with optimizer.accumulate(weight=...) as micro_batch:` or set `micro_batch.weight`"
                )
            weight = self.micro.weight
            if isinstance(weight, Tensor):
                wrong = ~(weight >= 0)
                self.bad_weights = wrong if self.bad_weights is None else self.bad_weights | wrong
            self.weight_total = self.weight_total + weight
        self.micro_step += 1
        self.usual_backwards = self.micro.num_backwards
        self.micro = MicroBatch(self.reduction)

    def close_micro_batch(self) -> bool:
        """End the micro-batch at hand, if a backward of it has run; whether all of the window have ended.

        Raises as `end_micro_batch`.
        """
        if self.micro.ran:
            self.unsynchronised = self.micro.deferred
            self.end_micro_batch()
        return self.full

    def end_update(self, skipped: bool = False) -> None:
        """Count an attempted update and open the next window."""
        self.num_updates += 1
        self.num_skipped += skipped
        self.restart()
        self.has_updated = True

    def taint(self, reason: str) -> None:
        """What is in the accumulators is neither old nor new, for this reason."""
        self.tainted = reason

    @contextlib.contextmanager
    def tainted_by(self, reason: str) -> Iterator[None]:
        """Context: an exception inside taints the window for this reason."""
        try:
            yield
        except BaseException:
            self.tainted = reason
            raise

    def begin_step(self) -> None:
        """A `step()` or `flush()` begins, which has not updated yet."""
        self.has_updated = False

    def count_skipped(self, updates: int) -> None:
        """So many updates have been dropped on the device."""
        self.num_skipped += updates

    def check_untainted(self) -> None:
        """Raise RuntimeError if an exception has left sums that are neither old nor new."""
        if self.tainted is not None:
            raise RuntimeError(
                f"{self.tainted}: what is in the sums cannot be taken back or made good; call discard() to "
                "throw the window away"
            )

    def check_synchronised(self, consequence: str) -> None:
        """Raise RuntimeError if gradients of this window wait for the ranks' synchronisation."""
        if self.withheld:
            raise RuntimeError(
                "FSDP2 keeps gradients of this window, out of sight and unsynchronised, until the backward "
                "of a micro-batch before which set_requires_gradient_sync(True) was called on the model: "
                f"{consequence}"
            )
        if self.unsynchronised or self.micro.deferred:
            raise RuntimeError(
                "gradients of this window wait in p.grad for the synchronisation of its last micro-batch "
                f"(accumulate(model=...)): {consequence}"
            )

    def state(self) -> dict[str, Any]:
        """What a checkpoint carries, plain numbers only; waits for weights that are on a device."""
        carried = {"carried": self.carried} if self.carried else {}
        return carried | {
            "num_updates": self.num_updates,
            "num_skipped": self.num_skipped,
            "has_updated": self.has_updated,
            "micro_step": self.micro_step,
            "weight_total": _number(self.weight_total),
            "factor": _number(self.factor),
            "steps": self._steps,
            "tainted": self.tainted,
            "ran": self.micro.ran,
            "weight": _number(self.micro.weight),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` has returned."""
        self.reset()
        self.has_updated = state["has_updated"]
        self.num_updates = state["num_updates"]
        self.num_skipped = state["num_skipped"]
        self.micro_step = state["micro_step"]
        self.weight_total = state["weight_total"]
        self.factor = state["factor"]
        self._steps = state["steps"]
        self.tainted = state["tainted"]
        self.micro = MicroBatch(self.reduction, state["weight"])
        self.micro.ran = state["ran"]
        self.carried = state.get("carried", 0)


def _is_zero(value: float | Tensor | None) -> bool:
    """Whether a number is 0; what is on a device is not asked."""
    return not isinstance(value, Tensor) and value == 0


def _number(value: float | Tensor | None) -> float | None:
    return value.item() if isinstance(value, Tensor) else value
