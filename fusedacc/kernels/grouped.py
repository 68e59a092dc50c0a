"""The weight gradients of a mixture's experts, multiplied straight into their sums.

    accumulator[e] <- keep * accumulator[e] + scale * left[s:t]^T right[s:t]    for rows s to t of expert e

As `matmul` for each expert, with its roundings, and by one call for all: on a CPU experts are shared out
among the threads, and those with few tokens, whose product would cost more than the pass over their sum, are
added by loops of our own. Trials tell what few is, and from how many tokens on products of bfloat16 are
rounded (`grouped_ways`). Equal arguments give equal bits on every run.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from . import checks, grouped_eager, grouped_ways, registry, selftest
from .lists import bump_versions
from .matmul_eager import Number
from .native import as_argument
from .rounding import Noise

Run = Callable[[Tensor, Tensor, Tensor, Tensor, Number, Number, Noise | None], None]

#: The backends that there are for grouped products.
_NAMES = ("triton", "cpu", "eager")


@dataclass(frozen=True)
class Selection:
    """Who multiplies: the backend's name, what it does in words, and why it was chosen.

    `run(accumulator, left, right, offsets, scale, keep, noise)` is `grouped_accumulate_` without the choice.
    """

    name: str
    how: str
    reason: str
    run: Run


def grouped_accumulate_(
    accumulator: Tensor,
    left: Tensor,
    right: Tensor,
    offsets: Tensor,
    scale: Number = 1.0,
    keep: Number = 1.0,
    *,
    backend: str = "auto",
    noise: Noise | None = None,
) -> None:
    """Each matrix of `accumulator` <- keep * itself + scale * left^T right, for the tokens of its expert.

    Not recorded by autograd; the accumulator's version is bumped. Experts without tokens are not touched
    where keep is 1. Beside the accumulator at most a few MB a thread are allocated, and a copy of an operand
    of which neither rows nor columns lie without gaps.

    Args:
        accumulator: [E, M, N], each matrix with rows or columns without gaps, no two sharing memory; float32,
            bfloat16, float16 or float64.
        left: [S, M], any strides, its memory apart from the accumulator's.
        right: [S, N], likewise, of left's dtype. Dtype pairs as in `dtypes.PAIRS`.
        offsets: int32 [E], where each expert's rows of left and right end; they begin where those of the
            expert before end, at 0 for the first. Rows behind the last offset are not read.
        scale: a float, or a 0-dim floating tensor on the accumulator's device, read there.
        keep: likewise. Where it is 0, the accumulator is not read, and the sums of experts without tokens
            become 0: it may be uninitialised.
        backend: "auto", "triton" (CUDA), "cpu" or "eager", which is plain torch and waits for the device, to
            read the offsets; "cuda" has no such product, and stands for "eager".
        noise: random bits of one stream: sums of bfloat16 are rounded stochastically, once.

    Raises:
        ValueError: there is no such backend.
        RuntimeError: the backend that was asked for cannot run here, or an argument is refused; on a GPU
            offsets are not looked at. Nothing has been modified.
    """
    plain = checks.is_plain(accumulator) and checks.is_plain(left)
    if backend == "auto" and not plain:
        backend = "eager"
    stochastic = noise is not None
    chosen = select(accumulator.device, accumulator.dtype, left.dtype, backend, stochastic=stochastic)
    chosen.run(accumulator, left, right, offsets, scale, keep, noise)


def select(
    device: torch.device,
    accumulator_dtype: torch.dtype,
    operand_dtype: torch.dtype,
    backend: str = "auto",
    *,
    kept: MutableMapping[str, str] | None = None,
    stochastic: bool = False,
) -> Selection:
    """Who multiplies operands of one dtype into sums of another on a device, and why.

    Args:
        device: where the tensors are.
        accumulator_dtype: a supported pair with `operand_dtype` (see `dtypes.PAIRS`).
        operand_dtype: dtype of both operands.
        backend: as `grouped_accumulate_` has it.
        kept: answers of trials to stay with, as `tuning.choose` has them.
        stochastic: whether the sums are rounded so: no product is rounded to nearest before.

    Raises:
        ValueError: the name, or the value of `FUSEDACC_BACKEND`, is no backend.
        RuntimeError: the backend that was asked for cannot run there.
    """
    name, reason = _backend(*registry.requested(backend), device, accumulator_dtype, operand_dtype)
    if name != "cpu":
        return Selection(name, _HOW[name], reason, _RUNS[name])
    found = grouped_ways.thresholds(accumulator_dtype, operand_dtype, kept, rounds=not stochastic)
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
    """The backend, and in words who multiplies and why; arguments as `select`.

    What is not in `kept` has not come up yet, and is not tried for this.
    """
    name, reason = _backend(*registry.requested(backend), device, accumulator_dtype, operand_dtype)
    if name != "cpu":
        return name, f"{_HOW[name]}; {reason}"
    found = grouped_ways.known_thresholds(accumulator_dtype, operand_dtype, kept, rounds=not stochastic)
    if found is None:
        return name, f"a trial will tell how; {reason}"
    return name, "; ".join([str(found), *found.because, reason])


#: What fails a self-test where Triton's kernel is wrong.
KERNEL = "triton, grouped products"


def _backend(
    name: str, source: str, device: torch.device, accumulator: torch.dtype, operand: torch.dtype
) -> tuple[str, str]:
    """The backend for a pair, and why; its self-test has passed, or is yet to come."""
    try:
        return _tested(name, source, device, accumulator, operand)
    except selftest.Deferred:
        selftest.defer(_tested, name, source, device, accumulator, operand)
        return _untested(name, source, device, accumulator, operand)


@selftest.remembered
def _tested(
    name: str, source: str, device: torch.device, accumulator: torch.dtype, operand: torch.dtype
) -> tuple[str, str]:
    while True:  # until none fails: then it is an obstacle
        chosen, reason = _untested(name, source, device, accumulator, operand)
        if chosen != "triton" or self_test(device, accumulator, operand) is None:
            break
    if name == "auto":
        selftest.warn_once(KERNEL, device, "Torch's product for each expert")
    return chosen, reason


def self_test(device: torch.device, accumulator: torch.dtype, operand: torch.dtype) -> str | None:
    """As `registry.self_test`, of Triton's kernel."""
    if device.type not in selftest.DEVICE_TYPES:
        return None
    what = f"{str(operand)[6:]} into {str(accumulator)[6:]}"
    check = functools.partial(selftest.checks().grouped, _triton, device, operand, accumulator)
    return selftest.problem_of(KERNEL, what, device, check)


