"""Grouped products in plain torch, on any device: the eager backend of `grouped`."""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks, matmul_eager
from .dtypes import PAIRS, allowed_pairs
from .matmul_eager import Number
from .rounding import Noise


def accumulate_(
    accumulator: Tensor,
    left: Tensor,
    right: Tensor,
    offsets: Tensor,
    scale: Number,
    keep: Number,
    noise: Noise | None = None,
) -> None:
    """Expert by expert, once the arguments are found right. Waits for the device, to read the offsets.

    With `noise`, of one stream, the accumulator is bfloat16 and is rounded stochastically.

    Raises:
        RuntimeError: an argument is not as `grouped.grouped_accumulate_` wants it; nothing has been modified.
    """
    _check(accumulator, left, right, offsets)
    start = 0
    with torch.no_grad():
        for expert, end in enumerate(_read_ends(offsets, left.shape[0])):
            operands = left[start:end], right[start:end]
            first = expert * accumulator.stride(0)
            matmul_eager.accumulate_(accumulator[expert], *operands, scale, keep, noise, first)
            start = end


def _check(accumulator: Tensor, left: Tensor, right: Tensor, offsets: Tensor) -> None:
    """All but the offsets' values, in the words of the native operator."""
    dims = {"accumulator": (accumulator, 3), "left": (left, 2), "right": (right, 2), "offsets": (offsets, 1)}
    for name, (tensor, count) in dims.items():
        _require(tensor.dim() == count, f"{name} has {tensor.dim()} dimensions; it must have {count}")
        where = f"{name} is on {tensor.device} but accumulator is on {accumulator.device}"
        _require(tensor.device == accumulator.device, where)
    own = str(accumulator.dtype)[6:]
    memory = None
    if checks.is_plain(accumulator):
        try:
            memory = checks.check_accumulators([accumulator])
        except (TypeError, ValueError) as problem:
            raise RuntimeError(f"fusedacc: {problem}".replace("accumulators[0]", "accumulator")) from None
    for name, operand, along in (("left", left, 1), ("right", right, 2)):
        dtype = f"{name} has {str(operand.dtype)[6:]}"
        pair = (operand.dtype, accumulator.dtype)
        _require(pair in PAIRS, f"{dtype} and accumulator {own}; allowed: {allowed_pairs()}")
        shapes = f"has shape {list(operand.shape)} but accumulator has {list(accumulator.shape)}"
        _require(operand.shape[1] == accumulator.shape[along], f"{name} {shapes}")
        if memory is not None and checks.is_plain(operand):
            _require(not memory.overlapping(operand), f"{name} overlaps accumulator in memory")
    dtypes = f"right has {str(right.dtype)[6:]} but left has {str(left.dtype)[6:]}"
    _require(right.dtype == left.dtype, dtypes)
    rows = f"right has {right.shape[0]} rows but left has {left.shape[0]}"
    _require(right.shape[0] == left.shape[0], rows)
    dtype = f"offsets has {str(offsets.dtype)[6:]}; it must be int32"
    _require(offsets.dtype == torch.int32, dtype)
    elements = f"offsets has {offsets.shape[0]} elements; it must have {accumulator.shape[0]}"
    _require(offsets.shape[0] == accumulator.shape[0], f"{elements}, one for each matrix of accumulator")


def _read_ends(offsets: Tensor, tokens: int) -> list[int]:
    ends, least = offsets.tolist(), 0
    for index, end in enumerate(ends):
        allowed = f"allowed: {least} to {tokens}, from the offset before to the rows of left"
        _require(least <= end <= tokens, f"offsets[{index}] is {end}; {allowed}")
        least = end
    return ends


def _require(right: bool, problem: str) -> None:
    if not right:
        raise RuntimeError(f"fusedacc: {problem}")
