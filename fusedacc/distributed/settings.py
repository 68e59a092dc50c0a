"""What the ranks' wrappers were given: alike on all, or they would wait for each other or add up nonsense."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from ..accumulators import Slot
from .backends import own_failures


def agree_on_settings(
    slots: Sequence[Slot],
    group: dist.ProcessGroup,
    reduce_dtype: torch.dtype | None,
    seed: int | None,
    others: Mapping[str, object],
) -> tuple[int, bool]:
    """See that these are the same on all ranks, in one collective of a few numbers; waits for the device.

    Args:
        seed: of sums that are rounded stochastically; None: to nearest.
        others: the wrapper's other arguments that all ranks must share, by name.

    Returns:
        The seed of the group's first rank; 0 where sums are rounded to nearest. And whether a backend has
        failed its self-test on any rank.

    Raises:
        ValueError: ranks differ in one of them, or in their parameters' shapes and dtypes; on every rank.
    """
    rank, params = dist.get_rank(group), [slot.param for slot in slots]
    sums = [slot.accumulate_dtype for slot in slots]
    settings: dict[str, tuple[object, str]] = {  # what is compared, and what is said of it
        "parameters": (
            [(p.shape, p.dtype) for p in params],
            f"{len(params)} with {sum(p.numel() for p in params)} elements",
        ),
        "accumulate_dtype": (sums, ", ".join(sorted({str(dtype) for dtype in sums}))),
        "rounding": (seed is None, repr("nearest" if seed is None else "stochastic")),
        "reduce_dtype": (reduce_dtype, str(reduce_dtype)),
        **{name: (value, repr(value)) for name, value in others.items()},
    }
    codes = torch.tensor([zlib.crc32(repr(compared).encode()) for compared, _ in settings.values()])
    first = torch.tensor([seed or 0 if rank == 0 else 0, int(bool(own_failures(slots)))])
    extremes = torch.cat([first, codes, ~codes])  # the complement turns the order round
    extremes = extremes.to(slots[0].param.device if slots else "cpu")
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    agreed, failed, *found = extremes.tolist()
    for place, (name, (_, own)) in enumerate(settings.items()):
        if found[place] != ~found[place + len(settings)]:
            raise ValueError(
                f"data_parallel: the ranks' optimizers differ in {name}: rank {rank} has {own}; allowed: the "
                "same on all ranks"
            )
    return agreed, bool(failed)
