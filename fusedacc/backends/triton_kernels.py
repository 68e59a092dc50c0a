# mypy: disable-error-code="no-untyped-def"
"""The Triton kernel: one launch over a table of addresses.

Its arithmetic is the twin of `csrc/functors.h` (`widen`, `narrow`, a fused multiply-add spelled out).
Imported only when Triton is wanted; `TRITON_INTERPRET=1` must be set before that for the kernel to run on CPU
tensors.
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
def combine(scale, gradient, accumulator, keep, dtype: tl.constexpr):
    """scale * gradient, plus the accumulator where it is kept, rounded once to `dtype`."""
    wide: tl.constexpr = scale.dtype
    g = widen(gradient, wide)
    total = tl.fma(scale, g, widen(accumulator, wide))
    # Not an fma with 0: it would turn a product of -0 into +0.
    return narrow(tl.where(keep, total, scale * g), dtype)


@triton.jit(do_not_specialize=["count", "scale"])
def scale_accumulate(
    table,
    calls,
    scale,
    count,
    accumulator_dtype: tl.constexpr,
    gradient_dtype: tl.constexpr,
    wide: tl.constexpr,
):
    """accumulator <- accumulator + scale * gradient, or scale * gradient, over a list of dense tensors.

    Args:
        table: int64. For each of `count` tensors: its accumulator's address, elements, first program; then,
            for each program, the index of its tensor.
        calls: int64. For each tensor: its gradient's address and flags.
        scale: pointer to one floating value of any width.
    """
    program = tl.program_id(0)
    tensor = tl.load(table + 3 * count.to(tl.int64) + program)
    address = tl.load(table + 3 * tensor)
    size = tl.load(table + 3 * tensor + 1)
    first = tl.load(table + 3 * tensor + 2)
    gradient_address = tl.load(calls + 2 * tensor)
    flags = tl.load(calls + 2 * tensor + 1)
    s = tl.load(scale).to(wide)
    start = (program - first) * _CHUNK
    length = tl.minimum(size - start, _CHUNK).to(tl.int32)
    accumulator = address.to(tl.pointer_type(accumulator_dtype)) + start
    gradient = gradient_address.to(tl.pointer_type(gradient_dtype)) + start
    keep = (flags & _OVERWRITE) == 0

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
                a_low = tl.load(accumulator16 + at + low, mask=keep, other=0.0)
                a_high = tl.load(accumulator16 + at + low + 4, mask=keep, other=0.0)
                tl.store(accumulator16 + at + low, combine(s, g_low, a_low, keep, accumulator_dtype))
                tl.store(accumulator16 + at + low + 4, combine(s, g_high, a_high, keep, accumulator_dtype))
        else:
            lanes = tl.arange(0, _BLOCK)
            for step in range(0, whole, _BLOCK):
                at = tl.multiple_of(step, _BLOCK)
                g = tl.load(gradient16 + at + lanes)
                a = tl.load(accumulator16 + at + lanes, mask=keep, other=0.0)
                tl.store(accumulator16 + at + lanes, combine(s, g, a, keep, accumulator_dtype))

    # Tails and misaligned tensors: one element per thread.
    lane = tl.arange(0, _THREADS)
    for step in range(whole, length, _THREADS):
        inside = step + lane < length
        g = tl.load(gradient + step + lane, mask=inside)
        a = tl.load(accumulator + step + lane, mask=inside & keep, other=0.0)
        tl.store(accumulator + step + lane, combine(s, g, a, keep, accumulator_dtype), mask=inside)
