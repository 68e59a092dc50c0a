"""Fake implementations of `torch.ops.fusedacc.*`: shapes and errors without data, for torch's compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .checks import check_pairs
from .constants import CHUNK_ELEMENTS, plan_words

# `factors`: what the schema has after the tensors, among it the scale and keep, where these are tensors.


def _scale_accumulate(accumulators: list[Tensor], gradients: list[Tensor], *factors: Any) -> None:
    try:
        check_pairs(accumulators, gradients)
    except (TypeError, ValueError) as problem:
        raise RuntimeError(f"fusedacc: {problem}") from None
    if accumulators:
        _check_not_meta(accumulators[0], gradients, *factors)


def _check_not_meta(first: Tensor, *others: Any) -> None:
    """A meta tensor among real ones brings a call here; without this it would return with nothing done."""
    if first.device.type == "meta":
        return
    for other in others:
        tensors = other if isinstance(other, (list, tuple)) else [other]
        if any(isinstance(tensor, Tensor) and tensor.device.type == "meta" for tensor in tensors):
            raise RuntimeError("fusedacc: a gradient, the scale or keep is on meta")


def _partials(tensors: Sequence[Tensor]) -> Tensor:
    chunks = sum((tensor.numel() + CHUNK_ELEMENTS - 1) // CHUNK_ELEMENTS for tensor in tensors)
    return torch.empty(chunks, dtype=torch.float64, device=tensors[0].device if tensors else "cpu")


def _scale_accumulate_norm(accumulators: list[Tensor], *gradients_and_factors: Any) -> Tensor:
    _scale_accumulate(accumulators, *gradients_and_factors)
    return _partials(accumulators)


def _prepare(accumulators: list[Tensor]) -> Tensor:
    return torch.empty(plan_words(accumulators), dtype=torch.int64, device="cpu")


def _accumulate_prepared_norm(plan: Tensor, gradients: list[Tensor], *factors: Any) -> Tensor:
    _check_not_meta(plan, gradients, *factors)
    return _partials(gradients)


def _norm_partials(tensors: list[Tensor], norm_type: float = 2.0) -> Tensor:
    if tensors:
        _check_not_meta(tensors[0], tensors)
    return _partials(tensors)


def _finish_norm(partials: list[Tensor], norm_type: float = 2.0, wide: bool = False) -> tuple[Tensor, Tensor]:
    device = partials[0].device if partials else "cpu"
    dtype = torch.float64 if wide else torch.float32
    return torch.empty((), dtype=dtype, device=device), torch.empty((), device=device)


def _gemm_accumulate(accumulator: Tensor, left: Tensor, right: Tensor, *factors: Any) -> None:
    torch._check(accumulator.dim() == left.dim() == right.dim() == 2, lambda: "fusedacc: not matrices")
    for size, other in (
        (left.shape[0], right.shape[0]),
        (left.shape[1], accumulator.shape[0]),
        (right.shape[1], accumulator.shape[1]),
    ):
        torch._check(
            size == other,
            lambda: (
                f"fusedacc: left {tuple(left.shape)} and right {tuple(right.shape)} do not go into "
                f"accumulator {tuple(accumulator.shape)}"
            ),
        )
    tensors = [other for other in (left, right, *factors) if isinstance(other, Tensor)]
    if any(tensor.device != accumulator.device for tensor in tensors):
        raise RuntimeError("fusedacc: left, right, offsets, scale or keep is not on the accumulator's device")


def _grouped_accumulate(
    accumulator: Tensor, left: Tensor, right: Tensor, offsets: Tensor, *factors: Any
) -> None:
    torch._check(accumulator.dim() == 3, lambda: "fusedacc: accumulator has not 3 dimensions")
    torch._check(
        offsets.dim() == 1 and offsets.shape[0] == accumulator.shape[0] and offsets.dtype == torch.int32,
        lambda: f"fusedacc: offsets must be int32 of [{accumulator.shape[0]}]",
    )
    # Each expert's matrix has the shape that goes with all rows.
    _gemm_accumulate(accumulator.new_empty(accumulator.shape[1:]), left, right, offsets, *factors)


def _accumulate_rows(table: Tensor, indices: Tensor, gradients: Tensor, *factors: Any) -> None:
    wanted = (indices.shape[0], table.shape[1])
    if gradients.shape != wanted:
        raise RuntimeError(f"fusedacc: gradients has shape {gradients.shape}; it must be {wanted}")
    _check_not_meta(table, indices, gradients, *factors)


_FAKES: dict[str, Callable[..., Any]] = {
    "scale_accumulate_": _scale_accumulate,
    "scale_accumulate_norm_": _scale_accumulate_norm,
    "prepare": _prepare,
    "accumulate_prepared_": _check_not_meta,
    "accumulate_prepared_norm_": _accumulate_prepared_norm,
    "norm_partials": _norm_partials,
    "finish_norm": _finish_norm,
    "gemm_accumulate_": _gemm_accumulate,
    "grouped_accumulate_": _grouped_accumulate,
    "accumulate_rows_": _accumulate_rows,
}


def register() -> None:
    """Give the operators of the library, which is loaded, their fake implementations. Once a process."""
    for name, fake in _FAKES.items():
        torch.library.register_fake(f"fusedacc::{name}", fake)
