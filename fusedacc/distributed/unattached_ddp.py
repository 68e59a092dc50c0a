"""Checks that a DistributedDataParallel without `data_parallel=` has synchronised the gradients in p.grad.

A counted loop leaves the gradients of its parameters to autograd and DDP's reducer, and collects them when
the micro-batch ends. Inside the user's `no_sync()` the reducer skips gradients, so they differ between ranks.
Sums that mix both kinds would let the ranks' parameters drift apart silently.

DDP decides in its forward pass whether the reducer skips the gradients, and a parameter does not refer to its
DDP. So `DistributedDataParallel.forward` is replaced while a wrapper with a counted loop is alive.
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel

from ..accumulators import Slot
from .data_parallel import IdleReducer

#: Whether the reducer synchronises the gradients of a module's last forward pass with gradients.
_synchronises: weakref.WeakKeyDictionary[DistributedDataParallel, bool] = weakref.WeakKeyDictionary()
#: The live objects that need it.
_checks: weakref.WeakSet[SynchronisationCheck] = weakref.WeakSet()
#: torch's `forward` and the function that replaces it, while it is replaced.
_replaced: list[tuple[Callable[..., Any], Callable[..., Any]]] = []


class SynchronisationCheck:
    """The check for one wrapper with a counted loop."""

    def __init__(self) -> None:
        self._warned = False
        _checks.add(self)
        if not _replaced:
            former = DistributedDataParallel.forward
            _replaced.append((former, _noting(former)))
            DistributedDataParallel.forward = _replaced[0][1]  # type: ignore[method-assign]

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()

    def close(self) -> None:
        """End the check. After the last one, restore torch's class."""
        _checks.discard(self)
        if _checks or not _replaced:
            return
        former, ours = _replaced[0]
        if DistributedDataParallel.forward is ours:  # else other code has replaced it again, and may call it
            DistributedDataParallel.forward = former  # type: ignore[method-assign]
            _replaced.clear()
            _synchronises.clear()

    def check(self, stored: Iterable[Slot]) -> None:
        """Raise RuntimeError if `no_sync()` has left unsynchronised gradients in p.grad.

        stored: the slots whose gradients autograd has stored in a backward pass.
        """
        unattached = [parallel for parallel in _synchronises if _reduces_over_ranks(parallel)]
        held_back = _ids(parallel for parallel in unattached if not _synchronises[parallel])
        if held_back:
            # A parameter may be in several modules, of which one is not used.
            held_back -= _ids(parallel for parallel in unattached if _synchronises[parallel])
        if any(id(slot.param) in held_back for slot in stored):
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


def _noting(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `forward` that notes whether the backward pass will synchronise."""

    @functools.wraps(forward)
    def noting(parallel: DistributedDataParallel, *inputs: Any, **options: Any) -> Any:
        _note(parallel)
        return forward(parallel, *inputs, **options)

    return noting


@_disable_dynamo
def _note(parallel: DistributedDataParallel) -> None:
    if torch.is_grad_enabled():
        _synchronises[parallel] = parallel.require_backward_grad_sync


def _reduces_over_ranks(parallel: DistributedDataParallel) -> bool:
    """Whether the module's own reducer in C++ reduces over several ranks."""
    if parallel._use_python_reducer or isinstance(parallel.reducer, IdleReducer):
        return False
    return dist.is_initialized() and dist.get_world_size(parallel.process_group) > 1


def _ids(parallels: Iterable[DistributedDataParallel]) -> set[int]:
    """Return the ids of the modules' parameters."""
    return {id(param) for parallel in parallels for param in parallel.parameters()}


def may_defer(model: Any) -> bool:
    """Whether a micro-batch may skip synchronisation. A static graph must synchronise in its first one."""
    return not getattr(model, "static_graph", False) or model._static_graph_delay_allreduce_enqueued
