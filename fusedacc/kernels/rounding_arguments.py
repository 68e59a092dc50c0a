"""How users say that sums are to be rounded, and the errors where that makes no sense."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .rounding import Noise, stream_of

NEAREST, STOCHASTIC = "nearest", "stochastic"
#: Additions that one seed has random bits for, and one above the highest seed.
MOST_ADDITIONS, MOST_SEEDS = 2**31, 2**63


def checked_seed(rounding: Any, seed: Any) -> int | None:
    """The seed of sums that are rounded stochastically, by default torch's own; None: to nearest.

    Raises:
        ValueError: there is no such rounding; a seed is below 0 or too large, or is given to no avail.
        TypeError: the seed is no int.
    """
    if rounding not in (NEAREST, STOCHASTIC):
        raise ValueError(f"rounding is {rounding!r}; allowed: {NEAREST!r}, {STOCHASTIC!r}")
    if rounding == NEAREST:
        if seed is not None:
            raise ValueError(
                f"seed is {seed!r}, but rounding={NEAREST!r} takes no random bits; allowed: None, or "
                f"rounding={STOCHASTIC!r}"
            )
        return None
    if seed is None:
        return torch.initial_seed() % MOST_SEEDS
    return _checked("seed", seed, MOST_SEEDS)


def _checked(name: str, value: Any, end: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); allowed: an int from 0 to {end - 1}")
    if not 0 <= value < end:
        raise ValueError(f"{name} is {value}; allowed: 0 to {end - 1}")
    return value


def checked_offset(offset: Any) -> int:
    """The number of an addition.

    Raises:
        TypeError: it is no int. ValueError: it is below 0 or too large.
    """
    return _checked("offset", offset, MOST_ADDITIONS)


def check_dtypes(accumulators: Sequence[Tensor]) -> None:
    """Raise TypeError unless all are of bfloat16."""
    for index, accumulator in enumerate(accumulators):
        if accumulator.dtype is not torch.bfloat16:
            raise TypeError(
                f"accumulators[{index}] is {accumulator.dtype}, but rounding={STOCHASTIC!r} is for sums of "
                "torch.bfloat16: float32 and float64 have bits to spare, and float16 lacks range"
            )


def noise_for(accumulators: Any, rounding: Any, seed: Any, offset: Any) -> Noise | None:
    """The random bits of one pass over these accumulators; None: they are rounded to nearest.

    Raises:
        TypeError, ValueError: as the functions above; an offset is given to no avail.
    """
    known = checked_seed(rounding, seed)
    if known is None:
        if offset is not None:
            raise ValueError(
                f"offset is {offset!r}, but rounding={NEAREST!r} takes no random bits; allowed: None, or "
                f"rounding={STOCHASTIC!r}"
            )
        return None
    number = checked_offset(0 if offset is None else offset)
    if not isinstance(accumulators, (list, tuple)):
        kind = type(accumulators).__name__
        raise TypeError(f"accumulators is {kind}; allowed: a list or tuple of tensors")
    check_dtypes([each for each in accumulators if isinstance(each, Tensor)])  # others are refused later
    return Noise(known, streams(len(accumulators), number))


def streams(count: int, addition: int) -> list[int]:
    """Those of one addition to so many tensors, which are numbered by their order."""
    first = stream_of(0, addition)
    return list(range(first, first + count))
