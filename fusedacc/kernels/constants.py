"""What csrc has too: numbers, the words of a prepared plan, and the kinds of norm.

`tests/kernels/test_constants.py` compares the numbers with the headers.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .dtypes import DTYPES, Tensors

#: `kMaxDims` of csrc/common/work.h: the most dimensions that compiled operators loop over.
MAX_DIMS = 16
#: `kChunkElements` of csrc/common/work.h: the elements behind one partial norm.
CHUNK_ELEMENTS = 8192
#: `kRowRun` of csrc/common/work.h: gradients of one row that are summed before their sum is added to others.
ROW_RUN = 64
#: `kTokenClasses` of csrc/cpu/gemm.h: the most tokens of each class but the last.
TOKEN_CLASSES = (16, 47, 100)


class GemmMethod(enum.IntEnum):
    """`GemmMethod` of csrc/cpu/gemm.h: how the native library multiplies on a CPU."""

    #: One product by BLAS in the computation's dtype; 16-bit operands are cast to it in parts.
    WHOLE = 0
    #: oneDNN's product of bfloat16 straight into a bfloat16 sum.
    ONEDNN = 1
    #: fusedacc's own loops. A sum of 16 bits allows at most `kRankTokens` tokens (csrc/cpu/loops.h); other
    #: sums are read and written once per 128 tokens (256 with AVX512-BF16).
    RANK_K = 2
    #: MKL's product of bfloat16 into a float32 sum.
    MKL = 3


class ProductMethod(enum.IntEnum):
    """`ProductMethod` of csrc/autograd/engine.h: what multiplies. GemmMethod m is OPERATOR + m."""

    UNKNOWN = 0
    PYTHON = 1
    BLAS = 2
    WIDENING_BLAS = 3
    OPERATOR = 4


# Words of a plan (`torch.ops.fusedacc.prepare`, `AccumulatorTable` of csrc/ops/tensor_checks.h): a header;
# each accumulator's address, elements, dimensions, dtype and the start of its sizes and strides; these; the
# memory range of each accumulator with elements.
_HEADER_WORDS = 7
_ENTRY_WORDS = 5
_RANGE_WORDS = 3


def plan_words(accumulators: Tensors) -> int:
    """Return how many words the plan of these accumulators has."""
    ranges = sum(1 for tensor in accumulators if tensor.numel())
    shapes = sum(2 * tensor.dim() for tensor in accumulators)
    return _HEADER_WORDS + _ENTRY_WORDS * len(accumulators) + shapes + _RANGE_WORDS * ranges


def plan_entry(words: Sequence[int], index: int) -> tuple[int, int, torch.dtype]:
    """Return an accumulator's address, number of elements and dtype, from a plan's words."""
    first = _HEADER_WORDS + _ENTRY_WORDS * index
    return words[first], words[first + 1], DTYPES[words[first + 3] & 0xFF]


@dataclass(frozen=True)
class NormKind:
    """One kind of norm, an entry in `NORM_KINDS`. Kernels and C++ refuse other `norm_type` values.

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
NORM_KINDS = (L2, INFINITY)


def norm_kind(norm_type: Any) -> NormKind:
    """Return the kind of that number, or raise ValueError."""
    for kind in NORM_KINDS:
        if isinstance(norm_type, int | float) and norm_type == kind.norm_type:
            return kind
    allowed = " and ".join(str(kind.norm_type) for kind in NORM_KINDS)
    raise ValueError(f"norm_type is {norm_type!r}; allowed: {allowed}")
