"""Stochastic rounding in plain Python, one number at a time: the oracle for the tests of every backend."""

import struct
from fractions import Fraction

import torch

_WORD = (1 << 32) - 1
#: The largest finite bfloat16.
LARGEST = Fraction(255 << 120)


def philox(key: tuple[int, int], counter: tuple[int, int, int, int], rounds: int) -> tuple[int, ...]:
    """Compute Philox 4x32 as Salmon et al. define it."""
    left, right = key
    words = list(counter)
    for _ in range(rounds):
        first, second = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [
            second >> 32 ^ words[1] ^ left,
            second & _WORD,
            first >> 32 ^ words[3] ^ right,
            first & _WORD,
        ]
        left, right = left + 0x9E3779B9 & _WORD, right + 0xBB67AE85 & _WORD
    return tuple(words)


def random_bits(seed: int, stream: int, number: int) -> int:
    """Return the 16 random bits of one element."""
    block = number // 8
    counter = (block & _WORD, block >> 32, stream & _WORD, stream >> 32)
    word = philox((seed & _WORD, seed >> 32), counter, 7)[number % 8 // 2]
    return word >> 16 if number % 2 else word & 0xFFFF


def _fraction(pattern: int) -> Fraction:
    return Fraction(*struct.unpack("<f", struct.pack("<I", pattern))[0].as_integer_ratio())


def rounded(pattern: int, bits: int) -> int:
    """Round a float32 to bfloat16. Both are unsigned bits."""
    sign, magnitude = pattern & 1 << 31, pattern & ~(1 << 31)
    if magnitude > 0x7F800000:  # NaN
        return (pattern | 0x400000) >> 16
    if magnitude == 0x7F800000 or _fraction(magnitude) > LARGEST:
        return (sign >> 16) | (0x7F80 if magnitude == 0x7F800000 else 0x7F7F)
    lower = magnitude >> 16
    below = _fraction(lower << 16)
    if _fraction(magnitude) == below:
        return sign >> 16 | lower
    share = (_fraction(magnitude) - below) / (_fraction(lower + 1 << 16) - below)
    return sign >> 16 | lower + (share + Fraction(bits, 1 << 16) >= 1)


def patterns(tensor: torch.Tensor) -> list[int]:
    """Return the unsigned bits of each element of a float32 or bfloat16 tensor."""
    as_integer = tensor.cpu().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
    return [value & (1 << 8 * tensor.itemsize) - 1 for value in as_integer.flatten().tolist()]


def expected(value: torch.Tensor, target: torch.Tensor, seed: int, stream: int, first: int = 0) -> list[int]:
    """Return the bits that the float32 tensor `value` must have as `target`, in the order of the indices."""
    numbers = [first + sum(map(int.__mul__, index, target.stride())) for index in _indices(target.shape)]
    return [
        rounded(pattern, random_bits(seed, stream, number))
        for pattern, number in zip(patterns(value), numbers, strict=True)
    ]


def _indices(shape: torch.Size) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for size in shape:
        found = [(*index, each) for index in found for each in range(size)]
    return found
