"""When a window's accumulators are reduced over the ranks of `data_parallel=`, and what goes with them."""

from __future__ import annotations

import torch

from ..accumulators import Accumulators
from ..distributed import DataParallel, RankNumbers
from .window import Window


class RankReduction:
    """Reduces a window over the ranks of a `DataParallel`, if one is attached."""

    def __init__(self, window: Window, accumulators: Accumulators) -> None:
        self.window = window
        self._accumulators = accumulators
        self._parallel: DataParallel | None = None
        #: Whether this rank is inside `flush()` and waits for all ranks to flush.
        self.flushing = False
        #: Whether all ranks were flushing at the last reduction.
        self.all_flush = False

    @property
    def parallel(self) -> DataParallel | None:
        """The ranks that accumulators are reduced over; None: the wrapper does not reduce."""
        return self._parallel

    @property
    def reduces_each(self) -> bool:
        """Whether each synchronising backward pass reduces p.grad to the ranks' mean, as in DDP: in a manual
        loop with reduction "sum". Other reductions in a manual loop reduce in `step()`.
        """
        return not (self.window.counted or self.window.reduction.divides)

    def begin_backward(self, parallel: DataParallel, captures: bool) -> None:
        """Let a window's last backward pass overlap with the all-reduce if hooks capture its gradients."""
        window = self.window
        micro = self.window.micro
        if not (window.counted and window.num_backwards):
            parallel.deliveries.begin_micro_batch()
        if window.tainted is not None or not captures:
            return
        if not window.counted:
            if self.reduces_each and parallel.synchronises:
                parallel.overlap(RankNumbers(0), parallel.world_size)
        elif (
            window.will_update
            and window.totals is None
            and window.num_backwards + 1 >= window.usual_backwards
            and not (window.reduction.weighs and micro.weight is None)
        ):
            parallel.overlap(self._own_numbers(ending=True), 1)

    def _own_numbers(self, *, ending: bool) -> RankNumbers:
        """Return this rank's counts and weights for the reduction; `ending`: with the current micro-batch."""
        window = self.window
        micro_batches = window.micro_step + ending
        weight = window.weight_total
        if ending and window.reduction.weighs and window.micro.weight is not None:
            weight = weight + window.micro.weight
        return RankNumbers(micro_batches, weight, self.flushing, window.bad_weights, window.reopened)

    def reduce_last(self) -> bool:
        """Counted loop: reduce if this was the last backward pass of a window's last micro-batch, and return
        whether it was. Expects as many passes as in the previous micro-batch. If one more follows, `reopen`
        undoes the reduction. If one is missing, or the weight is, `finish_sums` reduces.
        """
        window = self.window
        if not window.is_last_usual_backward or (window.reduction.weighs and window.micro.weight is None):
            return False
        self.reduce(ending=True)
        return True

    def reduce_once(self, *, ending: bool) -> None:
        """Call `reduce` if this window is not reduced yet."""
        if self.parallel is not None and self.window.totals is None and not self.reduces_each:
            self.reduce(ending=ending)

    def reduce(self, *, ending: bool = False) -> None:
        """Reduce the accumulators over all ranks; `ending`: count the current micro-batch."""
        window = self.window
        parallel = self.parallel
        assert parallel is not None
        numbers = self._own_numbers(ending=ending)
        divisor = parallel.world_size if self.reduces_each else 1
        with window.tainted_by("an exception has interrupted the reduction over the ranks"), torch.no_grad():
            totals = parallel.reduce(numbers, divisor)
        if not self.reduces_each:
            window.set_totals(totals)
        self.all_flush = self.flushing and int(totals.num_flushing) == parallel.world_size

    def join(self, parallel: DataParallel | None) -> None:
        """Between windows: reduce over these ranks from now on; None: stop reducing."""
        self._parallel = parallel
        self._accumulators.engine.set_condition("accumulators are reduced over ranks", parallel is not None)
        self.window.ranks = 1 if parallel is None else parallel.world_size

    def reduce_held_back(self) -> None:
        """Manual loop: reduce gradients of backward passes inside `no_sync()`, if there are any."""
        link = None if self.parallel is None else self.parallel.link
        if link is not None and self.reduces_each and not (self.window.empty or link.synchronises):
            self.reduce()
            link.synchronises = True

    def reopen(self) -> None:
        """Undo the reduction before another backward pass: each rank keeps 1 / ranks of the reduced sum."""
        grads = self._accumulators.grads
        grads.make_private()
        with torch.no_grad():
            sums = grads.with_accumulator(self._accumulators.slots)
            self._accumulators.passes.rescale(sums, 1.0 / self.window.ranks)
        self.window.totals = None
        self.window.reopened = True
