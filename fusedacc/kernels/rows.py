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
    """Return the backend that takes such gradients into this table, and why; errors as `registry.select`."""
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
    float32 (float64 for a float64 table). One fused multiply-add takes the sum into the row, which is rounded
    once. Autograd does not record it; the table's version is bumped.

    Arguments are those of an embedding's backward. They are not checked here: the native operator refuses
    unsafe ones before anything is modified, and torch's operators refuse what they cannot do. If the elements
    of a row are not contiguous, "auto" is plain torch, and no other backend can run; such gradients are
    copied. On a GPU a number that is no row is skipped (eager: torch asserts on the device). noise: random
    bits of one stream, to round rows of bfloat16 stochastically.
    """
    chosen = select(table, gradients.dtype, backend).backend
    padding = -1 if padding_idx is None else padding_idx % table.shape[0]
    columns, flat = table.shape[1], indices.reshape(-1)
    fresh = gradients.detach().reshape(flat.shape[0], columns)
    if columns > 1 and fresh.stride(1) != 1:
        fresh = fresh.contiguous()
    chosen.accumulate_rows_(table, flat, fresh, scale, padding, scale_grad_by_freq, noise)
    bump_versions([table])
