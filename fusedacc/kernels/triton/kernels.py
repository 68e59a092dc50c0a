# mypy: disable-error-code="no-untyped-def"
"""The Triton kernels on lists, over a table of addresses, on the rows of a table, and on experts' products.

Their arithmetic mirrors `csrc/common/functors.h` (`widen`, `narrow`, an explicit fused multiply-add) and
`csrc/common/norm_functors.h`. Set `TRITON_INTERPRET=1` before the import to run them on CPU tensors.
"""

# No `from __future__ import annotations`: Triton reads the annotations.
import torch
import triton
import triton.language as tl
from triton import knobs

from ..constants import ROW_RUN
from ..rounding import ROUNDS

#: Elements per program, a multiple of `BLOCK`.
CHUNK = 16384
#: Elements of one step of a norm's loop: 8 per thread, 16 bytes of a 16-bit dtype.
BLOCK = 1024
WARPS = 4
#: Options of the launch that adds. The compiler minimizes registers, and so waits for the first loads before
#: it issues the others, unless it is given a number: with 64 per thread a multiprocessor still holds eight
#: programs.
ADDING = {"num_warps": WARPS} | ({"maxnreg": 64} if torch.version.hip is None else {})
#: Partial norms that one program reads, at most.
MOST_PARTIALS = 32768
#: Bits of a tensor's flags in the table.
OVERWRITE = 1
MISALIGNED = 2

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
_BLOCK = tl.constexpr(BLOCK)
_CHUNK = tl.constexpr(CHUNK)
_THREADS = tl.constexpr(32 * WARPS)
_OVERWRITE = tl.constexpr(OVERWRITE)
_MISALIGNED = tl.constexpr(MISALIGNED)


@triton.jit
def widen(value, wide: tl.constexpr):
    if INTERPRETED and value.dtype == tl.bfloat16:
        # The hardware's conversion is exact; the interpreter's is wrong for subnormal numbers.
        bits = value.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True).to(wide)
    return value.to(wide)


