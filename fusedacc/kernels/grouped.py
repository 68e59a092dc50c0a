"""The weight gradients of a mixture's experts, multiplied straight into their sums.

    accumulator[e] <- keep * accumulator[e] + scale * left[s:t]^T right[s:t]    for rows s to t of expert e

Works as `matmul` for each expert, with the same roundings, in one call. On a CPU the threads share the
experts. Loops of our own add experts with few tokens, whose product would cost more than the pass over their
sum. Trials decide how many tokens are few, and from how many tokens products of bfloat16 are rounded. Equal
arguments give equal bits.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import checks, matmul_eager, registry, selftest, tuning
from .dtypes import TRIED_PRODUCTS, Number, pair_name
from .lists import bump_versions
from .matmul import Selection, multiplies_bfloat16, trial_operands
from .native import as_argument
from .rounding import Noise
from .tuning import Choice

#: Backends for grouped products, the preferred first.
_NAMES = ("triton", "cpu", "eager")


def grouped_accumulate_(
    accumulator: Tensor,
    left: Tensor,
    right: Tensor,
    offsets: Tensor,
    scale: Number = 1.0,
    keep: Number = 1.0,
    *,
    backend: str = "auto",
) -> None:
    """Each matrix of `accumulator` <- keep * itself + scale * left^T right, for the tokens of its expert.

    Autograd does not record it; the accumulator's version is bumped. Experts without tokens stay untouched if
    keep is 1. It allocates a few MB per thread at most, and a copy of an operand of which neither rows nor
    columns are dense. Arguments as for `matmul.gemm_accumulate_`, and:

    The accumulator is [E, M, N], left is [S, M] and right [S, N]. `offsets`, int32 [E], has the end of each
    expert's rows; rows behind the last one are not read. If `keep` is 0, the accumulator may be
    uninitialized, and sums of experts without tokens become 0. "eager" waits for the device to read the
    offsets; "cuda" has no grouped product and means "eager". On a GPU offsets are not checked. Backends are
    "auto", "triton" (CUDA), "cpu" and "eager".
    """
    if backend == "auto" and not (checks.is_plain(accumulator) and checks.is_plain(left)):
        backend = "eager"
    chosen = select(accumulator.device, accumulator.dtype, left.dtype, backend)
    chosen.run(accumulator, left, right, offsets, scale, keep, None)


def select(
    device: torch.device,
    accumulator_dtype: torch.dtype,
    operand_dtype: torch.dtype,
    backend: str = "auto",
    *,
    kept: MutableMapping[str, str] | None = None,
    stochastic: bool = False,
) -> Selection:
    """Select how to multiply operands of one dtype into sums of another on a device; errors as
    `registry.select`.

    kept: earlier decisions to keep, as for `tuning.choose`. stochastic: whether sums are rounded
    stochastically; then no product is rounded before.
    """
    name, reason = _backend(backend, device, accumulator_dtype, operand_dtype)
    if name != "cpu":
        return Selection(name, _HOW[name], reason, _RUNS[name])
    found = thresholds(accumulator_dtype, operand_dtype, kept, rounds=not stochastic)
    run = functools.partial(_native, rank_k_tokens=found.rank_k_tokens, rounded_tokens=found.rounded_tokens)
    return Selection(name, str(found), "; ".join([reason, *found.because]), run)


def describe(
    device: torch.device,
    accumulator_dtype: torch.dtype,
    operand_dtype: torch.dtype,
    backend: str,
    kept: Mapping[str, str],
    stochastic: bool = False,
) -> tuple[str, str]:
    """Return the backend, and in words how it multiplies and why, by the decisions in `kept` alone."""
    name, reason = _backend(backend, device, accumulator_dtype, operand_dtype)
    if name != "cpu":
        return name, f"{_HOW[name]}; {reason}"
    try:
        found = thresholds(accumulator_dtype, operand_dtype, dict(kept), not stochastic, only_kept=True)
    except LookupError:
        return name, f"a trial will decide how; {reason}"
    return name, "; ".join([str(found), *found.because, reason])


_KIND = "grouped products"
#: Name under which Triton's kernel fails a self-test.
KERNEL = f"triton, {_KIND}"


def _backend(
    backend: str, device: torch.device, accumulator: torch.dtype, operand: torch.dtype
) -> tuple[str, str]:
    """Return the backend for a pair, and why. Its self-test has passed, or is deferred."""
    return registry.select_checked(_check, backend, _KIND, _NAMES, device, accumulator, operand)


def _check(name: str, device: torch.device, operand: torch.dtype, accumulator: torch.dtype) -> str | None:
    """Check Triton's kernel."""
    if name != "triton":
        return None
    return selftest.checks().grouped(_triton, device, operand, accumulator)


