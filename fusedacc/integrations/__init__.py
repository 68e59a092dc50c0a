"""Thin adapters to training frameworks: import the one that you use; none is imported from here.

`scheduler` and `distributed_checkpoint` need torch alone; each of the others needs the package of its name.
docs/integrations.md says what to write with each.

This file has what adapters of trainers share. A trainer makes the DistributedDataParallel itself: `attach`
gives it to the wrapper. It also makes a new optimizer for each fit: `release` closes the former wrapper of
the same parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from ..distributed import parallel_in
from ..optimizer import AccumulatingOptimizer


def attach(optimizer: AccumulatingOptimizer, models: Iterable[nn.Module | None]) -> None:
    """Let the wrapper reduce for the DistributedDataParallel among these that holds its parameters.

    Where there is none, or they are spread over several, the DistributedDataParallels reduce by themselves.

    Args:
        optimizer: the wrapper, between windows.
        models: as the framework has set them up.

    Raises:
        ValueError, RuntimeError: as `AccumulatingOptimizer.attach`.
    """
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found = [
        parallel
        for parallel in map(parallel_in, models)
        if parallel is not None and not wanted.isdisjoint(map(id, parallel.parameters()))
    ]
    if len(found) == 1:
        optimizer.attach(found[0])


_made: weakref.WeakSet[AccumulatingOptimizer] = weakref.WeakSet()


def remember(optimizers: Iterable[Optimizer]) -> None:
    """Let a later `release` of any of its parameters close each of these that is a wrapper."""
    _made.update(each for each in optimizers if isinstance(each, AccumulatingOptimizer))


def release(parameters: Iterable[Tensor]) -> None:
    """Close the remembered wrappers of any of these parameters."""
    wanted = {id(parameter) for parameter in parameters}
    for optimizer in list(_made):
        if any(id(p) in wanted for group in optimizer.param_groups for p in group["params"]):
            optimizer.close()
            _made.discard(optimizer)