@triton.jit
def narrow(value, dtype: tl.constexpr):
    """Round to nearest, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        # The hardware's conversion rounds; the interpreter's truncates.
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        kept = tl.where(value == value, rounded, (bits >> 16) | 0x40)
        return kept.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return value.to(dtype)


@triton.jit
def combine(scale, gradient, beta, accumulator, adds):
    """scale * gradient, plus the rounded beta * accumulator if it adds, in the dtype of `scale`."""
    wide: tl.constexpr = scale.dtype
    wide_gradient = widen(gradient, wide)
    total = tl.fma(scale, wide_gradient, beta * widen(accumulator, wide))
    # Not an fma with 0: it would turn a product of -0 into +0.
    return tl.where(adds, total, scale * wide_gradient)


@triton.jit
def new_sum(scale, gradient, beta, accumulator, adds, seed, stream, first, noisy: tl.constexpr):
    """`combine`, rounded to the accumulator's dtype: to nearest, or stochastically if `noisy`.

    The elements are those from number `first` on. With noise, `first` and their number are multiples of 8,
    because eight elements share a block of random bits.
    """
    value = combine(scale, gradient, beta, accumulator, adds)
    if noisy:
        blocks = (first >> 3) + tl.arange(0, value.shape[0] // 8)
        return round_by(value, bits_of_blocks(seed, stream, blocks, value))
    return narrow(value, accumulator.dtype)


# What `scale_accumulate` relies on:
#
# - The programs of a tensor are consecutive. Each has CHUNK elements, and the tensor's last one the rest.
# - CHUNK is a multiple of the elements of every step, and of 8. So only a tensor's last program has a tail,
#   a program starts at a multiple of 16 bytes where its tensor does, and no two share a block of random bits.
# - Without the flag MISALIGNED, a tensor's accumulator and gradient both start at multiples of 16 bytes.
# - A gradient may be its own accumulator: a step loads its elements before it stores them, and no other step
#   has them.


@triton.jit(do_not_specialize=["count", "scale", "beta"])
def scale_accumulate(
    table,
    calls,
    scale,
    beta,
    count,
    accumulator_dtype: tl.constexpr,
    gradient_dtype: tl.constexpr,
    wide: tl.constexpr,
    noisy: tl.constexpr,
):
    """accumulator <- beta * accumulator + scale * gradient, or scale * gradient, for dense tensors.

    Args:
        table: int64. For each of `count` tensors: its accumulator's address, elements, first program; then,
            for each program, the index of its tensor.
        calls: int64. For each tensor: its gradient's address and flags; two words that are not read here; if
            `noisy`, the seed and each tensor's stream.
        scale, beta: pointers to one floating value each, of any width.
        noisy: whether sums, of bfloat16, are rounded stochastically.
    """
    program = tl.program_id(0)
    tensor = tl.load(table + 3 * count.to(tl.int64) + program)
    address = tl.load(table + 3 * tensor)
    size = tl.load(table + 3 * tensor + 1)
    first_program = tl.load(table + 3 * tensor + 2)
    gradient_address = tl.load(calls + 2 * tensor)
    flags = tl.load(calls + 2 * tensor + 1)
    by = tl.load(scale).to(wide)
    beta_value = tl.load(beta).to(wide)
    start = (program - first_program) * _CHUNK
    length = tl.minimum(size - start, _CHUNK).to(tl.int32)
    accumulator = address.to(tl.pointer_type(accumulator_dtype)) + start
    gradient = gradient_address.to(tl.pointer_type(gradient_dtype)) + start
    adds = (flags & _OVERWRITE) == 0
    seed = 0
    stream = 0
    if noisy:
        noise = calls + 2 * count.to(tl.int64) + 2
        seed = tl.load(noise)
        stream = tl.load(noise + 1 + tensor)

    # A step is 16 bytes of the wider side per thread: with more, neighbouring threads would write to memory
    # with gaps between them. The loads of four steps are issued before the first is used.
    gradient_bits: tl.constexpr = gradient_dtype.primitive_bitwidth
    accumulator_bits: tl.constexpr = accumulator_dtype.primitive_bitwidth
    bits: tl.constexpr = accumulator_bits if gradient_bits < accumulator_bits else gradient_bits
    # With noise a thread handles the eight elements that share random bits.
    step_size: tl.constexpr = 8 * _THREADS if noisy else _THREADS * 128 // bits
    end_of_steps = 0
    if (flags & _MISALIGNED) == 0:
        # The hint must follow the cast from an integer, which would drop it.
        accumulator16 = tl.multiple_of(accumulator, 16)
        gradient16 = tl.multiple_of(gradient, 16)
        lanes = tl.arange(0, step_size)
        end_of_fours = length // (4 * step_size) * (4 * step_size)
        for done in range(0, end_of_fours, 4 * step_size):
            into = accumulator16 + tl.multiple_of(done, 4 * step_size) + lanes
            read = gradient16 + tl.multiple_of(done, 4 * step_size) + lanes
            g0 = tl.load(read)
            g1 = tl.load(read + step_size)
            g2 = tl.load(read + 2 * step_size)
            g3 = tl.load(read + 3 * step_size)
            a0 = tl.load(into, mask=adds, other=0.0)
            a1 = tl.load(into + step_size, mask=adds, other=0.0)
            a2 = tl.load(into + 2 * step_size, mask=adds, other=0.0)
            a3 = tl.load(into + 3 * step_size, mask=adds, other=0.0)
            number = start + done
            tl.store(into, new_sum(by, g0, beta_value, a0, adds, seed, stream, number, noisy))
            number += step_size
            tl.store(into + step_size, new_sum(by, g1, beta_value, a1, adds, seed, stream, number, noisy))
            number += step_size
            tl.store(into + 2 * step_size, new_sum(by, g2, beta_value, a2, adds, seed, stream, number, noisy))
            number += step_size
            tl.store(into + 3 * step_size, new_sum(by, g3, beta_value, a3, adds, seed, stream, number, noisy))
        end_of_steps = length // step_size * step_size
        for done in range(end_of_fours, end_of_steps, step_size):
            into = accumulator16 + tl.multiple_of(done, step_size) + lanes
            g = tl.load(gradient16 + tl.multiple_of(done, step_size) + lanes)
            a = tl.load(into, mask=adds, other=0.0)
            tl.store(into, new_sum(by, g, beta_value, a, adds, seed, stream, start + done, noisy))

    # Tails and misaligned tensors: one element per thread, eight with noise.
    tail_size: tl.constexpr = step_size if noisy else _THREADS
    lane = tl.arange(0, tail_size)
    for done in range(end_of_steps, length, tail_size):
        inside = done + lane < length
        g = tl.load(gradient + done + lane, mask=inside)
        a = tl.load(accumulator + done + lane, mask=inside & adds, other=0.0)
        sums = new_sum(by, g, beta_value, a, adds, seed, stream, start + done, noisy)
        tl.store(accumulator + done + lane, sums, mask=inside)


@triton.jit
def _state(elements, length, aligned, scale, largest: tl.constexpr, wide: tl.constexpr):
    """The sum of the squares of scale * element over a chunk, or the bits of the largest magnitude.

    Element i is in lane i % BLOCK, however the chunk is aligned.
    """
    bits: tl.constexpr = tl.int64 if wide == tl.float64 else tl.int32
    magnitude: tl.constexpr = 0x7FFFFFFFFFFFFFFF if wide == tl.float64 else 0x7FFFFFFF
    state = tl.zeros([_BLOCK], bits if largest else wide)
    lanes = tl.arange(0, _BLOCK)
    end_of_blocks = 0
    if aligned:
        end_of_blocks = length // _BLOCK * _BLOCK
        for done in range(0, end_of_blocks, _BLOCK):
            # The hint must be on the sum: on a function's argument it is lost by inlining.
            pointers = tl.max_contiguous(tl.multiple_of(elements + done + lanes, 16), _BLOCK)
            value = widen(tl.load(pointers), wide)
            if largest:
                state = tl.maximum(state, value.to(bits, bitcast=True) & magnitude)
            else:
                value = value * scale
                state += value * value
    for done in range(end_of_blocks, length, _BLOCK):
        value = widen(tl.load(elements + done + lanes, mask=done + lanes < length, other=0.0), wide)
        if largest:
            state = tl.maximum(state, value.to(bits, bitcast=True) & magnitude)
        else:
            value = value * scale
            state += value * value
    if largest:
        return tl.max(state, 0)
    return tl.sum(state, 0)


@triton.jit
def _norm(elements, length, aligned, infinity: tl.constexpr, wide: tl.constexpr):
    """A chunk's norm in float64. It is finite unless an element is not."""
    double: tl.constexpr = wide == tl.float64
    least: tl.constexpr = 2.0**-1000 if double else 2.0**-110
    most: tl.constexpr = 1.7976931348623157e308 if double else 3.4028234663852886e38
    one = tl.full([], 1.0, wide)
    if infinity:
        return _state(elements, length, aligned, one, True, wide).to(wide, bitcast=True).to(tl.float64)
    plain = _state(elements, length, aligned, one, False, wide)
    norm = tl.sqrt(plain.to(tl.float64))
    if (plain >= least) & (plain <= most):
        pass
    else:
        # Squares may have overflowed or underflowed, or an element is nan. Repeat, scaled by a power of two
        # that brings the largest magnitude near 1.
        bits = _state(elements, length, aligned, one, True, wide)
        norm = bits.to(wide, bitcast=True).to(tl.float64)
        if (norm > 0) & (norm <= most):
            if double:
                scale = (2046 - tl.minimum(tl.maximum(bits >> 52, 1), 2045)) << 52
            else:
                scale = (254 - tl.minimum(tl.maximum(bits >> 23, 1), 253)) << 23
            factor = scale.to(wide, bitcast=True)
            total = _state(elements, length, aligned, factor, False, wide)
            norm = tl.sqrt(total.to(tl.float64)) / factor.to(tl.float64)
            # Infinity would mean that an element is not finite.
            norm = tl.minimum(norm, 1.7976931348623157e308)
    return norm


