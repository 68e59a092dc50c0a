"""Whether a DistributedDataParallel has synchronised what a backward has put into p.grad.

A counted loop under a process group leaves gradients to autograd and its reducer, and takes them in once the
micro-batch ends. Gradients that the reducer was told to leave alone (`no_sync()` by hand) differ from rank to
rank, and sums over some of each are no rank's: the parameters would drift apart, and nobody would see it.
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

#: What a reducer knew of its gradients when a backward began.
Watch = list[tuple[DistributedDataParallel, list[int]]]


class Reducers:
    """The DistributedDataParallels of several ranks that hold parameters of `slots`.

    Only a process group's users ask it anything. Nothing leads from a parameter to the module that reduces
    its gradient, so that the garbage collector's list is searched: at the first backward, and, while nothing
    is found, at the second, the fourth and so on, since a model may be given its reducer late.

    Args:
        slots: the parameters; a list shared with its owner.
    """

    def __init__(self, slots: list[Slot]) -> None:
        self._slots = slots
        self._found: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._backwards = 0
        self._warned = False

    def watch(self) -> Watch:
        """What to hand to `check` when the backward that begins here has ended."""
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
                and "reducer" in candidate.__dict__  # one that is being made, or whose making has failed
                and not candidate._use_python_reducer
                and torch.distributed.get_world_size(candidate.process_group) > 1
                and not held.isdisjoint(map(id, candidate.parameters()))
            ):
                self._found.add(candidate)
        if self._found and not self._warned:
            self._warned = True
            warnings.warn(
                "a DistributedDataParallel reduces the gradients of these parameters by itself, in every "
                "micro-batch that no_sync() does not leave out, and the wrapper gains nothing. Make it with "
                "data_parallel=ddp, or put `with optimizer.accumulate(ddp):` around each micro-batch: then "
                "sums are reduced once per update, in their own dtype",
                stacklevel=2,
            )

    def check(self, watch: Watch, stored: Iterable[Slot]) -> None:
        """Raise RuntimeError where a backward under `no_sync()` has left gradients of one rank in p.grad.

        Args:
            watch: what `watch` returned when it began.
            stored: whose gradients autograd has stored.
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
    """Whether the reducer was told to leave the gradients of this backward alone, and did.

    Its forward decides, and sets a flag; but a forward without gradients that has come since sets it too.
    So the reducer must be found idle as well: it notes for each parameter when it was handed the gradient
    (in the first backward of a static graph it does not).
    """
    if parallel.require_backward_grad_sync and parallel.require_forward_param_sync:
        return False
    if parallel.static_graph and not parallel._has_rebuilt_buckets:
        return not parallel.require_backward_grad_sync
    return parallel.reducer.get_backward_stats() == before


def may_defer(model: Any) -> bool:
    """Whether a micro-batch may do without synchronising: a static graph is learnt from a first that does."""
    return not getattr(model, "static_graph", False) or model._static_graph_delay_allreduce_enqueued
