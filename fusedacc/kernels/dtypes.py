"""The dtypes, the supported pairs, and the dtype in which sums are computed, as in `csrc/common/dtypes.h`.

And the types of arguments that many functions have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

#: A factor; a list of tensors; and one flag for all tensors, or one for each.
Number = float | Tensor
Tensors = Sequence[Tensor]
Flags = bool | Sequence[bool]

#: Dtypes of gradients and accumulators, in the order of their numbers in csrc.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

#: The (gradient dtype, accumulator dtype) pairs that every backend supports.
PAIRS: frozenset[tuple[torch.dtype, torch.dtype]] = frozenset(
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
    ]
)

#: Dtypes of accumulators, and of tensors whose norm is computed, the widest first.
SUM_DTYPES = tuple(
    sorted((dtype for dtype in DTYPES if (dtype, dtype) in PAIRS), key=lambda dtype: -dtype.itemsize)
)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name without "torch."."""
    return str(dtype).removeprefix("torch.")


def pair_name(gradient: torch.dtype, accumulator: torch.dtype) -> str:
    return f"{dtype_name(gradient)} into {dtype_name(accumulator)}"


def allowed_pairs() -> str:
    """Return the supported dtype pairs in one line, for error messages."""
    names = sorted((dtype_name(acc), dtype_name(grad)) for grad, acc in PAIRS)
    return ", ".join(f"{grad} into {acc}" for acc, grad in names)


def default_accumulate_dtype(param: Tensor) -> torch.dtype:
    """Return float32 for narrower parameters with a float32 sum, else the parameter's dtype."""
    narrow = param.dtype.itemsize < 4 and (param.dtype, torch.float32) in PAIRS
    return torch.float32 if narrow else param.dtype


def computation_dtype(accumulator_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a sum is computed: float64 for float64 accumulators, else float32."""
    return torch.float64 if accumulator_dtype == torch.float64 else torch.float32


def is_deferrable(factor: float | Tensor, dtype: torch.dtype) -> bool:
    """Return whether multiplying an accumulator later gives the same bits as multiplying it now.

    An accumulator in its computation's dtype is not rounded in between. bfloat16 is, but it has float32's
    exponents, so powers of two round nothing above its smallest normal number.
    """
    if computation_dtype(dtype) == dtype:
        return True
    if isinstance(factor, Tensor):  # its value is on a device
        return False
    return factor == 1.0 or (dtype is torch.bfloat16 and math.frexp(factor)[0] == 0.5)