@triton.jit(do_not_specialize=["count"])
def norm_partials(table, partials, count, dtype: tl.constexpr, wide: tl.constexpr, infinity: tl.constexpr):
    """One partial norm (float64) per program, over dense tensors; `table` as for `scale_accumulate`."""
    program = tl.program_id(0)
    tensor = tl.load(table + 3 * count.to(tl.int64) + program)
    address = tl.load(table + 3 * tensor)
    size = tl.load(table + 3 * tensor + 1)
    first_program = tl.load(table + 3 * tensor + 2)
    start = (program - first_program) * _CHUNK
    length = tl.minimum(size - start, _CHUNK).to(tl.int32)
    elements = address.to(tl.pointer_type(dtype)) + start
    norm = _norm(elements, length, address % 16 == 0, infinity, wide)
    tl.store(partials + program, norm)


@triton.jit(do_not_specialize=["count"])
def join_partials(partials, count, joined, infinity: tl.constexpr):
    """Partial norms (float64) of partial norms, one per program. `partials` are aligned to 16 bytes."""
    start = tl.program_id(0).to(tl.int64) * _CHUNK
    length = tl.minimum(count.to(tl.int64) - start, _CHUNK).to(tl.int32)
    tl.store(joined + tl.program_id(0), _norm(partials + start, length, True, infinity, tl.float64))


