"""The weight gradients of a mixture's experts, multiplied straight into their sums.

    accumulator[e] <- beta * accumulator[e] + scale * left[s:t]^T right[s:t]    for rows s to t of expert e

Works as `matmul` for each expert, with the same roundings, in one call. On a CPU the threads share the
experts. Loops of our own add experts with few tokens, whose product would cost more than the pass over their
sum. `cpu_rules` says how many tokens are few, and how experts with more are added. Equal arguments give equal
bits.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from . import checks, cpu_rules, matmul_eager, registry, selftest
from .constants import GemmMethod
from .cpu_rules import ProductRule
from .dtypes import Number
from .lists import bump_versions
from .matmul import Selection
from .native import as_argument

#: Backends for grouped products, the preferred first.
_NAMES = ("triton", "cpu", "eager")


def grouped_accumulate_(
    accumulator: Tensor,
    left: Tensor,
    right: Tensor,
    offsets: Tensor,
    scale: Number = 1.0,
    beta: Number = 1.0,
    *,
    backend: str = "auto",
) -> None:
    """Each matrix of `accumulator` <- beta * itself + scale * left^T right, for the tokens of its expert.

    Autograd does not record it; the accumulator's version is bumped. Experts without tokens stay untouched if
    beta is 1. It allocates a few MB per thread at most, and a copy of an operand of which neither rows nor
    columns are dense. Arguments as for `matmul.gemm_accumulate_`, and:

    The accumulator is [E, M, N], left is [S, M] and right [S, N]. `offsets`, int32 [E], has the end of each
    expert's rows; rows behind the last one are not read. If `beta` is 0, the accumulator may be
    uninitialized, and sums of experts without tokens become 0. "eager" waits for the device to read the
    offsets; "cuda" has no grouped product and means "eager". On a GPU offsets are not checked. Backends are
    "auto", "triton" (CUDA), "cpu" and "eager".
    """
    if backend == "auto" and not (checks.is_plain(accumulator) and checks.is_plain(left)):
        backend = "eager"
    chosen = select(accumulator.device, accumulator.dtype, left.dtype, backend)
    chosen.run(accumulator, left, right, offsets, scale, beta)


def select(
    device: torch.device,
    accumulator_dtype: torch.dtype,
    operand_dtype: torch.dtype,
    backend: str = "auto",
) -> Selection:
    """Select how to multiply operands of one dtype into sums of another on a device; errors as
    `registry.select`.
    """
    name, reason = _backend(backend, device, accumulator_dtype, operand_dtype)
    if name != "cpu":
        return Selection(name, _HOW[name], reason, _RUNS[name])
    rule = cpu_rules.product_rule(accumulator_dtype, operand_dtype)
    run = functools.partial(_native, rank_k_tokens=rule.few_tokens, method=rule.experts)
    return Selection(name, _on_cpu_in_words(rule), reason, run)


def describe(
    device: torch.device,
    accumulator_dtype: torch.dtype,
    operand_dtype: torch.dtype,
    backend: str,
) -> tuple[str, str]:
    """Return the backend, and in words how it multiplies and why. Arguments as for `select`."""
    chosen = select(device, accumulator_dtype, operand_dtype, backend)
    return chosen.name, f"{chosen.how}; {chosen.reason}"


def _on_cpu_in_words(rule: ProductRule) -> str:
    if rule.experts is GemmMethod.RANK_K:
        return "loops of our own for each expert"
    names = {
        GemmMethod.WHOLE: "BLAS",
        GemmMethod.ONEDNN: "oneDNN's bfloat16 product",
        GemmMethod.MKL: "MKL's bfloat16 product",
    }
    return f"{names[rule.experts]} for each expert, loops of our own for up to {rule.few_tokens} tokens"


_KIND = "grouped products"
#: Name under which Triton's kernel fails a self-test.
KERNEL = f"triton, {_KIND}"


def _backend(
    backend: str, device: torch.device, accumulator: torch.dtype, operand: torch.dtype
) -> tuple[str, str]:
    """Return the backend for a pair, and why. Its self-test has passed, or is deferred."""
    work = registry.Work(_KIND, _NAMES, device, accumulator, operand)
    return registry.select_checked(_check, backend, work)


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
    beta: Number,
    *,
    rank_k_tokens: int,
    method: GemmMethod,
) -> None:
    scale_tensor, scale_number = as_argument(scale)
    beta_tensor, beta_number = as_argument(beta)
    with torch.no_grad():
        torch.ops.fusedacc.grouped_accumulate_.default(
            accumulator,
            left,
            right,
            offsets,
            scale_tensor,
            scale_number,
            beta_tensor,
            beta_number,
            rank_k_tokens,
            int(method),
        )
    bump_versions([accumulator])


def _triton(
    accumulator: Tensor, left: Tensor, right: Tensor, offsets: Tensor, scale: Number, beta: Number
) -> None:
    # Imported here because Triton takes a second to import and may not be installed.
    module = importlib.import_module(".triton.backend", __package__)
    module.grouped_accumulate_(accumulator, left, right, offsets, scale, beta)
    bump_versions([accumulator])


def _accumulate_eagerly_(
    accumulator: Tensor,
    left: Tensor,
    right: Tensor,
    offsets: Tensor,
    scale: Number,
    beta: Number,
) -> None:
    """Add expert by expert, after all checks. Waits for the device to read the offsets."""
    _check_arguments(accumulator, left, right, offsets)
    ends = offsets.tolist()
    starts = [0, *ends[:-1]]
    tokens = left.shape[0]
    for index, (start, end) in enumerate(zip(starts, ends, strict=False)):
        if not start <= end <= tokens:
            allowed = f"allowed: {start} to {tokens}, from the offset before to the rows of left"
            raise RuntimeError(f"fusedacc: offsets[{index}] is {end}; {allowed}")
    with torch.no_grad():
        for expert, (start, end) in enumerate(zip(starts, ends, strict=False)):
            matmul_eager.accumulate_(accumulator[expert], left[start:end], right[start:end], scale, beta)


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
