"""Check arguments of the public API and environment variables; errors name the tensor and the reason.

The compiled operators make the same checks for memory safety on every call. This module runs after an
operator has refused, to name the reason, and before backends that check nothing themselves.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .dtypes import PAIRS, SUM_DTYPES, Flags, Tensors, allowed_pairs, dtype_name
from .torch_private import FakeTensor

#: Types of ordinary gradients, fake ones included.
GRADIENT_TYPES = frozenset({Tensor, FakeTensor})
#: Types of tensors without subclass behaviour.
ORDINARY_TYPES = GRADIENT_TYPES | {torch.nn.Parameter, torch.nn.Buffer}


def switch(variable: str, *, on: str, off: str, unset: str) -> bool | None:
    """Return whether the environment variable is "1" or "0"; None if it is empty or not set; else raise
    ValueError. on, off, unset: what "1", "0" and no value mean, for the error.
    """
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        allowed = f"'0' ({off}), '1' ({on}), or not set ({unset})"
        raise ValueError(f"{variable}={value!r}: allowed are {allowed}")
    return value == "1" if value else None


def is_plain(tensor: Tensor) -> bool:
    """Return whether `tensor` is dense and has memory: no wrapper subclass, no meta tensor."""
    return type(tensor) in ORDINARY_TYPES and tensor.layout == torch.strided and not tensor.is_meta


def reach(tensor: Tensor) -> int:
    """Return how many elements' places `tensor` spans, from its first element to its last."""
    if tensor.is_contiguous() or tensor.numel() == 0:
        return tensor.numel()
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _memory_range(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte that `tensor` can touch and one past the last; an empty range if it is empty."""
    start = tensor.data_ptr()
    return start, start + reach(tensor) * tensor.element_size()


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether two indices of `tensor` may refer to one element.

    Sufficient rule: each stride, from the smallest, must step over everything that the smaller ones reach. It
    accepts every view made by slicing, transposing and permuting. It refuses some valid `as_strided` layouts
    that interleave.
    """
    if tensor.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 0:
            return False
        if size == 1:
            continue
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether both tensors have the same first byte, dtype, sizes and strides."""
    same_layout = a.shape == b.shape and a.stride() == b.stride()
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and same_layout


class MemoryMap:
    """The sorted byte ranges of a list of accumulators, to find what overlaps them."""

    def __init__(self, accumulators: Tensors) -> None:
        spans = sorted(
            (str(tensor.device), *_memory_range(tensor), index)
            for index, tensor in enumerate(accumulators)
            if is_plain(tensor) and tensor.numel() > 0
        )
        for (device, _, end, first), (next_device, start, _, second) in pairwise(spans):
            if device == next_device and start < end:
                low, high = sorted((first, second))
                raise ValueError(
                    f"accumulators[{low}] and accumulators[{high}] share memory; they must not overlap"
                )
        self._spans = spans
        ranges = torch.tensor(sorted(span[1:3] for span in spans), dtype=torch.int64)
        self._starts, self._ends = ranges.view(-1, 2).t().contiguous()
        self._layouts = [(tensor.shape, tensor.stride(), tensor.device) for tensor in accumulators]
        self._dtypes = [tensor.dtype for tensor in accumulators]
        self._reaches = torch.tensor(list(map(reach, accumulators)), dtype=torch.int64)

    def overlapping(self, tensor: Tensor) -> list[int]:
        """Return the accumulators whose byte range meets that of `tensor`."""
        start, end = _memory_range(tensor)
        device = str(tensor.device)
        indices = []
        position = bisect_left(self._spans, (device, end)) - 1
        while start < end and position >= 0:
            owner, _, last, index = self._spans[position]
            if owner != device or last <= start:
                break
            indices.append(index)
            position -= 1
        return indices

    def plainly_fit(self, gradients: Any) -> bool:
        """Return whether the gradients are certainly right, by a few checks of whole lists.

        True for ordinary tensors laid out like their accumulators, with allowed dtypes, that overlap no
        accumulator. Addresses are compared without devices.
        """
        if not isinstance(gradients, (list, tuple)) or not ORDINARY_TYPES.issuperset(map(type, gradients)):
            return False
        if any(gradient.layout != torch.strided for gradient in gradients):
            return False
        if [(gradient.shape, gradient.stride(), gradient.device) for gradient in gradients] != self._layouts:
            return False
        if not PAIRS.issuperset(zip([gradient.dtype for gradient in gradients], self._dtypes, strict=True)):
            return False
        if len(self._spans) == 0:
            return True
        starts = torch.tensor([gradient.data_ptr() for gradient in gradients], dtype=torch.int64)
        ends = starts + self._reaches * torch.tensor([gradient.itemsize for gradient in gradients])
        before = torch.searchsorted(self._starts, ends) - 1
        return not ((before >= 0) & (self._ends[before.clamp(min=0)] > starts)).any()


def check_scale(scale: Any, accumulators: Tensors) -> None:
    """Check that `scale` is a real number, or a 0-dim floating tensor on the accumulators' device."""
    if not isinstance(scale, Tensor):
        with contextlib.suppress(TypeError, ValueError):
            if not isinstance(scale, str):
                float(scale)
                return
        raise TypeError(f"scale is {scale!r} ({type(scale).__name__}); allowed: a float or a 0-dim tensor")
    if scale.dim() != 0:
        raise ValueError(f"scale has shape {tuple(scale.shape)}; a tensor scale must be 0-dim")
    if not scale.is_floating_point():
        raise TypeError(f"scale has dtype {scale.dtype}; a tensor scale must be floating-point")
    for index, tensor in enumerate(accumulators):
        if tensor.device != scale.device:
            raise ValueError(
                f"scale is on {scale.device}, but accumulators[{index}] is on {tensor.device}; "
                "a tensor scale must be on the accumulators' device (a float goes with any)"
            )


def check_overwrite(overwrite: Any, count: int) -> None:
    """Check that `overwrite` is a bool or a list of `count` bools."""
    if isinstance(overwrite, bool):
        return
    if not isinstance(overwrite, (list, tuple)):
        raise TypeError(f"overwrite is {overwrite!r}; allowed: a bool, or a list of one bool per tensor")
    if len(overwrite) != count:
        raise ValueError(f"overwrite has {len(overwrite)} entries for {count} tensors")
    for index, value in enumerate(overwrite):
        if not isinstance(value, bool):
            raise TypeError(f"overwrite[{index}] is {value!r}; allowed: True or False")


def overwrite_flags(overwrite: Flags, count: int) -> Sequence[bool]:
    """Return `overwrite` as one flag per tensor."""
    return [overwrite] * count if isinstance(overwrite, bool) else overwrite


def _check_list(name: str, tensors: Any, allowed: str, dtypes: Collection[torch.dtype] | None = None) -> None:
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"{name} is {type(tensors).__name__}; allowed: a list or tuple of tensors")
    for index, tensor in enumerate(tensors):
        place = f"{name}[{index}]"
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{place} is {type(tensor).__name__}, not a tensor")
        if tensor.layout != torch.strided:
            layout = str(tensor.layout)[6:]
            raise TypeError(f"{place} is sparse ({layout}); only dense tensors can be used")
        if not tensor.is_floating_point():
            kind = "complex" if tensor.is_complex() else "not floating-point"
            raise TypeError(f"{place} is {kind} ({tensor.dtype}); allowed: {allowed}")
        if dtypes is not None and tensor.dtype not in dtypes:
            raise TypeError(f"{place} is {tensor.dtype}; allowed: {allowed}")


