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
    """Four words of random bits for each block of eight elements, whose number is an int64.

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
    """16 random bits for each element of `like`, whose last dimension these blocks make up."""
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
def bits_of_row(seed, stream, first, like, eights: tl.constexpr):
    """16 random bits for each element of a vector; `first`, an int64, is the number of its first.

    Args:
        eights: whether that is a multiple of 8.
    """
    if eights:
        return bits_of_blocks(seed, stream, (first >> 3) + tl.arange(0, like.shape[0] // 8), like)
    return bits_of_elements(seed, stream, first + tl.arange(0, like.shape[0]))


@triton.jit
def round_by(value, bits):
    """float32 to bfloat16."""
    pattern = value.to(tl.uint32, bitcast=True)
    magnitude = pattern & 0x7FFFFFFF
    noisy = tl.where(magnitude < 0x7F7F0000, pattern + bits, pattern)
    kept = tl.where(magnitude > 0x7F800000, pattern | 0x400000, noisy)
    return (kept >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
