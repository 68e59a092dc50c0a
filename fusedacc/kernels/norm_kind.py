"""The kinds of norm that there are: what Python knows of each.

A new kind is an entry in `KINDS`; kernels and C++ refuse a `norm_type` that they do not know.
"""

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
        norm_type: its number, as torch and the C++ code have it.
        name: in words.
        over_ranks: the collective that makes one of the values of all ranks: "SUM" or "MAX".
        values: of the norms of parts, what that collective takes.
        norms: of what it returns, the norms of the whole.
    """

    norm_type: float
    name: str
    over_ranks: str
    values: Callable[[Tensor], Tensor]
    norms: Callable[[Tensor], Tensor]


def _squares(norms: Tensor) -> Tensor:
    return norms * norms


def _with_flags(norms: Tensor) -> Tensor:
    """Norms, and whether each is nan: a maximum over ranks may pass nan by."""
    return torch.stack([norms.nan_to_num(0.0, posinf=torch.inf), norms.isnan().double()])


def _without_flags(values: Tensor) -> Tensor:
    return torch.where(values[1] > 0, torch.nan, values[0])


L2 = NormKind(2.0, "L2", "SUM", _squares, torch.sqrt)
INFINITY = NormKind(float("inf"), "inf", "MAX", _with_flags, _without_flags)
KINDS = (L2, INFINITY)


def norm_kind(norm_type: Any) -> NormKind:
    """The kind of that number.

    Raises:
        ValueError: there is none.
    """
    for kind in KINDS:
        if isinstance(norm_type, int | float) and norm_type == kind.norm_type:
            return kind
    allowed = " and ".join(str(kind.norm_type) for kind in KINDS)
    raise ValueError(f"norm_type is {norm_type!r}; allowed: {allowed}")
