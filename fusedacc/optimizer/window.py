"""The accumulation window: counts and weighs micro-batches, and decides when the window is full.

It also computes the factors that multiply gradients. Its only tensors are weights, on their own device.

Note [The window's scales]
Five factors multiply gradients. Let g_i be the gradient of the window's i-th micro-batch. At any time

    deferred_scale * accumulator  =  sum_scale * (sum over i of gradient_scale_i * g_i)

and at the update

    final gradient  =  final_scale * (sum over i of gradient_scale_i * g_i)
                    =  ratio * deferred_scale * accumulator

- `gradient_scale`, one per micro-batch: its weight, or 1 / (number of micro-batches * ranks), or 1. In the
  `step()` of an attached pipeline schedule it is also divided by the schedule's number of micro-batches.
- `sum_scale`, one for all accumulators: 1 until the final scale is known, usually when the window's last
  micro-batch begins. Then it is `final_scale`, and gradients are multiplied by it as they are added.
- `deferred_scale`, one per accumulator (Note [The deferred scale]): a factor not applied yet. When
  `sum_scale` changes, every accumulator must be multiplied by new / old; the next addition does this.
- `final_scale`, one per window. `Reduction.final_scale` has the formula.
- the ratio `final_scale / sum_scale`: the update multiplies by it (`Accumulation.conclude`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..accumulators.reduction import WEIGHING, Reduction, reduction_of
from ..distributed import Totals
from ..distributed.fsdp import Shards

Schedule = int | Callable[[int], int] | None


def check_schedule(schedule: Any) -> Schedule:
    """Return the schedule if it is an int >= 1, a callable or None; else raise TypeError or ValueError."""
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
    """Counts micro-batches and updates, and computes the scale of each gradient. reduction: None for "mean"
    when counted and "sum" when manual. private: keep final gradients out of p.grad until the update.
    """

    #: Native code reads these in each micro-batch (`Attribute` in csrc/autograd/records.h).
    __slots__ = (
        "__dict__",
        "__weakref__",
        "has_updated",
        "ignoring",
        "in_context",
        "micro",
        "micro_step",
        "sum_scale",
        "tainted",
        "unsynchronised",
        "usual_backwards",
        "withheld",
    )

    micro: MicroBatch
    in_context: bool

    def __init__(self, schedule: Schedule, reduction: str | None, private: bool = False) -> None:
        self.schedule = check_schedule(schedule)
        self.counted = schedule is not None
        if reduction is None:
            reduction = "sum" if schedule is None else "mean"
        self.reduction = reduction_of(reduction)
        if private and schedule is None:
            raise ValueError(
                "private_gradients=True needs a counted loop: in a manual one p.grad is the accumulator; "
                "allowed: private_gradients=False, or gradient_accumulation_steps of 1 or more"
            )
        self.private = private
        #: Whether backward passes do not count (`ignore()`).
        self.ignoring = False
        #: The number of ranks that the wrapper reduces over; 1 without attached ranks.
        self.ranks = 1
        self.num_updates = 0
        self.num_skipped = 0
        self.has_updated = False
        #: How many backward passes the last micro-batch had; 0 before the first micro-batch.
        self.usual_backwards = 0
        #: The parameters whose gradients FSDP2 averages over the ranks; falsy if there are none.
        self.shards: Shards | None = None
        self.reset()

    def restart(self) -> None:
        """Replace this window by an empty one, and stay inside `accumulate()` if entered."""
        in_context, micro = self.in_context, self.micro
        self.reset()
        self.in_context = in_context
        if in_context and not micro.ran:
            self.micro = micro

    def reset(self) -> None:
        """Open an empty window."""
        self.micro_step = 0
        self.weight_total: float | Tensor = 0.0
        #: The weights in `weight_total`, except those loaded from a checkpoint.
        self.weights: list[float | Tensor] = []
        self.sum_scale: float | Tensor = 1.0
        #: If weights are on a GPU: a 0-dim bool tensor, whether one was negative or nan.
        self.bad_weights: Tensor | None = None
        self.tainted: str | None = None
        #: Whether p.grad holds gradients that are not synchronised over the ranks yet.
        self.unsynchronised = False
        #: Whether FSDP2 holds gradients that are not synchronised over the ranks yet.
        self.withheld = False
        self.micro = MicroBatch(self.reduction)
        self.in_context = False
        #: The last final scale computed over FSDP2's ranks, and after how many micro-batches.
        self._agreed: tuple[int, float | None] | None = None
        self._steps: int | None = None
        #: The micro-batches and the weight of all ranks, once the accumulators are reduced.
        self.totals: Totals | None = None
        #: Whether another backward pass has begun after the reduction.
        self.reopened = False
        #: Whether gradients of `backward(create_graph=True)` were added without their graph.
        self.dropped_graph = False
        #: The final scale computed from `totals`.
        self._final_of_totals: float | Tensor | None = None
        #: The weights that the last final scale was computed from, and this scale.
        self._final_of_weights: tuple[Any, Any, float | Tensor | None] | None = None

    def clear(self) -> None:
        """Discard the window's micro-batches, if any, and its taint."""
        if not self.empty:
            self.restart()
        self.tainted = None

    @property
    def scales(self) -> bool:
        """Whether gradients may be scaled as they are added."""
        return self.reduction.scales_by_weight or self.divided_by > 1

    @property
    def divided_by(self) -> int:
        """Return the number that gradients are divided by as they are added."""
        if not self.counted or self.reduction.weighs:
            return 1
        return self.ranks * (self.steps if self.reduction.counts else 1)

    @property
    def steps(self) -> int:
        """The micro-batches per update, 1 in a manual loop. A schedule is called once a window."""
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
        """Whether all micro-batches have ended but the update has not succeeded yet."""
        return self.schedule is not None and 0 < self.micro_step >= (self._steps or self.steps)

    @property
    def will_update(self) -> bool:
        return self.schedule is None or self.micro_step + 1 >= (self._steps or self.steps)

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

    def scale_to_come(self) -> float | None:
        """Return the `gradient_scale` of the next window, for a reduction without weights. None if it is not
        known yet, because a schedule is called when the window begins, or if the window has one micro-batch.
        """
        if not self.counted:
            return 1.0
        steps = self.schedule if self._steps is None else self._steps
        if not isinstance(steps, int) or steps == 1:
            return None
        return 1.0 / (self.ranks * (steps if self.reduction.counts else 1))

    @property
    def takes_stored(self) -> bool:
        """Whether gradients that autograd stores in p.grad are added later, times `gradient_scale`."""
        return self.counted or self.reduction.weighs or self.micro.schedule_divisor is not None

    @property
    def has_zero_weight(self) -> bool:
        """Whether to skip the current micro-batch because its weight is 0. Always False with FSDP2."""
        weight = self.micro.weight
        return self.reduction.weighs and not isinstance(weight, Tensor) and weight == 0 and not self.shards

    @property
    def weights_invalid(self) -> Tensor | None:
        """Return, if weights are on a GPU, a 0-dim float32 flag: 1 if they are invalid or all 0."""
        total = self.weight_total if self.totals is None else self.totals.weight
        if not (self.reduction.weighs and isinstance(total, Tensor)):
            return None
        wrong = ~((total > 0) & total.isfinite())
        return (wrong if self.bad_weights is None else wrong | self.bad_weights).float()

    def final_scale(self, ending: bool = False, partial: bool = False) -> float | Tensor | None:
        """Return the final scale of the accumulators, or None if it is not known or all weights are 0.

        If it is a tensor, the same object is returned until the weights change. ending: whether to count the
        current micro-batch. partial: whether the window ends now even if it is not full.
        """
        if not self.reduction.divides:
            return 1.0
        if self.ranks > 1:
            before = 1.0 if self.counted and self.reduction.counts else None
            return before if self.totals is None else self._final_of_totals
        count = self.micro_step + ending
        if self.reduction.counts:
            if self.counted and not (partial and 0 < count < self.steps):
                return 1.0
            return self.reduction.final_scale(self.divided_by, max(count, 1), 0.0)
        if ending and self.micro.weight is None:
            return None
        ended, weight = self.weight_total, self.micro.weight if ending else None
        if self.shards:
            if self._agreed is None or self._agreed[0] != count:
                invalid = self.bad_weights is not None and bool(self.bad_weights.item())
                own = math.nan if invalid else float(ended) + float(0.0 if weight is None else weight)
                self._agreed = count, self.shards.factor(own)
            return self._agreed[1]
        known = self._final_of_weights
        if known is None or known[0] is not ended or known[1] is not weight:
            total = ended if weight is None else ended + weight
            final = self.reduction.final_scale(self.divided_by, count, total)
            known = self._final_of_weights = ended, weight, final
        return known[2]

    def set_totals(self, totals: Totals) -> None:
        """Store the numbers of all ranks after the accumulators were reduced."""
        self.totals, self.bad_weights = totals, totals.bad_weights
        numbers = self.divided_by, totals.micro_batches, totals.weight
        self._final_of_totals = self.reduction.final_scale(*numbers)

    def open(self, weight: float | Tensor | None) -> MicroBatch:
        """Enter `accumulate()`, and return its micro-batch. Raises RuntimeError if contexts are nested."""
        if self.in_context:
            raise RuntimeError("accumulate() is already entered; contexts do not nest: one per micro-batch")
        if not self.micro.ran:  # forget a weight whose micro-batch had no backward pass
            self.micro = MicroBatch(self.reduction, weight)
        elif weight is not None:
            self.micro.weight = weight
        self.in_context = True
        return self.micro

    def end_micro_batch(self) -> None:
        """Count the current micro-batch and begin the next. RuntimeError, with nothing changed, if it has no
        weight.
        """
        if self.reduction.weighs:
            if self.micro.weight is None:
                raise RuntimeError(
                    f"reduction={self.reduction.name!r} needs a weight for each micro-batch; this one has "
                    "none: use `with optimizer.accumulate(weight=...) as micro_batch:` or set "
                    "`micro_batch.weight`"
                )
            weight = self.micro.weight
            if isinstance(weight, Tensor):
                wrong = ~(weight >= 0)
                self.bad_weights = wrong if self.bad_weights is None else self.bad_weights | wrong
            self.weight_total = self.weight_total + weight
            self.weights.append(weight)
        self.micro_step += 1
        self.usual_backwards = self.micro.num_backwards
        self.micro = MicroBatch(self.reduction)

    def close_micro_batch(self) -> bool:
        """End the current micro-batch if a backward pass has run, and return whether the window is full."""
        if self.micro.ran:
            self.unsynchronised = self.micro.deferred
            self.end_micro_batch()
        return self.full

    def end_update(self, skipped: bool = False) -> None:
        """Count an attempted update and begin the next window."""
        self.num_updates += 1
        self.num_skipped += skipped
        self.restart()
        self.has_updated = True

    @contextlib.contextmanager
    def tainted_by(self, reason: str) -> Iterator[None]:
        """Context in which an exception taints the window, with this reason."""
        try:
            yield
        except BaseException:
            self.tainted = reason
            raise

    def note_interruption(self) -> None:
        """Taint the window: an exception has ended a backward pass that had added to the accumulators."""
        self.tainted = "an exception has interrupted a backward"

    def check_untainted(self) -> None:
        """Raise RuntimeError if an exception has left partly updated accumulators."""
        if self.tainted is not None:
            raise RuntimeError(
                f"{self.tainted}: the accumulators are only partly updated and cannot be repaired; call "
                "discard() to drop the window"
            )

    def check_synchronised(self, consequence: str) -> None:
        """Raise if gradients of this window are not synchronised yet; `consequence` ends the message."""
        if self.withheld:
            raise RuntimeError(
                "FSDP2 keeps unsynchronised gradients of this window. It reduces them in the next backward "
                f"after set_requires_gradient_sync(True) was called on the model: {consequence}"
            )
        if self.unsynchronised or self.micro.deferred:
            raise RuntimeError(
                "gradients of this window wait in p.grad for the synchronisation of its last micro-batch "
                f"(accumulate(model=...)): {consequence}"
            )


