# mypy: disable-error-code="no-untyped-def"
"""The Triton kernel that multiplies groups of rows into separate matrices: gradients of a layer of experts.

A program computes one tile of one expert's matrix over all of the expert's rows, so there are no atomics and
bits repeat. The grid depends on shapes only; the number of rows is read on the device. Programs are numbered
expert by expert, so that concurrent ones read the same rows, and within an expert in bands of tiles, so that
they read few columns. Persistent programs would save the start of each, but would replace the hardware's
scheduling by a fixed one: where an expert has few rows, its programs end early and others take their place.

The sum is loaded before the products, which hide the latency, in a layout with 16 bytes per thread. The
tensor cores' results are converted to that layout once, at the end.
"""

# No `from __future__ import annotations`: Triton reads the annotations.
import triton
import triton.language as tl

from .kernels import INTERPRETED, bits_of_blocks, bits_of_elements, combine, narrow, round_by, widen

#: Rows and columns of a tile, tokens per step, and warps, by the bytes of an operand's element. With 16 bits,
#: 32 tokens leave a Hopper multiprocessor four programs, as 16 do, with half the barriers. float32 without
#: tensor cores would spill registers with four warps.
TILES = {2: (64, 64, 32, 4), 4: (64, 64, 16, 8), 8: (32, 32, 16, 4)}
#: Rows of tiles per band.
_BAND = tl.constexpr(16)


@triton.jit
def number(value, on_device: tl.constexpr, wide: tl.constexpr):
    """A factor, given as a pointer or a number."""
    return widen(tl.load(value), wide) if on_device else tl.full([], 0.0, wide) + value


@triton.jit
def tile_of(index, down, across):
    """Row and column of a tile: down a band, then the next column."""
    band = index // (_BAND * across)
    height = tl.minimum(down - band * _BAND, _BAND)
    inside = index % (_BAND * across)
    return band * _BAND + inside % height, inside // height


@triton.jit(do_not_specialize=["scale", "keep", "tokens", "seed", "stream"])
def grouped_accumulate(
    accumulator,
    left,
    right,
    offsets,
    scale,
    keep,
    rows,
    columns,
    tokens,
    expert_stride,
    row_stride,
    left_stride,
    right_stride,
    seed: tl.int64,
    stream: tl.int64,
    scale_on_device: tl.constexpr,
    keep_on_device: tl.constexpr,
    wide: tl.constexpr,
    precision: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_tokens: tl.constexpr,
    noisy: tl.constexpr,
    eights: tl.constexpr,
):
    """accumulator[e] <- keep * accumulator[e] + scale * left[s_e:t_e]^T right[s_e:t_e], one tile of it.

    Args:
        accumulator, left, right: pointers to [experts, rows, columns], [tokens, rows], [tokens, columns];
            strides in elements; columns are dense.
        offsets: where each expert's rows end and the next expert's begin. Values outside [0, tokens] are
            clamped.
        scale, keep: numbers, or pointers to one floating value of any width.
        seed, stream: of the random bits if `noisy`: sums, of bfloat16, are rounded stochastically.
        eights: whether the accumulator's strides are multiples of 8.
    """
    down = tl.cdiv(rows, block_rows)
    across = tl.cdiv(columns, block_columns)
    expert = tl.program_id(0) // (down * across)
    tile_row, tile_column = tile_of(tl.program_id(0) % (down * across), down, across)
    begin = tl.maximum(tl.load(offsets + expert - 1, mask=expert > 0, other=0), 0)
    end = tl.minimum(tl.load(offsets + expert), tokens)
    s = number(scale, scale_on_device, wide)
    k = number(keep, keep_on_device, wide)
    if (begin >= end) & (k == 1):
        return

    row = tile_row * block_rows + tl.arange(0, block_rows)
    column = tile_column * block_columns + tl.arange(0, block_columns)
    places = accumulator + expert.to(tl.int64) * expert_stride
    places += row[:, None].to(tl.int64) * row_stride + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    adds = k != 0
    # Not `inside & adds`: the interpreter cannot make a mask from one floating comparison.
    kept = tl.where(adds, rows, 0)
    old = tl.load(places, mask=(row < kept)[:, None] & (column < columns)[None, :], other=0.0)

    token = tl.arange(0, block_tokens)
    first = (begin + token).to(tl.int64)[:, None]
    step = tl.full([], block_tokens, tl.int64)
    from_left = left + first * left_stride + row[None, :]
    from_right = right + first * right_stride + column[None, :]
    product = tl.zeros([block_rows, block_columns], wide)
    for start in range(begin, end, block_tokens):
        there = (start + token < end)[:, None]
        a = tl.load(from_left, mask=there & (row < rows)[None, :], other=0.0)
        b = tl.load(from_right, mask=there & (column < columns)[None, :], other=0.0)
        if INTERPRETED:
            # The interpreter multiplies bfloat16's bits as integers.
            a = widen(a, wide)
            b = widen(b, wide)
        product = tl.dot(tl.trans(a), b, product, input_precision=precision, out_dtype=wide)
        from_left += step * left_stride
        from_right += step * right_stride
    # Without rows, add zeros, whatever the scale is.
    s = tl.where(begin < end, s, 0.0)
    total = combine(s, product, k, old, adds)
    if noisy:
        numbers = expert.to(tl.int64) * expert_stride + row[:, None].to(tl.int64) * row_stride
        if eights:
            block = tl.arange(0, block_columns // 8) + tile_column * (block_columns // 8)
            bits = bits_of_blocks(seed, stream, (numbers >> 3) + block[None, :], total)
        else:
            bits = bits_of_elements(seed, stream, numbers + column[None, :])
        tl.store(places, round_by(total, bits), mask=inside)
    else:
        tl.store(places, narrow(total, old.dtype), mask=inside)
