# mypy: disable-error-code="no-untyped-def"
"""The Triton kernels: one launch over a table of addresses.

Their arithmetic is the twin of `csrc/functors.h` (`widen`, `narrow`, a fused multiply-add spelled out) and
of `csrc/norm_functors.h`. Imported only when Triton is wanted; `TRITON_INTERPRET=1` must be set before that
for the kernels to run on CPU tensors.
"""

# No `from __future__ import annotations`: Triton reads the annotations.
import triton
import triton.language as tl
from triton import knobs

#: Elements that one program handles, a multiple of `BLOCK`.
CHUNK = 16384
#: Elements of one step of the main loop: 8 per thread, 16 bytes of a 16-bit dtype.
BLOCK = 1024
WARPS = 4
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
        return bits.to(tl.float32, bitcast=True)
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
def combine(scale, gradient, keep, accumulator, adds, dtype: tl.constexpr):
    """scale * gradient, plus keep * accumulator, rounded, where it adds; rounded once to `dtype`."""
    wide: tl.constexpr = scale.dtype
    g = widen(gradient, wide)
    total = tl.fma(scale, g, keep * widen(accumulator, wide))
    # Not an fma with 0: it would turn a product of -0 into +0.
    return narrow(tl.where(adds, total, scale * g), dtype)


@triton.jit(do_not_specialize=["count", "scale", "keep"])
def scale_accumulate(
    table,
    calls,
    scale,
    keep,
    count,
    accumulator_dtype: tl.constexpr,
    gradient_dtype: tl.constexpr,
    wide: tl.constexpr,
):
    """accumulator <- keep * accumulator + scale * gradient, or scale * gradient, of a list of dense tensors.

    Args:
        table: int64. For each of `count` tensors: its accumulator's address, elements, first program; then,
            for each program, the index of its tensor.
        calls: int64. For each tensor: its gradient's address and flags.
        scale, keep: pointers to one floating value of any width each.
    """
    program = tl.program_id(0)
    tensor = tl.load(table + 3 * count.to(tl.int64) + program)
    address = tl.load(table + 3 * tensor)
    size = tl.load(table + 3 * tensor + 1)
    first = tl.load(table + 3 * tensor + 2)
    gradient_address = tl.load(calls + 2 * tensor)
    flags = tl.load(calls + 2 * tensor + 1)
    s = tl.load(scale).to(wide)
    k = tl.load(keep).to(wide)
    start = (program - first) * _CHUNK
    length = tl.minimum(size - start, _CHUNK).to(tl.int32)
    accumulator = address.to(tl.pointer_type(accumulator_dtype)) + start
    gradient = gradient_address.to(tl.pointer_type(gradient_dtype)) + start
    adds = (flags & _OVERWRITE) == 0

    whole = 0
    if (flags & _MISALIGNED) == 0:
        whole = length // _BLOCK * _BLOCK
        # After the cast from an integer: a hint on the integer does not survive it.
        accumulator16 = tl.multiple_of(accumulator, 16)
        gradient16 = tl.multiple_of(gradient, 16)
        if gradient_dtype.primitive_bitwidth < accumulator_dtype.primitive_bitwidth:
            # 16 bytes of the gradient are two 16-byte pieces of the accumulator; as two stores of their own
            # they need no exchange between threads, which one store of 8 elements would (shared memory).
            row = 8 * tl.arange(0, _BLOCK // 8)[:, None]
            eight = row + tl.arange(0, 8)[None, :]
            low = row + tl.arange(0, 4)[None, :]
            for step in range(0, whole, _BLOCK):
                at = tl.multiple_of(step, _BLOCK)
                g = tl.load(gradient16 + at + eight).reshape(_BLOCK // 8, 2, 4)
                g_low, g_high = tl.split(g.trans(0, 2, 1))
                a_low = tl.load(accumulator16 + at + low, mask=adds, other=0.0)
                a_high = tl.load(accumulator16 + at + low + 4, mask=adds, other=0.0)
                tl.store(accumulator16 + at + low, combine(s, g_low, k, a_low, adds, accumulator_dtype))
                tl.store(accumulator16 + at + low + 4, combine(s, g_high, k, a_high, adds, accumulator_dtype))
        else:
            lanes = tl.arange(0, _BLOCK)
            for step in range(0, whole, _BLOCK):
                at = tl.multiple_of(step, _BLOCK)
                g = tl.load(gradient16 + at + lanes)
                a = tl.load(accumulator16 + at + lanes, mask=adds, other=0.0)
                tl.store(accumulator16 + at + lanes, combine(s, g, k, a, adds, accumulator_dtype))

    # Tails and misaligned tensors: one element per thread.
    lane = tl.arange(0, _THREADS)
    for step in range(whole, length, _THREADS):
        inside = step + lane < length
        g = tl.load(gradient + step + lane, mask=inside)
        a = tl.load(accumulator + step + lane, mask=inside & adds, other=0.0)
        tl.store(accumulator + step + lane, combine(s, g, k, a, adds, accumulator_dtype), mask=inside)


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
def finish_norm(partials, count, norm, found, infinity: tl.constexpr):
    """The norm of all partials, and 1 or 0: whether one is not finite. One program.

    Args:
        partials: float64, aligned to 16 bytes.
        norm: where the norm goes; its dtype is the norm's.
    """
    value = _norm(partials, count, True, infinity, tl.float64)
    tl.store(norm, value.to(norm.dtype.element_ty))
    tl.store(found, tl.where(value <= 1.7976931348623157e308, 0.0, 1.0))
