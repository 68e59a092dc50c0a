# mypy: disable-error-code="no-untyped-def"
"""The Triton kernels: one launch over a table of addresses.

Their arithmetic is the twin of `csrc/common/functors.h` (`widen`, `narrow`, a fused multiply-add spelled out)
and of `csrc/common/norm_functors.h`. Imported only when Triton is wanted; `TRITON_INTERPRET=1` must be set
before that for the kernels to run on CPU tensors.
"""

# No `from __future__ import annotations`: Triton reads the annotations.
import torch
import triton
import triton.language as tl
from triton import knobs

from .rounding_kernels import bits_of_row, round_by

#: Elements that one program handles, a multiple of `BLOCK`.
CHUNK = 16384
#: Elements of one step of a norm's loop: 8 per thread, 16 bytes of a 16-bit dtype.
BLOCK = 1024
WARPS = 4
#: Options of the launch that adds. Without a number of registers to use, the compiler saves them, and waits
#: for the first loads before it issues the others: 64 a thread leave a multiprocessor eight programs.
ADDING = {"num_warps": WARPS} | ({"maxnreg": 64} if torch.version.hip is None else {})
#: As many partial norms are read by one program.
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
    """scale * gradient, plus beta * accumulator, rounded, where it adds."""
    wide: tl.constexpr = scale.dtype
    g = widen(gradient, wide)
    total = tl.fma(scale, g, beta * widen(accumulator, wide))
    # Not an fma with 0: it would turn a product of -0 into +0.
    return tl.where(adds, total, scale * g)


@triton.jit
def fresh(s, gradient, k, accumulator, adds, seed, stream, first, noisy: tl.constexpr):
    """The sum, rounded to nearest, or as elements from number `first` on, a multiple of 8, are."""
    value = combine(s, gradient, k, accumulator, adds)
    if noisy:
        return round_by(value, bits_of_row(seed, stream, first, value, True))
    return narrow(value, accumulator.dtype)


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
    """accumulator <- beta * accumulator + scale * gradient, or scale * gradient, of a list of dense tensors.

    Args:
        table: int64. For each of `count` tensors: its accumulator's address, elements, first program; then,
            for each program, the index of its tensor.
        calls: int64. For each tensor: its gradient's address and flags; two words that are not read here;
            where it is `noisy`, the seed and each tensor's stream.
        scale, beta: pointers to one floating value of any width each.
        noisy: whether sums, of bfloat16, are rounded stochastically.
    """
    program = tl.program_id(0)
    tensor = tl.load(table + 3 * count.to(tl.int64) + program)
    address = tl.load(table + 3 * tensor)
    size = tl.load(table + 3 * tensor + 1)
    first = tl.load(table + 3 * tensor + 2)
    gradient_address = tl.load(calls + 2 * tensor)
    flags = tl.load(calls + 2 * tensor + 1)
    s = tl.load(scale).to(wide)
    k = tl.load(beta).to(wide)
    start = (program - first) * _CHUNK
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

    # A step is 16 bytes of the wider side for each thread: with more, neighbouring threads would write to
    # memory with gaps between them. Four steps' loads are all issued before the first is used.
    gradient_bits: tl.constexpr = gradient_dtype.primitive_bitwidth
    accumulator_bits: tl.constexpr = accumulator_dtype.primitive_bitwidth
    bits: tl.constexpr = accumulator_bits if gradient_bits < accumulator_bits else gradient_bits
    # Of noise a thread makes what eight elements share.
    each: tl.constexpr = 8 * _THREADS if noisy else _THREADS * 128 // bits
    whole = 0
    if (flags & _MISALIGNED) == 0:
        # After the cast from an integer: a hint on the integer does not survive it.
        accumulator16 = tl.multiple_of(accumulator, 16)
        gradient16 = tl.multiple_of(gradient, 16)
        lanes = tl.arange(0, each)
        fours = length // (4 * each) * (4 * each)
        for step in range(0, fours, 4 * each):
            to = accumulator16 + tl.multiple_of(step, 4 * each) + lanes
            at = gradient16 + tl.multiple_of(step, 4 * each) + lanes
            g0 = tl.load(at)
            g1 = tl.load(at + each)
            g2 = tl.load(at + 2 * each)
            g3 = tl.load(at + 3 * each)
            a0 = tl.load(to, mask=adds, other=0.0)
            a1 = tl.load(to + each, mask=adds, other=0.0)
            a2 = tl.load(to + 2 * each, mask=adds, other=0.0)
            a3 = tl.load(to + 3 * each, mask=adds, other=0.0)
            number = start + step
            tl.store(to, fresh(s, g0, k, a0, adds, seed, stream, number, noisy))
            tl.store(to + each, fresh(s, g1, k, a1, adds, seed, stream, number + each, noisy))
            tl.store(to + 2 * each, fresh(s, g2, k, a2, adds, seed, stream, number + 2 * each, noisy))
            tl.store(to + 3 * each, fresh(s, g3, k, a3, adds, seed, stream, number + 3 * each, noisy))
        whole = length // each * each
        for step in range(fours, whole, each):
            to = accumulator16 + tl.multiple_of(step, each) + lanes
            g = tl.load(gradient16 + tl.multiple_of(step, each) + lanes)
            a = tl.load(to, mask=adds, other=0.0)
            number = start + step
            tl.store(to, fresh(s, g, k, a, adds, seed, stream, number, noisy))

    # Tails and misaligned tensors: one element per thread, but for noise.
    few: tl.constexpr = each if noisy else _THREADS
    lane = tl.arange(0, few)
    for step in range(whole, length, few):
        inside = step + lane < length
        g = tl.load(gradient + step + lane, mask=inside)
        a = tl.load(accumulator + step + lane, mask=inside & adds, other=0.0)
        sums = fresh(s, g, k, a, adds, seed, stream, start + step, noisy)
        tl.store(accumulator + step + lane, sums, mask=inside)


