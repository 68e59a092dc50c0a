"""Sums into the rows of a table by Triton: torch sorts, one launch or two do the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import launch_events
from ..constants import ROW_RUN
from ..dtypes import computation_dtype
from ..rounding import BLOCK, Noise
from . import address_table as shared

#: Columns of one program, at most: 8 for each thread.
_MOST_COLUMNS = 1024
_FEWEST_COLUMNS = 128


def accumulate_rows_(
    table: Tensor,
    indices: Tensor,
    gradients: Tensor,
    scale: float | Tensor,
    padding: int,
    by_frequency: bool,
    noise: Noise | None = None,
) -> None:
    """As `registry.Backend.accumulate_rows_`."""
    from . import row_kernels as kernels

    if table.shape[1] > 1 and table.stride(1) != 1:
        raise RuntimeError(f"table has stride {table.stride(1)} in its second dimension; it must be 1")
    count, width = gradients.shape
    if count == 0 or width == 0:
        return
    wide = computation_dtype(table.dtype)
    rows, order = torch.sort(indices, stable=True)
    # A number goes to the device as an argument of a fill, not as a copy that would be waited for.
    factor = scale if isinstance(scale, Tensor) else torch.full((), scale, dtype=wide, device=table.device)
    stride = (width + 7) // 8 * 8
    stretches = -(-count // ROW_RUN)
    sums = torch.empty(2 * stretches * stride if count > ROW_RUN else 0, dtype=wide, device=table.device)
    next_power_of_two = 1 << (width - 1).bit_length()
    block = min(max(next_power_of_two, _FEWEST_COLUMNS), _MOST_COLUMNS)
    across = -(-width // block)
    seed, stream = (0, 0) if noise is None else (noise.seed, noise.streams[0])
    rounding = {"noisy": noise is not None, "eights": noise is not None and table.stride(0) % BLOCK == 0}
    common = {"by_frequency": by_frequency, "block": block, "num_warps": shared.kernels().WARPS, **rounding}
    where = table.detach(), table.stride(0), table.shape[0], width, rows
    with shared.on_device(table.device):
        kernels.add_runs[(count, across)](
            *where,
            order,
            count,
            gradients,
            gradients.stride(0),
            factor,
            padding,
            sums,
            stride,
            seed,
            stream,
            wide=shared.triton_dtype(wide),
            **common,
        )
        if count > ROW_RUN:
            kernels.add_long_rows[(count // ROW_RUN, across)](
                *where, count, factor, padding, sums, stride, seed, stream, **common
            )
    if launch_events.watching:
        launch_events.launched("triton::add_rows", table, indices, gradients, scale, padding)
