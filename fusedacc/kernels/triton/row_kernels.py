# mypy: disable-error-code="no-untyped-def"
"""The Triton kernels on the rows of a table: twins of `cuda/device/row_thread.h` and `cuda/rows.cu` of csrc.

Row numbers come sorted, with the place in which each stood. A program takes one place and a block of columns,
and finds out for itself whether a run of gradients begins there. Rows of one run are done in one launch; the
runs of longer rows leave their sums in a table of their own, and a second launch adds these up.
"""

# No `from __future__ import annotations`: Triton reads the annotations.
import triton
import triton.language as tl

from ..constants import ROW_RUN
from .kernels import combine, narrow, widen
from .rounding_kernels import bits_of_row, round_by

_RUN = tl.constexpr(ROW_RUN)


@triton.jit
def first_place(rows, row, high):
    """The first place that does not hold a row below `row`, from 0 to `high`, which holds `row`."""
    low = high * 0
    while low < high:
        middle = low + (high - low) // 2
        below = tl.load(rows + middle) < row
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, middle)
    return low


@triton.jit
def end_of_row(rows, row, low, count):
    """The first place that holds a row above `row`, from `low` on."""
    high = low * 0 + count
    while low < high:
        middle = low + (high - low) // 2
        above = tl.load(rows + middle) > row
        high = tl.where(above, middle, high)
        low = tl.where(above, low, middle + 1)
    return low


@triton.jit
def add_to_row(
    table,
    scale,
    sums,
    count,
    columns,
    inside,
    seed,
    stream,
    first,
    by_frequency: tl.constexpr,
    noisy: tl.constexpr,
    eights: tl.constexpr,
):
    """One row of the table takes the sum, or the mean, of its gradients; `first`, an int64, is the number of
    the first column's element."""
    if by_frequency:
        number = tl.zeros_like(sums) + count.to(sums.dtype)
        # Correctly rounded, which a plain division of float32 is not.
        sums = sums / number if sums.dtype == tl.float64 else tl.div_rn(sums, number)
    s = tl.load(scale).to(sums.dtype)
    old = tl.load(table + columns, mask=inside)
    total = combine(s, sums, 1.0, old, True)
    if noisy:
        new = round_by(total, bits_of_row(seed, stream, first, total, eights))
    else:
        new = narrow(total, old.dtype)
    tl.store(table + columns, new, mask=inside)


@triton.jit(do_not_specialize=["count", "padding", "seed", "stream"])
def add_runs(
    table,
    table_stride,
    table_rows,
    width,
    rows,
    order,
    count,
    gradients,
    gradient_stride,
    scale,
    padding,
    sums,
    sum_stride,
    seed: tl.int64,
    stream: tl.int64,
    wide: tl.constexpr,
    by_frequency: tl.constexpr,
    block: tl.constexpr,
    noisy: tl.constexpr,
    eights: tl.constexpr,
):
    """Each row that is named in one run takes its gradients; the runs of the others leave their sums.

    Args:
        table: the first element of `[table_rows, width]`; strides in elements.
        rows: sorted row numbers, `count` of them.
        order: for each, the number of its gradient.
        padding: a row that takes nothing, or -1.
        sums: of the computation's dtype: two rows, `sum_stride` apart, for every `ROW_RUN` places.
        seed, stream: of the random bits, where it is `noisy`: the table's bfloat16 is rounded stochastically.
        eights: whether `table_stride` is a multiple of 8.
    """
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place).to(tl.int64)
    if (row < 0) | (row >= table_rows) | (row == padding):
        return
    first = place == 0
    if place > 0:
        first = tl.load(rows + place - 1) != row
    begins = first
    far = place >= _RUN
    if (first == 0) & far & (tl.load(rows + place - _RUN, mask=far, other=-1) == row):
        begins = (place - first_place(rows, row, place - _RUN)) % _RUN == 0
    if begins == 0:
        return
    near = place + tl.arange(0, _RUN)
    length = tl.sum((tl.load(rows + near, mask=near < count, other=-1) == row).to(tl.int32), 0)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    position = tl.load(order + place)
    total = widen(tl.load(gradients + position * gradient_stride + columns, mask=inside), wide)
    for step in range(1, length):
        position = tl.load(order + place + step)
        total += widen(tl.load(gradients + position * gradient_stride + columns, mask=inside), wide)
    goes_on = False
    if (length == _RUN) & (place + _RUN < count):
        goes_on = tl.load(rows + place + _RUN) == row
    if first & (goes_on == 0):
        number = row * table_stride + tl.program_id(1) * block
        add_to_row(
            table + row * table_stride,
            scale,
            total,
            length,
            columns,
            inside,
            seed,
            stream,
            number,
            by_frequency,
            noisy,
            eights,
        )
    else:
        slot = 2 * (place // _RUN) + tl.where(first, 0, 1)
        tl.store(sums + slot * sum_stride + columns, total, mask=inside)


@triton.jit(do_not_specialize=["count", "padding", "seed", "stream"])
def add_long_rows(
    table,
    table_stride,
    table_rows,
    width,
    rows,
    count,
    scale,
    padding,
    sums,
    sum_stride,
    seed: tl.int64,
    stream: tl.int64,
    by_frequency: tl.constexpr,
    block: tl.constexpr,
    noisy: tl.constexpr,
    eights: tl.constexpr,
):
    """The row of several runs whose first place is in this program's `ROW_RUN` places, if there is one, takes
    their sums. Arguments as for `add_runs`; a program for every whole `ROW_RUN` places."""
    stretch = tl.program_id(0).to(tl.int64)
    last = (stretch + 1) * _RUN - 1
    row = tl.load(rows + last).to(tl.int64)
    if (row < 0) | (row >= table_rows) | (row == padding):
        return
    begin = first_place(rows, row, last)
    if (begin < stretch * _RUN) | (begin + _RUN >= count):
        return
    if tl.load(rows + begin + _RUN) != row:
        return
    end = end_of_row(rows, row, begin + _RUN, count)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    total = tl.load(sums + 2 * stretch * sum_stride + columns, mask=inside)
    for place in range(begin + _RUN, end, _RUN):
        slot = 2 * (place // _RUN) + 1
        total += tl.load(sums + slot * sum_stride + columns, mask=inside)
    number = row * table_stride + tl.program_id(1) * block
    add_to_row(
        table + row * table_stride,
        scale,
        total,
        end - begin,
        columns,
        inside,
        seed,
        stream,
        number,
        by_frequency,
        noisy,
        eights,
    )
