"""Trainers make an optimizer anew for each fit; the one that the last has left gives up its parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

from ..optimizer import AccumulatingOptimizer

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
