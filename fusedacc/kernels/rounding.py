"""Stochastic rounding of float32 to bfloat16, with random bits that depend only on an element's place.

The bits are Philox 4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with 7 rounds,
the fewest that pass BigCrush. The key is the seed (64 bits); the counter is the number of a block of 8
elements (64 bits) and the stream (64 bits). Each of the 4 words serves two elements, the even one with its
low half. Elements are numbered by their place in memory, so every backend rounds alike.

Rounding adds 16 random bits to the bits that are cut off, so a value becomes the upper neighbour with a
probability equal to its relative distance from the lower one. Values of bfloat16 do not change, and finite
values stay finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checks import reach

ROUNDS = 7
#: Elements per Philox evaluation.
BLOCK = 8
#: Elements rounded at a time: temporaries of a few MB.
PIECE_ELEMENTS = 1 << 17

_WORD = 0xFFFFFFFF
# Multipliers less 2**32, so that a word's product fits in a signed 64-bit integer.
_MULTIPLIERS = 0xD2511F53 - (1 << 32), 0xCD9E8D57 - (1 << 32)
_WEYL = 0x9E3779B9, 0xBB67AE85
#: Magnitudes from the largest finite bfloat16 on get no random bits.
_LARGEST = 0x7F7F0000
_INFINITY = 0x7F800000


class Noise(NamedTuple):
    """The random bits of one pass, to round sums of bfloat16 stochastically."""

    #: 0 to 2**63 - 1.
    seed: int
    #: One per accumulator, by `stream_of`.
    streams: Sequence[int]


def stream_of(parameter: int, addition: int) -> int:
    """Return the stream of a parameter's addition; ValueError above 32 bits and 31 bits."""
    for name, value, bits in (("parameter", parameter, 32), ("addition", addition, 31)):
        if not 0 <= value < 1 << bits:
            raise ValueError(f"{name} is {value}; allowed: 0 to {(1 << bits) - 1}")
    return parameter | addition << 32