def check_tensors(tensors: Any) -> None:
    """Check that `tensors` is a list of dense floating tensors of supported dtypes; they may overlap."""
    _check_list("tensors", tensors, ", ".join(map(dtype_name, SUM_DTYPES)), SUM_DTYPES)


def check_accumulators(accumulators: Any) -> MemoryMap:
    """Check accumulators, whose memory must not overlap, and return that memory for `check_gradients`."""
    _check_list("accumulators", accumulators, allowed_pairs(), SUM_DTYPES)
    for index, tensor in enumerate(accumulators):
        if overlaps_itself(tensor):
            raise ValueError(
                f"accumulators[{index}] overlaps itself: shape {tuple(tensor.shape)}, "
                f"strides {tuple(tensor.stride())}; every element must have its own place"
            )
    return MemoryMap(accumulators)


def check_gradients(
    accumulators: Tensors, gradients: Any, scale: Any, overwrite: Any, memory: MemoryMap
) -> None:
    """Check that gradients, scale and overwrite fit accumulators that `check_accumulators` has passed. A
    gradient may share memory with an accumulator only if both are the same.
    """
    check_overwrite(overwrite, len(accumulators))
    check_scale(scale, accumulators)
    if memory.plainly_fit(gradients):
        return
    _check_list("gradients", gradients, allowed_pairs())
    check_pairs(accumulators, gradients)
    for index, (accumulator, gradient) in enumerate(zip(accumulators, gradients, strict=True)):
        if not is_plain(gradient):
            continue
        for owner in memory.overlapping(gradient):
            if owner != index or not _same_memory(gradient, accumulator):
                raise ValueError(
                    f"gradients[{index}] shares memory with accumulators[{owner}]; "
                    "a gradient may be its own accumulator, and nothing else may overlap"
                )


