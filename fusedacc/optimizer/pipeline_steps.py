"""Treat a pipeline schedule's `step()` as one backward pass of one micro-batch.

A schedule that is not attached divides p.grad itself. So in a counted loop PyTorch accumulates in p.grad
until the schedule's `step()` ends. An attached schedule does not divide. The wrapper adds each gradient as it
arrives, divided by the number of the schedule's micro-batches.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..accumulators.param import nothing
from ..autograd.capture import Capture
from ..distributed import pipelines
from ..distributed.pipelines import AttachedSchedule
from ..kernels.closing import ClosesItself
from .accumulation import Accumulation
from .update import Update


def refuse_all_reduce_alone(schedule: Any) -> NoReturn:
    """Raise ValueError: a pipeline schedule itself says when FSDP2 reduces, and it reduces over all ranks."""
    raise ValueError(
        f"defer='all_reduce' does not support pipeline schedules, and a {type(schedule).__name__} trains the "
        "parameters: the schedule has FSDP2 reduce over all ranks at once; allowed: 'all' and 'none'"
    )


class PipelineSteps(ClosesItself):
    """Notifies `Accumulation` when a pipeline schedule's `step()` begins and ends."""

    def __init__(self, accumulation: Accumulation, capture: Capture, update: Update) -> None:
        self._accumulation = accumulation
        self._capture = capture
        self._update = update
        #: Whether a schedule that is not attached trains the parameters of a counted loop.
        self.hold_back = False
        #: Why a schedule leaves the modules of `model` to PyTorch, for `explain()`.
        self.why_left = ""
        pipelines.listen(self)

    def close(self) -> None:
        pipelines.leave(self)
        self.detach()

    # The attached schedule

    def attach(self, schedule: Any, settings: Mapping[str, object]) -> None:
        """Count each `step()` of this schedule as one micro-batch. Call it on every rank, with equal
        settings. Raises RuntimeError if the wrapper is attached to a schedule already, and as
        `AttachedSchedule.join`.
        """
        former = self._accumulation.attached
        if former is not None and former.schedule() is not None:
            raise RuntimeError(
                f"attach(schedule): the optimizer is attached to a {former.name} already; allowed: one "
                "schedule for each optimizer, and another one after close() or once that one is gone"
            )
        attached = AttachedSchedule.join(schedule, self, settings)
        self.detach()
        self._accumulation.attached = attached
        self.hold_back = False
        self._update.pipeline = weakref.ref(self)

    def detach(self) -> None:
        """Detach from the schedule, if any. The last optimizer that detaches restores its stages."""
        attached = self._accumulation.attached
        self._accumulation.attached = None
        self._update.pipeline = nothing
        if attached is not None:
            attached.leave(self)

    @property
    def parameters(self) -> set[int]:
        """Return the ids of the wrapper's parameters."""
        return {id(slot.param) for slot in self._capture.registry.slots}

    @property
    def defers(self) -> bool:
        """Whether FSDP2 postpones its reduction: in `accumulate(model)`, except in the last micro-batch."""
        window = self._accumulation.window
        return window.counted and window.micro.defer == "all" and not window.will_update

    def captures(self) -> list[Capture]:
        """Return the captures that receive gradients of the parameters and of FSDP2's unsharded ones."""
        sums = self._accumulation.shards.sums
        return [self._capture] if sums is None else [self._capture, sums.capture]

    def own_norm(self) -> Tensor:
        """Return the norm of this wrapper's accumulators in float64, 0 if there are none."""
        self._accumulation.apply_scales()
        return self._update.own_norm()

    def whole_norm(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the norm over all stages, and a flag: 1.0 if the norm is not finite, else 0.0."""
        norm = self._attached.norm(self, self._update.settings.norm_type)
        return norm.to(dtype), (~norm.isfinite()).float()

    def any_rank(self, flag: Tensor) -> Tensor:
        """Return 1 if this 0-dim flag is 1 on any rank, else 0."""
        return self._attached.any_rank(flag)

    @property
    def _attached(self) -> AttachedSchedule:
        assert self._accumulation.attached is not None
        return self._accumulation.attached

    def check_weights(self) -> None:
        """Raise ValueError on every rank if the weights in this window differ between ranks."""
        attached = self._accumulation.attached
        window = self._accumulation.window
        if attached is not None and window.reduction.weighs:
            attached.check_weights([window.weight_total, *window.weights])

    # A step

    @contextlib.contextmanager
    def around_step(self, schedule: Any) -> Iterator[None]:
        """Context around one `step()` of a schedule. Without an attached schedule and without ranks, a manual
        loop needs only `why_left` here, because `p.grad` is its accumulator all the time.
        """
        accumulation = self._accumulation
        registry = self._capture.registry
        trains = pipelines.trains(schedule, self.parameters)
        if trains and accumulation.window.micro.defer == "all_reduce":
            refuse_all_reduce_alone(schedule)
        if trains:
            self.why_left = pipelines.why_left(schedule)
        with accumulation.shards.in_schedule():
            attached = accumulation.attached
            if attached is None or accumulation.window.ignoring or attached.schedule() is not schedule:
                attached = None
            adds_later = accumulation.window.counted or accumulation.ranks.parallel is not None
            if attached is None and not (adds_later and trains):
                yield
                return
            self.hold_back = accumulation.window.counted and attached is None
            self._capture.drop_failed_backwards()
            divisor = None if attached is None else attached.divisor
            running = contextlib.nullcontext() if attached is None else attached.running(self)
            with accumulation.schedule_step(registry.refresh, divisor), running:
                yield
