"""Which experts' products the extension adds by its own loops on a CPU, and which it rounds: by tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass

import torch

from . import tuning
from .matmul_ways import multiplies_bfloat16

RANK_K, BLAS = "rank_k", "blas"
EXACT, ROUNDED = "exact", "rounded"
#: Tokens of an expert that are asked about: up to which its product is added by loops of our own, in
#: ascending order, and from which on it is rounded.
RANK_K_CLASSES, ROUNDED_CLASSES = (4, 8, 16, 32), (16, 64, 256)
#: Up to how many the loops are taken without a trial.
_SURELY_FEW = 8
#: More tokens than there are.
NEVER = 2**63 - 1
#: Experts and their sums' shape of a trial; of one with so many tokens that it would take long, fewer.
_EXPERTS, _ROWS, _COLUMNS = 16, 256, 512
_MOST_TOKENS = 512


@dataclass(frozen=True)
class Thresholds:
    """How experts are added, by their tokens.

    rank_k_tokens: with so many at most, by loops of our own. rounded_tokens: with so many at least, by
    torch's product of bfloat16, rounded to it. because: what was found, a line for each question.
    """

    rank_k_tokens: int
    rounded_tokens: int
    because: tuple[str, ...]

    def __str__(self) -> str:
        parts = ["BLAS for each expert"]
        if self.rank_k_tokens:
            parts.append(f"loops of our own for up to {self.rank_k_tokens} tokens")
        if self.rounded_tokens != NEVER:
            parts.append(f"torch's bfloat16 product from {self.rounded_tokens} on")
        return ", ".join(parts)


def thresholds(
    accumulator: torch.dtype,
    operand: torch.dtype,
    kept: MutableMapping[str, str] | None = None,
    rounds: bool = True,
) -> Thresholds:
    """What trials find, or have found; `kept` as `tuning.choose` has it. rounds: products may be rounded."""
    found = _thresholds(accumulator, operand, lambda question: tuning.choose(question, kept), rounds)
    assert found is not None
    return found


def known_thresholds(
    accumulator: torch.dtype, operand: torch.dtype, kept: Mapping[str, str], rounds: bool = True
) -> Thresholds | None:
    """The same by the answers in `kept` alone; None where one is missing."""

    def look_up(question: tuning.Question) -> tuning.Choice | None:
        return tuning.choose(question, dict(kept)) if question.name in kept else None

    return _thresholds(accumulator, operand, look_up, rounds)


def _thresholds(
    accumulator: torch.dtype,
    operand: torch.dtype,
    answer: Callable[[tuning.Question], tuning.Choice | None],
    rounds: bool,
) -> Thresholds | None:
    because: list[str] = []

    def ways(questions: list[tuning.Question], wanted: str) -> int | None:
        """How many of them in a row are answered so; None where an answer is missing."""
        for number, question in enumerate(questions):
            choice = answer(question)
            if choice is None:
                return None
            because.append(f"{question.name.partition(', ')[2]}: {choice}")
            if choice.way != wanted:
                return number
        return len(questions)

    few = ways(_rank_k_questions(accumulator, operand), RANK_K)
    if few is None:
        return None
    rank_k_tokens = (0, *RANK_K_CLASSES)[few]
    questions = _rounding_questions(accumulator, operand, rank_k_tokens) if rounds else []
    many = ways(questions, ROUNDED)
    if many is None:
        return None
    return Thresholds(rank_k_tokens, (*ROUNDED_CLASSES, NEVER)[-1 - many], tuple(because))


def _rank_k_questions(accumulator: torch.dtype, operand: torch.dtype) -> list[tuning.Question]:
    return [_rank_k_question(accumulator, operand, tokens) for tokens in RANK_K_CLASSES]


def _rounding_questions(
    accumulator: torch.dtype, operand: torch.dtype, rank_k_tokens: int
) -> list[tuning.Question]:
    """From the most tokens down."""
    if operand != torch.bfloat16:
        return []
    has = multiplies_bfloat16()
    return [
        _rounding_question(accumulator, operand, tokens, rank_k_tokens, has)
        for tokens in reversed(ROUNDED_CLASSES)
    ]


def _name(accumulator: torch.dtype, operand: torch.dtype, of: str) -> str:
    return f"grouped products of {str(operand)[6:]} into {str(accumulator)[6:]}, {of}"


@functools.cache
def _rank_k_question(accumulator: torch.dtype, operand: torch.dtype, tokens: int) -> tuning.Question:
    calls = {RANK_K: (tokens, NEVER), BLAS: (0, NEVER)}
    return tuning.Question(
        _name(accumulator, operand, f"{tokens} tokens each"),
        tuple(calls),
        RANK_K if tokens <= _SURELY_FEW else BLAS,
        functools.partial(_trial, accumulator, operand, tokens, calls),
    )


@functools.cache
def _rounding_question(
    accumulator: torch.dtype, operand: torch.dtype, tokens: int, rank_k_tokens: int, has_bfloat16: bool
) -> tuning.Question:
    calls = {EXACT: (rank_k_tokens, NEVER), ROUNDED: (rank_k_tokens, 0)}
    return tuning.Question(
        _name(accumulator, operand, f"{tokens} tokens each, rounded or not"),
        tuple(calls),
        ROUNDED if has_bfloat16 else EXACT,
        functools.partial(_trial, accumulator, operand, tokens, calls),
    )


def _trial(
    accumulator: torch.dtype, operand: torch.dtype, tokens: int, calls: Mapping[str, tuple[int, int]]
) -> dict[str, Callable[[], object]]:
    experts = max(2, min(_EXPERTS, _MOST_TOKENS // tokens))
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.empty(experts * tokens, size, device="cpu").uniform_(-1, 1, generator=generator).to(operand)
        for size in (_ROWS, _COLUMNS)
    )
    total = torch.zeros(experts, _ROWS, _COLUMNS, dtype=accumulator, device="cpu")
    offsets = torch.arange(tokens, experts * tokens + 1, tokens, dtype=torch.int32, device="cpu")
    operator = torch.ops.fusedacc.grouped_accumulate_.default
    return {
        way: functools.partial(operator, total, left, right, offsets, None, 1.0, None, 1.0, *own)
        for way, own in calls.items()
    }


def questions() -> list[tuning.Question]:
    """All that can be asked on this machine; those of rounding as if no loops of our own were taken."""
    pairs = ((torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16,) * 2)
    return [
        question
        for pair in pairs
        for question in (*_rank_k_questions(*pair), *_rounding_questions(*pair, rank_k_tokens=0))
    ]
