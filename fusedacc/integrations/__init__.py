"""Thin adapters to training frameworks. Import the one you use; this package imports none of them.

`scheduler` and `distributed_checkpoint` need only torch; each other adapter needs the package of its name.
See docs/integrations.md.

This file has what the adapters share. A trainer creates the DistributedDataParallel itself: `attach` passes
it to the wrapper. It also creates a new optimizer for each fit: `release` closes the former wrapper of the
same parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from ..distributed import parallel_in
from ..optimizer import AccumulatingOptimizer


def attach(optimizer: AccumulatingOptimizer, models: Iterable[nn.Module | None]) -> None:
    """Attach the wrapper to the DistributedDataParallel among `models` that holds its parameters.

    If there is none, or they are spread over several, each DistributedDataParallel reduces as usual.
    """
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    holders = [
        parallel
        for parallel in map(parallel_in, models)
        if parallel is not None and not wanted.isdisjoint(map(id, parallel.parameters()))
    ]
    if len(holders) == 1:
        optimizer.attach(holders[0])


_made: weakref.WeakSet[AccumulatingOptimizer] = weakref.WeakSet()


def remember(optimizers: Iterable[Optimizer]) -> None:
    """Let a later `release` of their parameters close those that are wrappers."""
    _made.update(optimizer for optimizer in optimizers if isinstance(optimizer, AccumulatingOptimizer))


def release(parameters: Iterable[Tensor]) -> None:
    """Close the remembered wrappers of any of these parameters."""
    wanted = {id(parameter) for parameter in parameters}
    for optimizer in list(_made):
        if any(id(p) in wanted for group in optimizer.param_groups for p in group["params"]):
            optimizer.close()
            _made.discard(optimizer)
