# mypy: disable-error-code="no-untyped-def"
"""Stochastic rounding in Triton kernels: the twin of `kernels.rounding`."""

# No `from __future__ import annotations`: Triton reads the annotations.
import triton
import triton.language as tl

from ..rounding import BLOCK, ROUNDS

_BLOCK = tl.constexpr(BLOCK)
_ROUNDS = tl.constexpr(ROUNDS)


@triton.jit
def words(seed, stream, blocks):
    """Four words of random bits for each block of eight elements, whose number is an int64."""
    low = blocks.to(tl.uint32)
    high = (blocks >> 32).to(tl.uint32)
    return tl.philox(seed, low, high, stream.to(tl.uint32), (stream >> 32).to(tl.uint32), _ROUNDS)


@triton.jit
def bits_of_blocks(seed, stream, blocks, like):
    """16 random bits for each element of `like`, whose last dimension is these whole blocks."""
    w0, w1, w2, w3 = words(seed, stream, blocks)
    both = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(tl.join(both & 0xFFFF, both >> 16), like.shape)


@triton.jit
def bits_of_elements(seed, stream, numbers):
    """16 random bits for each element number, an int64: Philox once for each."""
    w0, w1, w2, w3 = words(seed, stream, numbers >> 3)
    odd = (numbers & 2) != 0
    word = tl.where((numbers & 4) != 0, tl.where(odd, w3, w2), tl.where(odd, w1, w0))
    return tl.where((numbers & 1) != 0, word >> 16, word & 0xFFFF)


@triton.jit
def round_by(value, bits):
    """float32 to bfloat16."""
    pattern = value.to(tl.uint32, bitcast=True)
    magnitude = pattern & 0x7FFFFFFF
    noisy = tl.where(magnitude < 0x7F7F0000, pattern + bits, pattern)
    kept = tl.where(magnitude > 0x7F800000, pattern | 0x400000, noisy)
    return (kept >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