@triton.jit(do_not_specialize=["count"])
def finish_norm(partials, count, norm, not_finite, infinity: tl.constexpr):
    """One program: `norm` gets the norm of all partials, in its dtype; `not_finite` gets 1 if one is not
    finite, else 0. The partials are float64, aligned to 16 bytes.
    """
    value = _norm(partials, count, True, infinity, tl.float64)
    tl.store(norm, value.to(norm.dtype.element_ty))
    tl.store(not_finite, tl.where(value <= 1.7976931348623157e308, 0.0, 1.0))


# Stochastic rounding: the twin of `kernels.rounding`.

_ROUNDS = tl.constexpr(ROUNDS)


@triton.jit
def words(seed, stream, blocks):
    """Four words of random bits for each block of eight elements; block numbers are int64.

    Triton's own Philox multiplies twice, once for each half of a product.
    """
    seed = seed.to(tl.int64)  # interpreted, a small number comes as an int32
    stream = stream.to(tl.int64)
    x = seed.to(tl.uint32)
    y = (seed >> 32).to(tl.uint32)
    a = blocks.to(tl.uint32)
    b = (blocks >> 32).to(tl.uint32)
    c = stream.to(tl.uint32)
    d = (stream >> 32).to(tl.uint32)
    for _ in tl.static_range(_ROUNDS):
        p = a.to(tl.uint64) * 0xD2511F53
        q = c.to(tl.uint64) * 0xCD9E8D57
        a = (q >> 32).to(tl.uint32) ^ b ^ x
        b = q.to(tl.uint32)
        c = (p >> 32).to(tl.uint32) ^ d ^ y
        d = p.to(tl.uint32)
        x += 0x9E3779B9
        y += 0xBB67AE85
    return a, b, c, d


@triton.jit
def bits_of_blocks(seed, stream, blocks, like):
    """16 random bits for each element of `like`, a vector that consists of these blocks."""
    w0, w1, w2, w3 = words(seed, stream, blocks)
    both = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(tl.join(both & 0xFFFF, both >> 16), like.shape)


@triton.jit
def round_by(value, bits):
    """float32 to bfloat16."""
    pattern = value.to(tl.uint32, bitcast=True)
    magnitude = pattern & 0x7FFFFFFF
    noisy = tl.where(magnitude < 0x7F7F0000, pattern + bits, pattern)
    kept = tl.where(magnitude > 0x7F800000, pattern | 0x400000, noisy)
    return (kept >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


# The rows of a table.
#
# Row numbers are sorted; `order` has their former places. So the gradients of one row have consecutive
# places. They are added in runs of ROW_RUN, the last of which may be shorter. A program takes one place and a
# block of columns, and does nothing unless a run begins at its place. Rows with one run are finished in one
# launch. A longer row has several programs, none of which writes to the row: each stores its run's sum in a
# separate table, and a second launch adds these up.
#
# The table of sums has two rows for every ROW_RUN places, one for a first run of a longer row and one for a
# later run. That is enough: a first run of a longer row reaches the end of these places, and the runs of one
# row are ROW_RUN apart.

_RUN = tl.constexpr(ROW_RUN)


@triton.jit
def first_place(rows, row, low, high):
    """The first of the places [low, high) that holds `row` or a row above it; `high` if none does."""
    while low < high:
        middle = low + (high - low) // 2
        below = tl.load(rows + middle) < row
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, middle)
    return low


