"""Under torchrun the frameworks make the DistributedDataParallel; the wrapper is attached to it here."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

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