def _native(
    accumulator: Tensor,
    left: Tensor,
    right: Tensor,
    offsets: Tensor,
    scale: Number,
    keep: Number,
    noise: Noise | None = None,
    *,
    rank_k_tokens: int,
    rounded_tokens: int,
) -> None:
    operator = torch.ops.fusedacc.grouped_accumulate_.default
    numbers = *as_argument(scale), *as_argument(keep), rank_k_tokens, rounded_tokens, *(noise or ())
    with torch.no_grad():
        operator(accumulator, left, right, offsets, *numbers)
    bump_versions([accumulator])


def _triton(accumulator: Tensor, *arguments: Any) -> None:
    # Imported here because Triton takes a second to import and may not be installed.
    module = importlib.import_module(".triton.backend", __package__)
    module.grouped_accumulate_(accumulator, *arguments)
    bump_versions([accumulator])


RANK_K, BLAS = "rank_k", "blas"
EXACT, ROUNDED = "exact", "rounded"
#: Numbers of tokens that trials compare: up to which our loops add a product (ascending), and from which on
#: it is rounded.
RANK_K_CLASSES, ROUNDED_CLASSES = (4, 8, 16, 32), (16, 64, 256)
#: Default: our loops add up to so many tokens.
_SURELY_FEW = 8
NEVER = 2**63 - 1
#: Experts and shape of their sums in a trial; with many tokens per expert, fewer experts.
_EXPERTS, _ROWS, _COLUMNS = 16, 256, 512
_MOST_TOKENS = 512


