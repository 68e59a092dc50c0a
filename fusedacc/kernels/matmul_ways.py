"""The extension's ways to multiply on a CPU, and which of them is taken for how many tokens."""

from __future__ import annotations

import functools
import os
from bisect import bisect_left
from collections.abc import Callable

import torch

from . import tuning
from .constants import SPLIT_ROWS, TOKEN_CLASSES, Way

#: Tokens, by class, and the sum's shape, of a trial.
_TRIED = (8, 32, 64, 192)
_SHAPE = 512, 512
#: The shape where loops of our own are tried. They are at their best while the sum fits a second-level cache,
#: but most of a model's time goes to sums that do not.
_BEYOND_CACHE = 2048, 1024
#: Of so many classes, each with few tokens, loops of our own may multiply bfloat16.
_RANK_K_CLASSES = 2
#: Parts that a thread gets at least where a product is cut up, as in csrc/cpu/gemm.cpp.
_PARTS_PER_THREAD = 2
#: Values of ONEDNN_MAX_CPU_ISA under which it multiplies bfloat16 by float32's instructions.
_WITHOUT_BFLOAT16 = frozenset(
    ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
)


def class_of(tokens: int) -> int:
    """The number of a class: tokens of one class are multiplied in one way."""
    return bisect_left(TOKEN_CLASSES, tokens)


def in_words(number: int) -> str:
    """A class as it stands in questions."""
    if number == len(TOKEN_CLASSES):
        return f"over {TOKEN_CLASSES[-1]} tokens"
    first = TOKEN_CLASSES[number - 1] + 1 if number else 1
    return f"{first} to {TOKEN_CLASSES[number]} tokens"


def question_of(accumulator: torch.dtype, operand: torch.dtype, number: int) -> tuning.Question | None:
    """What is to be found out before such a product; None where there is one way only."""
    return _question(accumulator, operand, number, torch.get_num_threads(), multiplies_bfloat16())


@functools.cache
def _question(
    accumulator: torch.dtype, operand: torch.dtype, number: int, threads: int, has_bfloat16: bool
) -> tuning.Question | None:
    ways = ways_of(accumulator, operand, number, threads)
    if len(ways) == 1:
        return None
    # Nobody splits without having tried: on some processors it takes a quarter less time, on others more.
    default = Way.WHOLE
    if Way.ROUNDED in ways and has_bfloat16:
        default = Way.RANK_K if number == 0 else Way.ROUNDED
    shape = _SHAPE
    if Way.SPLIT in ways:
        shape = max(shape[0], SPLIT_ROWS * _PARTS_PER_THREAD * threads), shape[1]
    elif Way.RANK_K in ways:
        shape = _BEYOND_CACHE
    return tuning.Question(
        f"product of {str(operand)[6:]} into {str(accumulator)[6:]}, {in_words(number)}",
        tuple(way.name.lower() for way in ways),
        default.name.lower(),
        functools.partial(_trial, accumulator, operand, _TRIED[number], shape, ways),
    )


def ways_of(accumulator: torch.dtype, operand: torch.dtype, number: int, threads: int) -> tuple[Way, ...]:
    """The ways for a pair of dtypes and a class of tokens."""
    if operand == torch.bfloat16:
        # With few tokens, parts of a product that is rounded first cost what two passes over the sum cost.
        return (Way.WHOLE, Way.ROUNDED, Way.RANK_K) if number < _RANK_K_CLASSES else (Way.WHOLE, Way.ROUNDED)
    # With fewer tokens than that BLAS packs nothing, with more there is enough to do between the packing.
    few_dozen = number == len(TOKEN_CLASSES) - 1
    if operand == accumulator == torch.float32 and few_dozen and threads > 1:
        return Way.WHOLE, Way.SPLIT
    return (Way.WHOLE,)


def _trial(
    accumulator: torch.dtype,
    operand: torch.dtype,
    tokens: int,
    shape: tuple[int, int],
    ways: tuple[Way, ...],
) -> dict[str, Callable[[], object]]:
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.empty(tokens, size, device="cpu").uniform_(-1, 1, generator=generator).to(operand)
        for size in shape
    )
    total = torch.zeros(shape, dtype=accumulator, device="cpu")
    operator = torch.ops.fusedacc.gemm_accumulate_.default
    return {
        way.name.lower(): functools.partial(operator, total, left, right, None, 1.0, None, 1.0, int(way))
        for way in ways
    }


def questions() -> list[tuning.Question]:
    """All that can be asked on this machine."""
    pairs = ((torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16,) * 2)
    found = [question_of(*pair, number) for pair in pairs for number in range(len(TOKEN_CLASSES) + 1)]
    return [question for question in found if question is not None]


def multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for it, and oneDNN may use them."""
    if os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in _WITHOUT_BFLOAT16:
        return False
    if not torch.backends.mkldnn.is_available() or not torch._C._get_mkldnn_enabled():
        return False
    return _has_bfloat16()


@functools.cache
def _has_bfloat16() -> bool:
    asked = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in asked)