def check_weight(weight: Any) -> float | Tensor:
    """Return a float, or a 0-dim float32 tensor if it is on a GPU; else raise TypeError or ValueError.

    A weight on a GPU is not checked here, which would synchronise. The update checks it.
    """
    if isinstance(weight, Tensor) and weight.ndim == 0 and not weight.is_complex():
        if not _on_host(weight):
            return weight.detach().to(torch.float32)
        weight = weight.item()
    if not isinstance(weight, Real):
        kind, is_tensor = type(weight).__name__, isinstance(weight, Tensor)
        given = f"a {weight.dtype} tensor of shape {tuple(weight.shape)}" if is_tensor else kind
        raise TypeError(f"weight must be a real number or a 0-dim tensor, got {given}")
    value = float(weight)
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"weight must be finite and at least 0, got {value}")
    return value


def _on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


class MicroBatch:
    """The current micro-batch. `accumulate()` yields it, and `weight` may be set later."""

    __slots__ = "__dict__", "__weakref__", "deferred", "in_schedule", "num_backwards", "ran"

    def __init__(self, reduction: Reduction, weight: float | Tensor | None = None) -> None:
        self._reduction = reduction
        self._weight: float | Tensor | None = None
        self._given: Any = None
        #: Whether a backward pass has ended in this micro-batch.
        self.ran = False
        #: How many of its backward passes have ended, without those nested in others.
        self.num_backwards = 0
        #: Whether a pipeline schedule's `step()` is running. It counts as one backward pass.
        self.in_schedule = False
        #: Whether it is inside `accumulate(model)`.
        self.in_model_context = False
        #: The divisor of gradients inside the `step()` of an attached pipeline schedule. None outside.
        self.schedule_divisor: int | None = None
        #: Whether its gradients stay unsynchronised in `p.grad`, to be collected in a later micro-batch.
        self.deferred = False
        if weight is not None:
            self.weight = weight

    @property
    def weight(self) -> float | Tensor | None:
        """The weight of this micro-batch: tokens or samples, a number or a 0-dim tensor; None until set.

        Set it before the backward pass for "weighted", and before `step()` for "normalized". A tensor on a
        GPU stays there. A weight of 0 on a GPU cannot skip the micro-batch, so an inf or nan in its gradient
        reaches the accumulators.

        Raises:
            ValueError: the reduction takes no weights, or the value is negative or not finite.
            TypeError: the value is not a number.
            RuntimeError: it is set too late.
        """
        return self._weight

    @weight.setter
    def weight(self, weight: float | Tensor) -> None:
        if not self._reduction.weighs:
            raise ValueError(
                f"weight={weight!r} was given, but reduction={self._reduction.name!r} takes no weights; "
                f"allowed with {' and '.join(map(repr, WEIGHING))}"
            )
        value = check_weight(weight)
        on_device = isinstance(value, Tensor) or isinstance(self._weight, Tensor)
        late = self.ran and (weight is not self._given if on_device else value != self._weight)
        if late and self._weight is not None:
            raise RuntimeError(
                f"weight={value} came after the backward of a micro-batch of weight {self._weight}; a "
                "micro-batch has one weight, and step() ends it"
            )
        if late and self._reduction.scales_by_weight:
            raise RuntimeError(
                f"weight={value} came after the backward; with reduction={self._reduction.name!r} it scales "
                "the gradients as they arrive: set it before"
            )
        if late and not on_device and value == 0:
            raise ValueError(
                "weight=0 came after the backward, whose gradients can no longer be left out: set a weight "
                "of 0 before"
            )
        self._weight, self._given = value, weight