def _product(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low half of `word * (multiplier + 2**32)`."""
    product = word * multiplier
    return (product >> 32) + word, product & _WORD


def philox(
    seed: int, counter: tuple[Tensor, Tensor, Tensor, Tensor], rounds: int = ROUNDS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four words of 32 bits, as int64, for each counter of four."""
    key = seed & _WORD, seed >> 32
    x: Any
    y: Any
    x, y = key
    if torch.compiler.is_compiling():  # torch 2.13's Inductor takes symbolic numbers for float32 on a CPU
        x, y = (torch.full_like(counter[0], word) for word in key)
    a, b, c, d = counter
    for _ in range(rounds):
        high, low = _product(a, _MULTIPLIERS[0])
        other_high, other_low = _product(c, _MULTIPLIERS[1])
        a = other_high ^ b ^ x
        b = other_low
        c = high ^ d ^ y
        d = low
        x = (x + _WEYL[0]) & _WORD
        y = (y + _WEYL[1]) & _WORD
    return a, b, c, d


def _words(seed: int, stream: int, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    low, high = (torch.full_like(blocks, word) for word in (stream & _WORD, stream >> 32))
    return philox(seed, (blocks & _WORD, blocks >> 32, low, high))


def random_bits(seed: int, stream: int, numbers: Tensor) -> Tensor:
    """Return 16 random bits for each element number: int64, as `numbers`."""
    words = _words(seed, stream, numbers >> 3)
    upper = numbers & 4 != 0
    odd = numbers & 2 != 0
    first = torch.where(odd, words[1], words[0])
    word = torch.where(upper, torch.where(odd, words[3], words[2]), first)
    return word >> ((numbers & 1) << 4) & 0xFFFF


def offsets(tensor: Tensor) -> Tensor:
    """Return each element's offset in memory from the first, in elements: int64, of the tensor's shape."""
    of_element = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        of_element = of_element[..., None] + stride * torch.arange(size, device=tensor.device)
    return of_element


def rounded(value: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to bfloat16 by 16 random bits per element."""
    pattern = value.view(torch.int32)
    magnitude = pattern & 0x7FFFFFFF
    noisy = pattern + torch.where(magnitude < _LARGEST, bits.to(torch.int32), 0)
    noisy = torch.where(magnitude > _INFINITY, pattern | 0x400000, noisy)
    return (noisy >> 16).to(torch.int16).view(torch.bfloat16)


def round_into_(target: Tensor, value: Tensor, seed: int, stream: int, first: int = 0) -> None:
    """Round float32 `value` stochastically into `target`, bfloat16 with any strides.

    first: the number of target's first element.
    """
    count = target.numel()
    if count == 0:
        return
    if count > PIECE_ELEMENTS and not torch.compiler.is_compiling():
        # Split along the outermost dimension in memory, so that dense parts stay dense.
        strides = [
            stride if size > 1 else -1 for size, stride in zip(target.shape, target.stride(), strict=True)
        ]
        along = strides.index(max(strides))
        half = target.shape[along] // 2
        for begin, length in ((0, half), (half, target.shape[along] - half)):
            part = target.narrow(along, begin, length), value.narrow(along, begin, length)
            round_into_(*part, seed, stream, first + begin * strides[along])
    elif reach(target) == count:
        # The elements are consecutive: as `random_bits`, with one evaluation for each block.
        blocks = torch.arange(first // BLOCK, (first + count - 1) // BLOCK + 1, device=target.device)
        words = torch.stack(_words(seed, stream, blocks), dim=1)
        bits = torch.stack((words & 0xFFFF, words >> 16), dim=2).flatten()[first % BLOCK :][:count]
        target.copy_(rounded(value, bits.as_strided(target.shape, target.stride())))
    else:
        target.copy_(rounded(value, random_bits(seed, stream, offsets(target) + first)))


NEAREST = "nearest"
STOCHASTIC = "stochastic"
#: Additions per seed, and one above the highest seed.
MOST_ADDITIONS = 2**31
MOST_SEEDS = 2**63


def checked_seed(rounding: Any, seed: Any) -> int | None:
    """Return the seed of stochastic rounding, by default torch's; None if sums are rounded to nearest."""
    if rounding not in (NEAREST, STOCHASTIC):
        raise ValueError(f"rounding is {rounding!r}; allowed: {NEAREST!r}, {STOCHASTIC!r}")
    if rounding == NEAREST:
        _check_unused("seed", seed)
        return None
    if seed is None:
        return torch.initial_seed() % MOST_SEEDS
    return _checked("seed", seed, MOST_SEEDS)


def _check_unused(name: str, value: Any) -> None:
    if value is not None:
        allowed = f"allowed: None, or rounding={STOCHASTIC!r}"
        raise ValueError(f"{name} is {value!r}, but rounding={NEAREST!r} takes no random bits; {allowed}")


def _checked(name: str, value: Any, end: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); allowed: an int from 0 to {end - 1}")
    if not 0 <= value < end:
        raise ValueError(f"{name} is {value}; allowed: 0 to {end - 1}")
    return value


def checked_offset(offset: Any) -> int:
    """Return the number of an addition, or raise TypeError or ValueError."""
    return _checked("offset", offset, MOST_ADDITIONS)


def noise_for(accumulators: Any, rounding: Any, seed: Any, offset: Any) -> Noise | None:
    """Return the random bits of one pass over these accumulators; None if they are rounded to nearest."""
    known = checked_seed(rounding, seed)
    if known is None:
        _check_unused("offset", offset)
        return None
    number = checked_offset(0 if offset is None else offset)
    if not isinstance(accumulators, (list, tuple)):
        kind = type(accumulators).__name__
        raise TypeError(f"accumulators is {kind}; allowed: a list or tuple of tensors")
    for index, accumulator in enumerate(accumulators):
        # Other types are refused later.
        if isinstance(accumulator, Tensor) and accumulator.dtype is not torch.bfloat16:
            raise TypeError(
                f"accumulators[{index}] is {accumulator.dtype}, but rounding={STOCHASTIC!r} is for sums of "
                "torch.bfloat16: float32 and float64 do not need it, and float16 lacks range"
            )
    return Noise(known, streams(len(accumulators), number))


def streams(count: int, addition: int) -> list[int]:
    """Return the streams of one addition to `count` tensors, which are numbered by their order."""
    first = stream_of(0, addition)
    return list(range(first, first + count))
