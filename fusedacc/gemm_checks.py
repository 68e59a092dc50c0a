"""What `gemm.gemm_accumulate_` may be given, and the errors that say which argument is wrong and why.

The compiled operator makes the same checks for memory safety; these run when it, or torch, has refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import checks


def check(accumulator: Any, left: Any, right: Any, scale: Any, keep: Any) -> None:
    """Raise what `gemm_accumulate_` documents; reads no element and modifies nothing."""
    named = {"accumulator": accumulator, "left": left, "right": right}
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is {type(tensor).__name__}, not a tensor")
        if tensor.layout != torch.strided:
            raise TypeError(f"{name} is sparse ({str(tensor.layout)[6:]}); only dense tensors can be used")
        if tensor.dim() != 2:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; allowed: two dimensions")
        if tensor.device != accumulator.device:
            raise ValueError(f"{name} is on {tensor.device}, but accumulator is on {accumulator.device}")
    if (left.dtype, accumulator.dtype) not in checks.PAIRS:
        raise TypeError(
            f"left is {left.dtype} and accumulator is {accumulator.dtype}; allowed: {checks.allowed_pairs()}"
        )
    if right.dtype != left.dtype:
        raise TypeError(f"right is {right.dtype}, but left is {left.dtype}; they must be of one dtype")
    if left.shape[0] != right.shape[0]:
        raise ValueError(f"right has {right.shape[0]} rows, but left has {left.shape[0]}")
    for index, (name, operand) in enumerate((("left", left), ("right", right))):
        if operand.shape[1] != accumulator.shape[index]:
            raise ValueError(
                f"{name} has shape {tuple(operand.shape)}, but accumulator has {tuple(accumulator.shape)}: "
                "left [n, M] and right [n, N] go into accumulator [M, N]"
            )
    _check_memory(accumulator, left, right)
    _check_number("scale", scale, accumulator)
    _check_number("keep", keep, accumulator)


def _check_memory(accumulator: Tensor, left: Tensor, right: Tensor) -> None:
    if checks.overlaps_itself(accumulator) or not (
        _rows_are_dense(accumulator) or _rows_are_dense(accumulator.t())
    ):
        raise ValueError(
            f"accumulator has shape {tuple(accumulator.shape)} and strides {tuple(accumulator.stride())}; "
            "its rows or its columns must lie without gaps and not overlap"
        )
    if not checks.is_plain(accumulator):
        return
    start, end = checks.memory_range(accumulator)
    for name, operand in (("left", left), ("right", right)):
        if checks.is_plain(operand):
            first, last = checks.memory_range(operand)
            if max(first, start) < min(last, end):
                raise ValueError(f"{name} shares memory with accumulator; they must not overlap")


def _rows_are_dense(matrix: Tensor) -> bool:
    return matrix.numel() == 0 or matrix.shape[1] == 1 or matrix.stride(1) == 1


def _check_number(name: str, value: Any, accumulator: Tensor) -> None:
    if not isinstance(value, Tensor):
        if isinstance(value, str) or not hasattr(value, "__float__"):
            raise TypeError(
                f"{name} is {value!r} ({type(value).__name__}); allowed: a float or a 0-dim tensor"
            )
    elif value.dim() != 0:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; a tensor {name} must be 0-dim")
    elif not value.is_floating_point():
        raise TypeError(f"{name} has dtype {value.dtype}; a tensor {name} must be floating-point")
    elif value.device != accumulator.device:
        raise ValueError(f"{name} is on {value.device}, but accumulator is on {accumulator.device}")