@triton.jit
def _state(elements, length, aligned, scale, largest: tl.constexpr, wide: tl.constexpr):
    """Of a chunk: the sum of the squares of scale * element, or the bits of the largest magnitude.

    Element i is in lane i % BLOCK, however the chunk is aligned.
    """
    bits: tl.constexpr = tl.int64 if wide == tl.float64 else tl.int32
    magnitude: tl.constexpr = 0x7FFFFFFFFFFFFFFF if wide == tl.float64 else 0x7FFFFFFF
    state = tl.zeros([_BLOCK], bits if largest else wide)
    lanes = tl.arange(0, _BLOCK)
    whole = 0
    if aligned:
        whole = length // _BLOCK * _BLOCK
        for step in range(0, whole, _BLOCK):
            # Said of the sum, since a hint on a function's argument is lost where it is inlined.
            places = tl.max_contiguous(tl.multiple_of(elements + step + lanes, 16), _BLOCK)
            value = widen(tl.load(places), wide)
            if largest:
                state = tl.maximum(state, value.to(bits, bitcast=True) & magnitude)
            else:
                value = value * scale
                state += value * value
    for step in range(whole, length, _BLOCK):
        value = widen(tl.load(elements + step + lanes, mask=step + lanes < length, other=0.0), wide)
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
    """A chunk's norm in float64, not finite only where an element is not."""
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
        # Squares may have overflowed or vanished: once more, scaled by a power of two.
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
            # Infinity would say that an element is not finite.
            norm = tl.minimum(norm, 1.7976931348623157e308)
    return norm


@triton.jit(do_not_specialize=["count"])
def norm_partials(table, partials, count, dtype: tl.constexpr, wide: tl.constexpr, infinity: tl.constexpr):
    """One partial norm for each program, of a list of dense tensors.

    Args:
        table: as for `scale_accumulate`.
        partials: float64, one for each program.
    """
    program = tl.program_id(0)
    tensor = tl.load(table + 3 * count.to(tl.int64) + program)
    address = tl.load(table + 3 * tensor)
    size = tl.load(table + 3 * tensor + 1)
    first = tl.load(table + 3 * tensor + 2)
    start = (program - first) * _CHUNK
    length = tl.minimum(size - start, _CHUNK).to(tl.int32)
    elements = address.to(tl.pointer_type(dtype)) + start
    norm = _norm(elements, length, address % 16 == 0, infinity, wide)
    tl.store(partials + program, norm)


@triton.jit(do_not_specialize=["count"])
def join_partials(partials, count, joined, infinity: tl.constexpr):
    """Partial norms of partial norms: one for each program's chunk of them.

    Args:
        partials: float64, aligned to 16 bytes.
        joined: float64, one for each program.
    """
    start = tl.program_id(0).to(tl.int64) * _CHUNK
    length = tl.minimum(count.to(tl.int64) - start, _CHUNK).to(tl.int32)
    tl.store(joined + tl.program_id(0), _norm(partials + start, length, True, infinity, tl.float64))


@triton.jit(do_not_specialize=["count"])
def finish_norm(partials, count, norm, found, infinity: tl.constexpr):
    """The norm of all partials, and 1 or 0: whether one is not finite. One program.

    Args:
        partials: float64, aligned to 16 bytes.
        norm: where the norm goes; its dtype is the norm's.
    """
    value = _norm(partials, count, True, infinity, tl.float64)
    tl.store(norm, value.to(norm.dtype.element_ty))
    tl.store(found, tl.where(value <= 1.7976931348623157e308, 0.0, 1.0))