def check_pairs(accumulators: Tensors, gradients: Tensors) -> None:
    """Check that there is a gradient for each accumulator, with a matching dtype, shape and device."""
    if len(gradients) != len(accumulators):
        raise ValueError(f"{len(accumulators)} accumulators, but {len(gradients)} gradients")
    for index, (accumulator, gradient) in enumerate(zip(accumulators, gradients, strict=True)):
        if (gradient.dtype, accumulator.dtype) not in PAIRS:
            raise TypeError(
                f"gradients[{index}] is {gradient.dtype} and accumulators[{index}] is {accumulator.dtype}; "
                f"allowed: {allowed_pairs()}"
            )
        if gradient.shape != accumulator.shape:
            raise ValueError(
                f"gradients[{index}] has shape {tuple(gradient.shape)}, but accumulators[{index}] has shape "
                f"{tuple(accumulator.shape)}"
            )
        if gradient.device != accumulator.device:
            raise ValueError(
                f"gradients[{index}] is on {gradient.device}, but accumulators[{index}] is on "
                f"{accumulator.device}"
            )


def check_lists(accumulators: Any, gradients: Any, scale: Any, overwrite: Any) -> None:
    """Run `check_accumulators` and `check_gradients`. Reads no element."""
    check_gradients(accumulators, gradients, scale, overwrite, check_accumulators(accumulators))


def check_product(accumulator: Tensor, left: Tensor, right: Tensor, *offsets: Tensor) -> None:
    """Check the tensors of a product into a sum; with offsets, of grouped products. Messages are those
    of the native operators. No element or address is read.
    """
    sum_dims = 3 if offsets else 2
    _require_place("accumulator", accumulator, sum_dims, accumulator.device)
    _require_place("left", left, 2, accumulator.device)
    _require_place("right", right, 2, accumulator.device)
    for tensor in offsets:
        _require_place("offsets", tensor, 1, accumulator.device)
    _require_operand("left", left, accumulator, accumulator.shape[-2])
    _require_operand("right", right, accumulator, accumulator.shape[-1])
    _require(
        right.dtype == left.dtype,
        f"right has {dtype_name(right.dtype)} but left has {dtype_name(left.dtype)}",
    )
    _require(right.shape[0] == left.shape[0], f"right has {right.shape[0]} rows but left has {left.shape[0]}")
    for tensor in offsets:
        _require(tensor.dtype == torch.int32, f"offsets has {dtype_name(tensor.dtype)}; it must be int32")
        _require(
            tensor.shape[0] == accumulator.shape[0],
            f"offsets has {tensor.shape[0]} elements; it must have {accumulator.shape[0]}, one for each "
            "matrix of accumulator",
        )


def _require(holds: bool, problem: str) -> None:
    torch._check(holds, lambda: f"fusedacc: {problem}")


def _require_place(name: str, tensor: Tensor, dims: int, device: torch.device) -> None:
    _require(tensor.dim() == dims, f"{name} has {tensor.dim()} dimensions; it must have {dims}")
    _require(tensor.device == device, f"{name} is on {tensor.device} but accumulator is on {device}")


def _require_operand(name: str, operand: Tensor, accumulator: Tensor, columns: int) -> None:
    _require(
        (operand.dtype, accumulator.dtype) in PAIRS,
        f"{name} has {dtype_name(operand.dtype)} and accumulator {dtype_name(accumulator.dtype)}; allowed: "
        f"{allowed_pairs()}",
    )
    _require(
        operand.shape[1] == columns,
        f"{name} has shape {list(operand.shape)} but accumulator has {list(accumulator.shape)}",
    )
