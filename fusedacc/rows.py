"""Sums into the rows of a table: what the backward of an embedding adds, and nothing of the table's size.

The work is that of the rows named, whatever the table's height. Where a row is named several times its
gradients are summed first, in the order in which they come, and the table's row is read and written once.
Deterministic on every device: a stable sort, no atomics.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import backends, checks, reference_rows
from .plan import bump_versions, traced_backend

__all__ = ["accumulate_rows_", "select"]

_INDEX_DTYPES = (torch.int64, torch.int32)


def select(table: Tensor, gradient_dtype: torch.dtype, backend: str = "auto") -> backends.Selection:
    """The backend that takes such gradients into this table, and why.

    Raises:
        ValueError, RuntimeError: as `backends.select`.
    """
    if not (checks.is_plain(table) and _has_dense_rows(table)) and backends.requested(backend)[0] == "auto":
        why = "plain torch: the elements of a row do not lie side by side, or it is no ordinary tensor"
        return backends.Selection(backends.get("eager"), why)
    return backends.select(table.device, table.dtype, gradient_dtype, backend)


def accumulate_rows_(
    table: Tensor,
    indices: Tensor,
    gradients: Tensor,
    scale: float | Tensor = 1.0,
    *,
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
    backend: str = "auto",
) -> None:
    """table[r] <- table[r] + scale * (the sum of the gradients of row r), for each row that is named.

    A row's gradients are added in runs of 64, and then the runs' sums, in the order of the indices, in
    float32 (float64 for a float64 table); one fused multiply-add takes the sum into the row, which is rounded
    once to the table's dtype. Not recorded by autograd; the table's version is bumped.

    Args:
        table: `[rows, columns]`, modified in place; rows do not overlap. Where the elements of a row do not
            lie side by side, "auto" is plain torch, and no other backend can run.
        indices: the rows, int64 or int32, of any shape.
        gradients: `indices.shape + (columns,)`, any strides, sharing no memory with the table; dtype pairs as
            in `checks.PAIRS`. Copied where the elements of a row do not lie side by side.
        scale: a float, or a 0-dim floating tensor on the table's device, read there without a
            synchronisation.
        padding_idx: a row that takes nothing, from -rows to rows - 1, or None.
        scale_grad_by_freq: whether a row takes the mean of its gradients instead of their sum.
        backend: "auto", "cuda", "triton", "cpu" or "eager", as for `functional.scale_accumulate_`.

    Raises:
        IndexError: on a CPU, an index is no row. On a GPU, where it would take a synchronisation to know,
            such an index is passed over (eager: torch's own assertion on the device).
        TypeError: something is no dense tensor, or of a dtype that is not supported; scale is of the wrong
            kind.
        ValueError: shapes or devices do not match, memory overlaps, `padding_idx` is no row, or there is no
            such backend.
        RuntimeError: the backend that was asked for cannot run here.
        Nothing is modified when one of these is raised.
    """
    if torch.compiler.is_compiling():
        _traced(table, indices, gradients, scale, padding_idx, scale_grad_by_freq, backend)
        return
    chosen, checked = None, False
    try:
        chosen = select(table, gradients.dtype, backend).backend
        if chosen.name not in backends.SELF_CHECKING:
            _check(table, indices, gradients, scale, padding_idx)
            checked = True
        chosen.accumulate_rows_(
            table, *_flat(table, indices, gradients), scale, _padding(table, padding_idx), scale_grad_by_freq
        )
    except Exception:
        if not checked:
            _check(table, indices, gradients, scale, padding_idx)
        raise
    bump_versions([table])


def _traced(
    table: Tensor,
    indices: Tensor,
    gradients: Tensor,
    scale: float | Tensor,
    padding_idx: int | None,
    by_frequency: bool,
    backend: str,
) -> None:
    """The graph under `torch.compile`: one operator, or plain torch for the compiler to fuse."""
    flat, fresh = _flat(table, indices, gradients)
    padding = _padding(table, padding_idx)
    wanted = backend if _has_dense_rows(table) or backend != "auto" else "eager"
    if traced_backend(table.device, table.dtype, gradients.dtype, wanted) in backends.SELF_CHECKING:
        tensor_scale = scale if isinstance(scale, Tensor) else None
        number = 1.0 if isinstance(scale, Tensor) else float(scale)
        torch.ops.fusedacc.accumulate_rows_(table, flat, fresh, tensor_scale, number, padding, by_frequency)
    else:
        reference_rows.accumulate_rows_(table, flat, fresh, scale, padding, by_frequency)


def _has_dense_rows(table: Tensor) -> bool:
    return table.dim() != 2 or table.shape[1] <= 1 or table.stride(1) == 1


def _flat(table: Tensor, indices: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Indices `[n]`, and gradients `[n, columns]` whose rows have their elements side by side."""
    columns = table.shape[1]
    if gradients.shape != (*indices.shape, columns):
        wanted = (*indices.shape, columns)
        raise ValueError(f"gradients has shape {tuple(gradients.shape)}; it must be {wanted}")
    flat = indices.reshape(-1)
    fresh = gradients.detach().reshape(flat.shape[0], columns)
    if columns > 1 and fresh.stride(1) != 1:
        fresh = fresh.contiguous()
    return flat, fresh


def _padding(table: Tensor, padding_idx: int | None) -> int:
    """The padding row counted from the top, or -1 for none."""
    if padding_idx is None:
        return -1
    if isinstance(padding_idx, bool) or not isinstance(padding_idx, int):
        raise TypeError(f"padding_idx is {padding_idx!r}; allowed: an int or None")
    rows = table.shape[0]
    if not -rows <= padding_idx < rows:
        raise ValueError(f"padding_idx is {padding_idx}; allowed: None, or {-rows} to {rows - 1}")
    return padding_idx % rows


def _check_matrix(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is {type(tensor).__name__}, not a tensor")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} is sparse ({str(tensor.layout)[6:]}); only dense tensors can be used")


def _check_rows(table: Any, indices: Any) -> None:
    """Raise unless these are a table and rows of it. Reads the indices of a CPU."""
    _check_matrix("table", table)
    checks.check_tensors([table])
    if table.dim() != 2:
        raise ValueError(f"table has shape {tuple(table.shape)}; it must have two dimensions")
    if checks.overlaps_itself(table):
        raise ValueError(f"table overlaps itself: shape {tuple(table.shape)}, strides {table.stride()}")
    _check_matrix("indices", indices)
    if indices.dtype not in _INDEX_DTYPES:
        raise TypeError(f"indices is {indices.dtype}; allowed: int64, int32")
    if indices.device != table.device:
        raise ValueError(f"indices is on {indices.device}, but table is on {table.device}")
    if indices.device.type == "cpu" and checks.is_plain(indices) and indices.numel() > 0:
        rows = table.shape[0]
        flat = indices.reshape(-1)
        outside = ((flat < 0) | (flat >= rows)).nonzero()
        if len(outside):
            place = int(outside[0])
            raise IndexError(f"indices holds {int(flat[place])} (element {place}); allowed: 0 to {rows - 1}")


def _check(table: Any, indices: Any, gradients: Any, scale: Any, padding_idx: Any) -> None:
    """Raise what `accumulate_rows_` may raise of its arguments."""
    _check_rows(table, indices)
    _check_matrix("gradients", gradients)
    if (gradients.dtype, table.dtype) not in checks.PAIRS:
        raise TypeError(
            f"gradients is {gradients.dtype} and table is {table.dtype}; allowed: {checks.allowed_pairs()}"
        )
    _flat(table, indices, gradients)
    if gradients.device != table.device:
        raise ValueError(f"gradients is on {gradients.device}, but table is on {table.device}")
    if checks.is_plain(table) and checks.is_plain(gradients):
        (begin, end), (first, last) = checks.memory_range(table), checks.memory_range(gradients)
        if begin < last and first < end:
            raise ValueError("gradients shares memory with table; they must not overlap")
    checks.check_scale(scale, [table])
    _padding(table, padding_idx)
