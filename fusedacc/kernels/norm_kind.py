"""The kinds of norm. A new kind is an entry in `KINDS`; kernels and C++ refuse other `norm_type` values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class NormKind:
    """One kind of norm.

    Attributes:
        norm_type: its number in torch and C++.
        name: in words.
        over_ranks: the collective that combines the ranks' values: "SUM" or "MAX".
        values: converts norms of parts to the collective's input.
        norms: converts the collective's output to norms of the whole.
    """

    norm_type: float
    name: str
    over_ranks: str
    values: Callable[[Tensor], Tensor]
    norms: Callable[[Tensor], Tensor]


def _with_flags(norms: Tensor) -> Tensor:
    """Norms, and whether each is nan, because a maximum over ranks may drop nan."""
    return torch.stack([norms.nan_to_num(0.0, posinf=torch.inf), norms.isnan().double()])


def _without_flags(values: Tensor) -> Tensor:
    return torch.where(values[1] > 0, torch.nan, values[0])


L2 = NormKind(2.0, "L2", "SUM", torch.square, torch.sqrt)
INFINITY = NormKind(float("inf"), "inf", "MAX", _with_flags, _without_flags)
KINDS = (L2, INFINITY)


def norm_kind(norm_type: Any) -> NormKind:
    """Return the kind of that number.

    Raises:
        ValueError: there is none.
    """
    for kind in KINDS:
        if isinstance(norm_type, int | float) and norm_type == kind.norm_type:
            return kind
    allowed = " and ".join(str(kind.norm_type) for kind in KINDS)
    raise ValueError(f"norm_type is {norm_type!r}; allowed: {allowed}")