@selftest.remembered
def _untested(
    name: str, source: str, device: torch.device, accumulator: torch.dtype, operand: torch.dtype
) -> tuple[str, str]:
    names = [each for each in registry.order(device) if each in _NAMES] if name == "auto" else _NAMES
    task = f"add grouped products of {str(operand)[6:]} into {str(accumulator)[6:]} on {device}"

    def problem(each: str) -> str | None:
        why_not = registry.obstacle(each, device, accumulator, operand)
        return why_not or (registry.failed_selftest(KERNEL, device) if each == "triton" else None)

    chosen, reason = registry.choose(name, source, names, task, problem)
    if chosen in _NAMES:
        return chosen, reason
    return "eager", f"{reason}, which has no kernel for grouped products"


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


def _triton(
    accumulator: Tensor,
    left: Tensor,
    right: Tensor,
    offsets: Tensor,
    scale: Number,
    keep: Number,
    noise: Noise | None = None,
) -> None:
    # Imported where it is needed: Triton takes a second, and may not be there.
    module = importlib.import_module(".triton.grouped", __package__)
    module.grouped_accumulate_(accumulator, left, right, offsets, scale, keep, noise)
    bump_versions([accumulator])


_RUNS: dict[str, Run] = {"triton": _triton, "eager": grouped_eager.accumulate_}
_HOW = {"triton": "one Triton kernel into the sums", "eager": "torch's product for each expert"}
