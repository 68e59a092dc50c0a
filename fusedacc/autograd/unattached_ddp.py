"""Checks that a DistributedDataParallel without `data_parallel=` has synchronised the gradients in p.grad.

A counted loop then leaves gradients to autograd and DDP's reducer, and collects them when the micro-batch
ends. Inside the user's `no_sync()` the reducer skips gradients, so they differ between ranks. Sums that mix
both kinds would let the ranks' parameters drift apart silently.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ..accumulators import Slot

#: The statistics of each reducer at the start of a backward pass.
Watch = list[tuple[DistributedDataParallel, list[int]]]


class Reducers:
    """The DistributedDataParallels of several ranks that hold parameters of `slots`.

    A parameter does not refer to the module that reduces its gradient, so the garbage collector's list is
    searched: at the first backward pass and, while nothing is found, at the second, the fourth and so on,
    because a model may be wrapped in DDP late.
    """

    def __init__(self, slots: list[Slot]) -> None:
        self._slots = slots
        self._found: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._backwards = 0
        self._warned = False

    def watch(self) -> Watch:
        """Return the reducers' statistics at the start of a backward pass, for `check` at its end."""
        if not self._found:
            self._backwards += 1
            if self._backwards & (self._backwards - 1) == 0:
                self._search()
        return [(parallel, parallel.reducer.get_backward_stats()) for parallel in self._found]

    def _search(self) -> None:
        held = {id(slot.param) for slot in self._slots}
        for candidate in gc.get_objects():
            if (
                issubclass(type(candidate), DistributedDataParallel)
                and "reducer" in candidate.__dict__  # absent during and after a failed construction
                and not candidate._use_python_reducer
                and torch.distributed.get_world_size(candidate.process_group) > 1
                and not held.isdisjoint(map(id, candidate.parameters()))
            ):
                self._found.add(candidate)
        if self._found and not self._warned:
            self._warned = True
            warnings.warn(
                "a DistributedDataParallel reduces the gradients of these parameters in every micro-batch "
                "outside no_sync(), so that the wrapper gains nothing. Pass data_parallel=ddp to it, or put "
                "`with optimizer.accumulate(ddp):` around each micro-batch: then sums are reduced once per "
                "update, in the accumulate dtype",
                stacklevel=2,
            )

    def check(self, watch: Watch, stored: Iterable[Slot]) -> None:
        """Raise RuntimeError if `no_sync()` has left unsynchronised gradients in p.grad. watch: the result of
        `watch()` at the start of the backward pass. stored: the slots whose gradients autograd has stored.
        """
        told: list[int] = []
        reduced: list[int] = []
        for parallel, before in watch:
            (told if _told_not_to(parallel, before) else reduced).extend(map(id, parallel.parameters()))
        if not {id(slot.param) for slot in stored}.isdisjoint(set(told).difference(reduced)):
            raise RuntimeError(
                "ddp.no_sync() has left the gradients of this micro-batch unsynchronised: a counted loop "
                "would add those of this rank alone, and the ranks' parameters would drift apart. Put `with "
                "optimizer.accumulate(ddp):` around each micro-batch, forward and backward, in its place, "
                "and discard() this window"
            )


def _told_not_to(parallel: DistributedDataParallel, before: list[int]) -> bool:
    """Whether the reducer has skipped the gradients of this backward pass.

    DDP's forward sets a flag, but a later forward pass without gradients sets it too. So the reducer's
    statistics must also be unchanged: they record when each parameter's gradient came (not in the first
    backward pass of a static graph).
    """
    if parallel.require_backward_grad_sync and parallel.require_forward_param_sync:
        return False
    if parallel.static_graph and not parallel._has_rebuilt_buckets:
        return not parallel.require_backward_grad_sync
    return parallel.reducer.get_backward_stats() == before


def may_defer(model: Any) -> bool:
    """Whether a micro-batch may skip synchronisation. A static graph must synchronise in its first one."""
    return not getattr(model, "static_graph", False) or model._static_graph_delay_allreduce_enqueued