@dataclass(frozen=True)
class Thresholds:
    """How experts are added, by their tokens.

    Attributes:
        rank_k_tokens: our loops add experts with at most so many tokens.
        rounded_tokens: torch's product, rounded to bfloat16, adds those with at least so many.
        because: the decisions, a line each.
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
    only_kept: bool = False,
) -> Thresholds:
    """Return what trials decide; `kept` as for `tuning.choose`.

    rounds: products may be rounded. only_kept: raise LookupError if a decision is not in `kept`.
    """
    because: list[str] = []

    def decided(choices: list[Choice], wanted: str) -> int:
        """Return how many of the first choices are decided so."""
        for number, choice in enumerate(choices):
            if only_kept and choice.name not in (kept or ()):
                raise LookupError(choice.name)
            decision = tuning.choose(choice, kept)
            because.append(f"{choice.name.partition(', ')[2]}: {decision}")
            if decision.candidate != wanted:
                return number
        return len(choices)

    rank_k_tokens = (0, *RANK_K_CLASSES)[decided(_rank_k_choices(accumulator, operand), RANK_K)]
    rounding = _rounding_choices(accumulator, operand, rank_k_tokens) if rounds else []
    many = decided(rounding, ROUNDED)
    return Thresholds(rank_k_tokens, (*ROUNDED_CLASSES, NEVER)[-1 - many], tuple(because))


def _rank_k_choices(accumulator: torch.dtype, operand: torch.dtype) -> list[Choice]:
    return [
        _choice(
            accumulator, operand, tokens, "", RANK_K if tokens <= _SURELY_FEW else BLAS,
            ((RANK_K, (tokens, NEVER)), (BLAS, (0, NEVER))),
        )
        for tokens in RANK_K_CLASSES
    ]  # fmt: skip


def _rounding_choices(accumulator: torch.dtype, operand: torch.dtype, rank_k_tokens: int) -> list[Choice]:
    """From the most tokens down. Without bfloat16 instructions, oneDNN may allocate a copy of the sum."""
    if operand != torch.bfloat16 or not multiplies_bfloat16():
        return []
    calls = (EXACT, (rank_k_tokens, NEVER)), (ROUNDED, (rank_k_tokens, 0))
    asked = ", rounded or not", ROUNDED, calls
    return [_choice(accumulator, operand, tokens, *asked) for tokens in reversed(ROUNDED_CLASSES)]


@functools.cache
def _choice(
    accumulator: torch.dtype,
    operand: torch.dtype,
    tokens: int,
    of: str,
    default: str,
    calls: tuple[tuple[str, tuple[int, int]], ...],
) -> Choice:
    """Return a choice among calls with these thresholds (rank_k_tokens, rounded_tokens), by candidate."""
    name = f"grouped products of {pair_name(operand, accumulator)}, {tokens} tokens each{of}"
    trial = functools.partial(_trial, accumulator, operand, tokens, dict(calls))
    return Choice(name, tuple(candidate for candidate, _ in calls), default, trial)


def _trial(
    accumulator: torch.dtype, operand: torch.dtype, tokens: int, calls: Mapping[str, tuple[int, int]]
) -> dict[str, Callable[[], object]]:
    experts = max(2, min(_EXPERTS, _MOST_TOKENS // tokens))
    left, right = trial_operands(experts * tokens, (_ROWS, _COLUMNS), operand)
    total = torch.zeros(experts, _ROWS, _COLUMNS, dtype=accumulator, device="cpu")
    offsets = torch.arange(tokens, experts * tokens + 1, tokens, dtype=torch.int32, device="cpu")
    operator = torch.ops.fusedacc.grouped_accumulate_.default
    return {
        candidate: functools.partial(operator, total, left, right, offsets, None, 1.0, None, 1.0, *own)
        for candidate, own in calls.items()
    }


def choices() -> list[Choice]:
    """Return all choices of this machine; those of rounding as if our loops were not used."""
    return [
        choice
        for pair in TRIED_PRODUCTS
        for choice in (*_rank_k_choices(*pair), *_rounding_choices(*pair, rank_k_tokens=0))
    ]


def _accumulate_eagerly_(
    accumulator: Tensor,
    left: Tensor,
    right: Tensor,
    offsets: Tensor,
    scale: Number,
    keep: Number,
    noise: Noise | None = None,
) -> None:
    """Add expert by expert, after all checks. Waits for the device to read the offsets."""
    _check_arguments(accumulator, left, right, offsets)
    start, ends, tokens = 0, offsets.tolist(), left.shape[0]
    for index, end in enumerate(ends):
        if not start <= end <= tokens:
            allowed = f"allowed: {start} to {tokens}, from the offset before to the rows of left"
            raise RuntimeError(f"fusedacc: offsets[{index}] is {end}; {allowed}")
        start = end
    with torch.no_grad():
        for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            operands = left[start:end], right[start:end]
            first = expert * accumulator.stride(0)
            matmul_eager.accumulate_(accumulator[expert], *operands, scale, keep, noise, first)


def _check_arguments(accumulator: Tensor, left: Tensor, right: Tensor, offsets: Tensor) -> None:
    """Check everything but the offsets' values, with the native operator's messages."""
    checks.check_product(accumulator, left, right, offsets)
    if not checks.is_plain(accumulator):
        return
    try:
        memory = checks.check_accumulators([accumulator])
    except (TypeError, ValueError) as problem:
        raise RuntimeError(f"fusedacc: {problem}".replace("accumulators[0]", "accumulator")) from None
    for name, operand in (("left", left), ("right", right)):
        if checks.is_plain(operand) and memory.overlapping(operand):
            raise RuntimeError(f"fusedacc: {name} overlaps accumulator in memory")


_RUNS: dict[str, Callable[..., None]] = {"triton": _triton, "eager": _accumulate_eagerly_}
_HOW = {"triton": "one Triton kernel into the sums", "eager": "torch's product for each expert"}
