"""When a window's sums are reduced over the ranks, and what this rank says of its part of them."""

from __future__ import annotations

import torch

from ..accumulators import Accumulators
from ..distributed import DataParallel, RankNumbers
from .window import Window


class RankReduction:
    """The window over the ranks of a `DataParallel`, if there are any."""

    def __init__(self, window: Window, accumulators: Accumulators) -> None:
        self.window, self._accumulators = window, accumulators
        #: Over whose ranks the sums are reduced; None: left to whoever else does.
        self.parallel: DataParallel | None = None
        #: Whether this rank adds no more before all have flushed.
        self.flushing = False
        #: Whether all ranks did, at the last reduction.
        self.all_flush = False

    @property
    def reduces_each(self) -> bool:
        """Manual loop: whether p.grad is the ranks' mean after each backward that synchronises, as by DDP.

        Sums that are to be brought to another scale are reduced at `step()`.
        """
        return not (self.window.counted or self.window.reduction.divides)

    def begin_backward(self, parallel: DataParallel, captures: bool) -> None:
        """A backward begins: have sent what becomes final in it, if it is the window's last.

        captures: its gradients are taken as they come, and not left to autograd.
        """
        window, micro = self.window, self.window.micro
        if not (window.counted and micro.num_backwards):
            parallel.deliveries.begin_micro_batch()
        if window.tainted is not None or not captures:
            return
        if not window.counted:
            if self.reduces_each and parallel.synchronises:
                parallel.overlap(RankNumbers(0), parallel.world_size)
        elif (
            window.will_update
            and window.totals is None
            and micro.num_backwards + 1 >= window.usual_backwards
            and not (window.reduction.weighs and micro.weight is None)
        ):
            parallel.overlap(self._own_numbers(ending=True), 1)

    def _own_numbers(self, ending: bool) -> RankNumbers:
        """What this rank adds to the window's numbers. `ending`: the micro-batch at hand counts."""
        window = self.window
        weight, added = window.weight_total, window.micro.weight
        if ending and window.reduction.weighs and added is not None:
            weight = weight + added
        return RankNumbers(
            window.micro_step + ending + window.extra_micro_batches,
            weight,
            self.flushing,
            window.bad_weights,
            window.reopened,
        )

    def reduce_last(self) -> bool:
        """After a backward of a counted window's last micro-batch: reduce, if it is the last backward.

        How many there are is what the last micro-batch had. One more after the reduction opens it again
        (`reopen`), and where one is missing, or a weight, `conclude` reduces.
        """
        window = self.window
        if window.micro.num_backwards < window.usual_backwards or (
            window.reduction.weighs and window.micro.weight is None
        ):
            return False
        self.reduce(ending=True)
        return True

    def reduce_once(self, ending: bool) -> None:
        """Replace the window's sums by those of all ranks, where nobody has done so; as `reduce`."""
        if self.parallel is not None and self.window.totals is None and not self.reduces_each:
            self.reduce(ending)

    def reduce(self, ending: bool = False) -> None:
        """Replace the sums by those of all ranks. `ending`: the micro-batch at hand counts."""
        window, parallel = self.window, self.parallel
        assert parallel is not None
        own = self._own_numbers(ending)
        with window.tainted_by("an exception has interrupted the reduction over the ranks"), torch.no_grad():
            totals = parallel.reduce(own, parallel.world_size if self.reduces_each else 1)
        window.reduced = True
        if not self.reduces_each:
            window.set_totals(totals)
        self.all_flush = self.flushing and int(totals.num_flushing) == parallel.world_size

    def join(self, parallel: DataParallel | None) -> None:
        """Reduce over these ranks from now on, between windows; None: no more."""
        self.parallel = parallel
        self.window.ranks = 1 if parallel is None else parallel.world_size

    def reduce_held_back(self) -> None:
        """Manual loop: reduce what `no_sync()` has held back since the last reduction, if anything."""
        link = None if self.parallel is None else self.parallel.link
        if link is not None and self.reduces_each and not (self.window.empty or link.synchronises):
            self.reduce()
            link.synchronises = True

    def reopen(self) -> None:
        """More is to come into sums that are those of all ranks: each rank goes on with its share of them."""
        accumulators = self._accumulators
        accumulators.grads.make_private()
        with torch.no_grad():
            accumulators.rescaler.rescale(
                accumulators.grads.with_accumulator(accumulators.slots), 1.0 / self.window.ranks
            )
        self.window.totals, self.window.reopened = None, True
