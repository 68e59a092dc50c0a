"""Checks that a DistributedDataParallel without `data_parallel=` has synchronised the gradients in p.grad.

A counted loop leaves the gradients of its parameters to autograd and DDP's reducer, and collects them when
the micro-batch ends. Inside the user's `no_sync()` the reducer skips gradients, so they differ between ranks.
Sums that mix both kinds would let the ranks' parameters drift apart silently.

DDP decides in its forward pass whether the reducer skips the gradients, and a parameter does not refer to its
DDP. So `DistributedDataParallel._pre_forward` is replaced while a wrapper with a counted loop is alive. DDP's
forward calls it, and so does `torch.distributed._composable.replicate`, which never calls DDP's forward.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..accumulators import Slot
from ..kernels.closing import ClosesItself
from ..kernels.torch_private import disable_dynamo
from .data_parallel import IdleReducer


class ForwardNote(NamedTuple):
    """What DDP has decided in a forward pass with gradients.

    synchronises: whether the reducer synchronises the gradients.
    backward_stats: if it does not, the reducer's statistics at that time: when each gradient came.
    """

    synchronises: bool
    backward_stats: list[int]


#: The last forward pass of each module.
_notes: weakref.WeakKeyDictionary[DistributedDataParallel, ForwardNote] = weakref.WeakKeyDictionary()
#: The live objects that need the notes.
_checks: weakref.WeakSet[SynchronisationCheck] = weakref.WeakSet()
#: torch's `_pre_forward` and the function that replaces it, while it is replaced.
_replaced: list[tuple[Callable[..., Any], Callable[..., Any]]] = []


class SynchronisationCheck(ClosesItself):
    """The check for one wrapper with a counted loop."""

    def __init__(self) -> None:
        self._warned = False
        _checks.add(self)
        if _replaced and not _calls(DistributedDataParallel._pre_forward, _replaced[0][1]):
            _replaced.clear()  # other code has restored torch's own
        if not _replaced:
            former = DistributedDataParallel._pre_forward
            ours = _noting(former)
            # DDP has no public hook that runs in each forward and sees `no_sync()`.
            DistributedDataParallel._pre_forward = ours  # type: ignore[method-assign]  # `close` restores it
            _replaced.append((former, ours))

    def close(self) -> None:
        """End the check. After the last one, restore torch's class."""
        _checks.discard(self)
        if _checks or not _replaced:
            return
        _notes.clear()
        former, ours = _replaced[0]
        # If other code has replaced it again, that code may call ours.
        if DistributedDataParallel._pre_forward is ours:
            DistributedDataParallel._pre_forward = former  # type: ignore[method-assign]  # undo `__init__`
            _replaced.clear()

    def check(self, stored: Iterable[Slot]) -> None:
        """Raise RuntimeError if `no_sync()` has left unsynchronised gradients in p.grad.

        stored: the slots whose gradients autograd has stored in a backward pass.
        """
        # Copy the notes first, because a forward pass in another thread may add one during the loop.
        notes = {parallel: note for parallel, note in list(_notes.items()) if _reduces_over_ranks(parallel)}
        unattached = list(notes)
        held_back = [parallel for parallel, note in notes.items() if _has_held_back(parallel, note)]
        local: set[int] = set()
        if held_back:
            # A parameter may be in several modules, of which one is not used.
            local = _ids(held_back) - _ids(parallel for parallel in unattached if parallel not in held_back)
        if any(id(slot.param) in local for slot in stored):
            raise RuntimeError(
                "ddp.no_sync() has left the gradients of this micro-batch unsynchronised: a counted loop "
                "would add those of this rank alone, and the ranks' parameters would drift apart. Put `with "
                "optimizer.accumulate(ddp):` around each micro-batch, forward and backward, in its place, "
                "and discard() this window"
            )
        if not self._warned and not _ids(unattached).isdisjoint(id(slot.param) for slot in stored):
            self._warned = True
            warnings.warn(
                "a DistributedDataParallel reduces the gradients of these parameters in every micro-batch "
                "outside no_sync(), so that the wrapper gains nothing. Pass data_parallel=ddp to it, or put "
                "`with optimizer.accumulate(ddp):` around each micro-batch: then sums are reduced once per "
                "update, in the accumulate dtype",
                stacklevel=2,
            )


def _noting(pre_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `_pre_forward` that notes whether the backward pass will synchronise."""

    @functools.wraps(pre_forward)
    def noting(parallel: DistributedDataParallel, *inputs: Any, **options: Any) -> Any:
        if not parallel._use_python_reducer:  # which a graph without breaks may contain
            _note(parallel)
        return pre_forward(parallel, *inputs, **options)

    return noting


def _calls(function: Any, wanted: Callable[..., Any]) -> bool:
    """Whether a function is the wanted one or wraps it, as far as `functools.wraps` tells."""
    while function is not None and function is not wanted:
        function = getattr(function, "__wrapped__", None)
    return function is wanted


@disable_dynamo
def _note(parallel: DistributedDataParallel) -> None:
    if torch.is_grad_enabled():
        synchronises = parallel.require_backward_grad_sync
        stats = [] if synchronises else parallel.reducer.get_backward_stats()
        _notes[parallel] = ForwardNote(synchronises, stats)


def _has_held_back(parallel: DistributedDataParallel, note: ForwardNote) -> bool:
    """Whether the reducer has skipped the gradients of the backward pass after a forward pass.

    A forward pass inside `no_sync()` changes nothing if another forward pass has prepared the reducer for the
    same backward pass. Then the reducer's statistics have changed. A static graph has none in its first
    backward pass.
    """
    if note.synchronises:
        return False
    if parallel.static_graph and not parallel._has_rebuilt_buckets:
        return True
    return parallel.reducer.get_backward_stats() == note.backward_stats


def _reduces_over_ranks(parallel: DistributedDataParallel) -> bool:
    """Whether the module's own reducer in C++ reduces over several ranks."""
    if parallel._use_python_reducer or isinstance(parallel.reducer, IdleReducer):
        return False
    return dist.is_initialized() and dist.get_world_size(parallel.process_group) > 1


def _ids(parallels: Iterable[DistributedDataParallel]) -> set[int]:
    """Return the ids of the modules' parameters."""
    return {id(param) for parallel in parallels for param in parallel.parameters()}


def may_defer(model: Any) -> bool:
    """Whether a micro-batch may skip synchronisation.

    A static graph must synchronise in its first one. FSDP1 must in each, because the gradients that its
    `no_sync()` leaves have the shapes of whole parameters, and the sums have those of this rank's shards.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    if isinstance(model, FullyShardedDataParallel):
        return False
    return not getattr(model, "static_graph", False) or model._static_graph_delay_allreduce_enqueued
