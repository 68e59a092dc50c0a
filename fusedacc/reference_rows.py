"""The semantics of sums into the rows of a table in plain torch: the oracle, and the eager backend.

Nothing depends on the data but the data: shapes are those of the indices, so that nothing waits for a device
and a compiler can trace all of it. Gradients are copied in the order of their rows, in the computation's
dtype: temporaries of the gradients' size, none of the table's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference
from .checks import computation_dtype

#: `kRowRun` of csrc/common/row_functors.h: gradients of one row that are summed before their sum is added to
#: others.
RUN = 64


def first_places(rows: Tensor) -> Tensor:
    """For each place of a sorted vector of row numbers, the first place that holds the same row."""
    places = torch.arange(len(rows), device=rows.device)
    new = torch.ones_like(rows, dtype=torch.bool)
    new[1:] = rows[1:] != rows[:-1]
    return torch.where(new, places, 0).cummax(0).values


def _sums(values: Tensor, begins: Tensor) -> Tensor:
    """Sums of stretches of rows, each from the first of its rows to the last, at the place of the first.

    Args:
        values: `[n, columns]`.
        begins: for each row, whether a stretch begins with it; the first one does.
    """
    count = len(values)
    stretch = begins.cumsum(0) - 1
    places = torch.arange(count, device=values.device)
    offsets = places.new_full((count + 1,), count)
    offsets.scatter_reduce_(0, stretch, places, "amin")
    # Unlike `index_add_` it adds in order on every device.
    packed = torch.segment_reduce(values, "sum", offsets=offsets, axis=0, unsafe=True, initial=0)
    return torch.where(begins[:, None], packed[stretch], 0)


def accumulate_rows_(
    table: Tensor, indices: Tensor, gradients: Tensor, scale: float | Tensor, padding: int, by_frequency: bool
) -> None:
    """table[r] <- table[r] + scale * (the sum, or the mean, of the gradients of row r) for each row named.

    Args:
        table: `[rows, columns]`.
        indices: `[n]`, int64 or int32.
        gradients: `[n, columns]`, in a dtype that `checks.PAIRS` pairs with the table's.
        scale: a float, or a 0-dim floating tensor on the table's device.
        padding: a row that takes nothing, or -1.
        by_frequency: whether it is the mean.

    No input is checked here, but for what torch's own operators refuse: a number that is no row raises
    IndexError on a CPU, before anything is written.
    """
    if indices.numel() == 0:
        return
    with torch.no_grad():
        rows, order = torch.sort(indices, stable=True)
        old = table.index_select(0, rows)
        wide = gradients.detach().index_select(0, order).to(computation_dtype(table.dtype))
        places = torch.arange(len(rows), device=rows.device)
        first = first_places(rows)
        runs = (places - first) % RUN == 0
        sums = _sums(_sums(wide, runs), first == places)[first]
        if by_frequency:
            counts = torch.zeros_like(rows, dtype=sums.dtype).scatter_add_(
                0, first, torch.ones_like(rows, dtype=sums.dtype)
            )
            sums /= counts[first][:, None]
        new = old.clone()
        reference.scale_accumulate_([new], [sums], scale, False)
        if padding >= 0:
            new = torch.where((rows == padding)[:, None], old, new)
        # Equal rows are written with equal values.
        table.index_copy_(0, rows.long(), new)
