"""Sums into the rows of a table, as an embedding's backward adds them.

Only named rows are touched, and nothing of the table's size is allocated. Gradients of one row are summed
first, in their order; then the row is read and written once. Deterministic on every device: a stable sort, no
atomics.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks, registry
from .lists import bump_versions
from .rounding import Noise


def select(table: Tensor, gradient_dtype: torch.dtype, backend: str = "auto") -> registry.Selection:
    """The backend that takes such gradients into this table, and why.

    Raises:
        ValueError, RuntimeError: as `registry.select`.
    """
    dense = table.shape[1] <= 1 or table.stride(1) == 1
    if not (checks.is_plain(table) and dense) and registry.requested(backend)[0] == "auto":
        why = "plain torch: the elements of a row do not lie side by side, or it is no ordinary tensor"
        return registry.Selection(registry.get("eager"), why)
    return registry.select(table.device, table.dtype, gradient_dtype, backend)


def accumulate_rows_(
    table: Tensor,
    indices: Tensor,
    gradients: Tensor,
    scale: float | Tensor = 1.0,
    *,
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
    backend: str = "auto",
    noise: Noise | None = None,
) -> None:
    """table[r] <- table[r] + scale * (the sum of the gradients of row r), for each row that is named.

    A row's gradients are added in runs of 64, and then the runs' sums, in the order of the indices, in
    float32 (float64 for a float64 table); one fused multiply-add takes the sum into the row, which is rounded
    once to the table's dtype. Not recorded by autograd; the table's version is bumped.

    Arguments are those of an embedding's backward, and not looked at here: the native operator refuses what
    would not be safe, before anything is modified, and torch's own operators what they cannot do.

    Args:
        table: `[rows, columns]`, modified in place; rows do not overlap. Where the elements of a row do not
            lie side by side, "auto" is plain torch, and no other backend can run.
        indices: the rows, int64 or int32, of any shape. On a GPU, where it would take a synchronisation to
            know, a number that is no row is passed over (eager: torch's own assertion on the device).
        gradients: `indices.shape + (columns,)`, any strides, sharing no memory with the table; dtype pairs as
            in `dtypes.PAIRS`. Copied where the elements of a row do not lie side by side.
        scale: a float, or a 0-dim floating tensor on the table's device, read there without a
            synchronisation.
        padding_idx: a row that takes nothing, from -rows to rows - 1, or None.
        scale_grad_by_freq: whether a row takes the mean of its gradients instead of their sum.
        backend: "auto", "cuda", "triton", "cpu" or "eager", as for `functional.scale_accumulate_`.
        noise: random bits of one stream: rows of bfloat16 are rounded stochastically.

    Raises:
        ValueError: there is no such backend.
        RuntimeError: the backend that was asked for cannot run here, or refuses an argument.
        IndexError: by plain torch on a CPU, an index is no row.
    """
    chosen = select(table, gradients.dtype, backend).backend
    padding = -1 if padding_idx is None else padding_idx % table.shape[0]
    columns, flat = table.shape[1], indices.reshape(-1)
    fresh = gradients.detach().reshape(flat.shape[0], columns)
    if columns > 1 and fresh.stride(1) != 1:
        fresh = fresh.contiguous()
    chosen.accumulate_rows_(table, flat, fresh, scale, padding, scale_grad_by_freq, noise)
    bump_versions([table])