@triton.jit
def add_to_row(
    table,
    scale,
    sums,
    count,
    columns,
    inside,
    by_frequency: tl.constexpr,
):
    """Add the sum, or the mean, of its gradients to one row, which begins at `table`."""
    if by_frequency:
        number = tl.zeros_like(sums) + count.to(sums.dtype)
        # Correctly rounded, which a plain division of float32 is not.
        sums = sums / number if sums.dtype == tl.float64 else tl.div_rn(sums, number)
    by = tl.load(scale).to(sums.dtype)
    old = tl.load(table + columns, mask=inside)
    total = combine(by, sums, 1.0, old, True)
    tl.store(table + columns, narrow(total, old.dtype), mask=inside)


@triton.jit(do_not_specialize=["count", "padding"])
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
    wide: tl.constexpr,
    by_frequency: tl.constexpr,
    block: tl.constexpr,
):
    """Add the gradients of each row that has one run; the runs of longer rows store their sums.

    Args:
        table: the first element of `[table_rows, width]`; strides in elements.
        rows: sorted row numbers, `count` of them.
        order: for each, the number of its gradient.
        padding: a row that takes nothing, or -1.
        sums: of the computation's dtype: two rows, `sum_stride` apart, for every `ROW_RUN` places.
    """
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place).to(tl.int64)
    if (row < 0) | (row >= table_rows) | (row == padding):
        return
    begins_row = place == 0
    if place > 0:
        begins_row = tl.load(rows + place - 1) != row
    begins_run = begins_row
    # A later run of the row can begin here only if the place ROW_RUN before has the same row.
    has_before = place >= _RUN
    if (begins_row == 0) & has_before & (tl.load(rows + place - _RUN, mask=has_before, other=-1) == row):
        start_of_row = first_place(rows, row, place * 0, place - _RUN)  # a zero of int64
        begins_run = (place - start_of_row) % _RUN == 0
    if begins_run == 0:
        return
    places = place + tl.arange(0, _RUN)
    length = tl.sum((tl.load(rows + places, mask=places < count, other=-1) == row).to(tl.int32), 0)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    position = tl.load(order + place)
    total = widen(tl.load(gradients + position * gradient_stride + columns, mask=inside), wide)
    for step in range(1, length):
        position = tl.load(order + place + step)
        total += widen(tl.load(gradients + position * gradient_stride + columns, mask=inside), wide)
    has_next_run = False
    if (length == _RUN) & (place + _RUN < count):
        has_next_run = tl.load(rows + place + _RUN) == row
    if begins_row & (has_next_run == 0):
        add_to_row(table + row * table_stride, scale, total, length, columns, inside, by_frequency)
    else:
        slot = 2 * (place // _RUN) + tl.where(begins_row, 0, 1)
        tl.store(sums + slot * sum_stride + columns, total, mask=inside)


@triton.jit(do_not_specialize=["count", "padding"])
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
    by_frequency: tl.constexpr,
    block: tl.constexpr,
):
    """Add the runs' sums to the row whose first of several runs begins in this program's `ROW_RUN` places.

    Arguments as for `add_runs`; a program for every whole `ROW_RUN` places.
    """
    stretch = tl.program_id(0).to(tl.int64)
    last = (stretch + 1) * _RUN - 1
    row = tl.load(rows + last).to(tl.int64)
    if (row < 0) | (row >= table_rows) | (row == padding):
        return
    begin = first_place(rows, row, last * 0, last)
    if (begin < stretch * _RUN) | (begin + _RUN >= count):
        return
    if tl.load(rows + begin + _RUN) != row:
        return
    end = first_place(rows, row + 1, begin + _RUN, begin * 0 + count)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    total = tl.load(sums + 2 * stretch * sum_stride + columns, mask=inside)
    for place in range(begin + _RUN, end, _RUN):
        slot = 2 * (place // _RUN) + 1
        total += tl.load(sums + slot * sum_stride + columns, mask=inside)
    add_to_row(table + row * table_stride, scale, total, end - begin, columns, inside, by_frequency)


# The product of groups of rows into separate matrices: gradients of a layer of experts.
#
# A program computes one tile of one expert's matrix over all of the expert's rows, so there are no atomics
# and bits repeat. The grid depends on shapes only. Programs are numbered expert by expert, so that concurrent
# ones read the same rows, and within an expert in bands of tiles, so that they read few columns. Persistent
# programs would save the start of each, but would fix the schedule: where an expert has few rows, its
# programs end early and others take their place. The sum is loaded before the products, which hide the
# latency, in a layout with 16 bytes per thread. The tensor cores' results are converted to that layout once,
# at the end.

#: Rows and columns of a tile, tokens per step, and warps, by the bytes of an operand's element. With 16 bits,
#: 32 tokens leave a Hopper multiprocessor four programs, as 16 do, with half the barriers. float32 without
#: tensor cores would spill registers with four warps.
TILES = {2: (64, 64, 32, 4), 4: (64, 64, 16, 8), 8: (32, 32, 16, 4)}
#: Rows of tiles per band.
_BAND = tl.constexpr(16)


@triton.jit
def as_factor(value, on_device: tl.constexpr, wide: tl.constexpr):
    """Return a factor that is given as a pointer or a number."""
    return widen(tl.load(value), wide) if on_device else tl.full([], 0.0, wide) + value


@triton.jit
def tile_of(index, down, across):
    """Row and column of a tile: down a band, then the next column."""
    band = index // (_BAND * across)
    height = tl.minimum(down - band * _BAND, _BAND)
    inside = index % (_BAND * across)
    return band * _BAND + inside % height, inside // height


@triton.jit(do_not_specialize=["scale", "beta", "tokens"])
def grouped_accumulate(
    accumulator,
    left,
    right,
    offsets,
    scale,
    beta,
    rows,
    columns,
    tokens,
    expert_stride,
    row_stride,
    left_stride,
    right_stride,
    scale_on_device: tl.constexpr,
    beta_on_device: tl.constexpr,
    wide: tl.constexpr,
    precision: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_tokens: tl.constexpr,
):
    """accumulator[e] <- beta * accumulator[e] + scale * left[s_e:t_e]^T right[s_e:t_e], one tile of it.

    Args:
        accumulator, left, right: pointers to [experts, rows, columns], [tokens, rows], [tokens, columns];
            strides in elements; columns are dense.
        offsets: where each expert's rows end and the next expert's begin. Values outside [0, tokens] are
            clamped.
        scale, beta: numbers, or pointers to one floating value of any width.
    """
    down = tl.cdiv(rows, block_rows)
    across = tl.cdiv(columns, block_columns)
    expert = tl.program_id(0) // (down * across)
    tile_row, tile_column = tile_of(tl.program_id(0) % (down * across), down, across)
    begin = tl.maximum(tl.load(offsets + expert - 1, mask=expert > 0, other=0), 0)
    end = tl.minimum(tl.load(offsets + expert), tokens)
    by = as_factor(scale, scale_on_device, wide)
    beta_value = as_factor(beta, beta_on_device, wide)
    if (begin >= end) & (beta_value == 1):
        return

    row = tile_row * block_rows + tl.arange(0, block_rows)
    column = tile_column * block_columns + tl.arange(0, block_columns)
    into = accumulator + expert.to(tl.int64) * expert_stride
    into += row[:, None].to(tl.int64) * row_stride + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    adds = beta_value != 0
    # Not `inside & adds`: the interpreter cannot make a mask from one floating comparison.
    rows_to_read = tl.where(adds, rows, 0)
    old = tl.load(into, mask=(row < rows_to_read)[:, None] & (column < columns)[None, :], other=0.0)

    token = tl.arange(0, block_tokens)
    first = (begin + token).to(tl.int64)[:, None]
    step = tl.full([], block_tokens, tl.int64)
    from_left = left + first * left_stride + row[None, :]
    from_right = right + first * right_stride + column[None, :]
    product = tl.zeros([block_rows, block_columns], wide)
    for start in range(begin, end, block_tokens):
        of_expert = (start + token < end)[:, None]
        left_block = tl.load(from_left, mask=of_expert & (row < rows)[None, :], other=0.0)
        right_block = tl.load(from_right, mask=of_expert & (column < columns)[None, :], other=0.0)
        if INTERPRETED:
            # The interpreter multiplies bfloat16's bits as integers.
            left_block = widen(left_block, wide)
            right_block = widen(right_block, wide)
        product = tl.dot(
            tl.trans(left_block), right_block, product, input_precision=precision, out_dtype=wide
        )
        from_left += step * left_stride
        from_right += step * right_stride
    # Without rows, add zeros, whatever the scale is.
    by = tl.where(begin < end, by, 0.0)
    total = combine(by, product, beta_value, old, adds)
    tl.store(into, narrow(total, old.dtype), mask=inside)
