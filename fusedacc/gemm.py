"""A layer's weight gradient multiplied straight into its sum, so that it is never a tensor of its own.

    accumulator <- keep * accumulator + scale * left^T right

The product is summed in float32 (float64 for float64) and rounded once to the accumulator, with one
exception: on a CPU with bfloat16 matrix instructions (AMX) a product of bfloat16 is rounded to bfloat16, as
torch rounds its own, before it is added to a float32 sum. In float32 it would take four times as long there.

Who multiplies: on CUDA the extension calls cuBLAS on torch's own handle, so that stream, workspace,
determinism and TF32 are as torch is set (but 16-bit sums never take its reduced-precision reduction); on the
CPU it calls torch's BLAS and oneDNN in place. The eager backend is plain torch, on any device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import backends, checks, gemm_eager
from .gemm_checks import check
from .plan import bump_versions

#: Tokens for which the extension cuts a float32 product up for its threads, as csrc/cpu/split_tokens.h says.
SPLIT_TOKENS = range(48, 101)

Number = gemm_eager.Number
Run = Callable[[Tensor, Tensor, Tensor, Number, Number], None]


@dataclass(frozen=True)
class Selection:
    """Who multiplies: the backend's name, what it does in words, and why it was chosen.

    `run(accumulator, left, right, scale, keep)` is `gemm_accumulate_` without the choice and, for arguments
    that are sure to be right, without the words of its errors.
    """

    name: str
    how: str
    reason: str
    run: Run


def gemm_accumulate_(
    accumulator: Tensor,
    left: Tensor,
    right: Tensor,
    scale: Number = 1.0,
    keep: Number = 1.0,
    *,
    backend: str = "auto",
) -> None:
    """accumulator <- keep * accumulator + scale * left^T right, without a temporary as large as that.

    Not recorded by autograd; the accumulator's version is bumped. Beside the accumulator at most a few MB are
    allocated, and a copy of an operand of which neither rows nor columns lie without gaps.

    Args:
        accumulator: [M, N], with rows or columns without gaps (a row may be longer than N); float32,
            bfloat16, float16 or float64.
        left: [n, M], any strides, its memory apart from the accumulator's; n may be 0.
        right: [n, N], likewise, of left's dtype. Dtype pairs as in `checks.PAIRS`.
        scale: a float, or a 0-dim floating tensor on the accumulator's device, read there.
        keep: likewise. Where it is 0, the accumulator is not read: it may be uninitialised.
        backend: "auto", "cuda", "cpu" or "eager"; "triton" has no product, so that torch multiplies.

    Raises:
        TypeError: something is no dense floating tensor, a dtype pair is not supported, or scale or keep is
            of the wrong kind.
        ValueError: shapes or devices do not match, memory overlaps (where torch's own call adds, it does not
            look), the accumulator has gaps in rows and in columns, or there is no such backend.
        RuntimeError: the backend that was asked for cannot run here.
        Nothing is modified when one of these is raised.
    """
    if torch.compiler.is_compiling():
        _traced(accumulator, left, right, scale, keep, backend)
        return
    if backend == "auto" and not (checks.is_plain(accumulator) and checks.is_plain(left)):
        backend = "eager"
    try:
        chosen = select(accumulator.device, accumulator.dtype, left.dtype, backend)
        if chosen.name == "eager" or 1 not in accumulator.stride():
            check(accumulator, left, right, scale, keep)
        chosen.run(accumulator, left, right, scale, keep)
    except (RuntimeError, TypeError, AttributeError):
        check(accumulator, left, right, scale, keep)
        raise


def select(
    device: torch.device,
    accumulator_dtype: torch.dtype,
    operand_dtype: torch.dtype,
    backend: str = "auto",
) -> Selection:
    """Who multiplies operands of one dtype into an accumulator of another on a device, and why.

    Raises:
        ValueError: the name, or the value of `FUSEDACC_BACKEND`, is no backend.
        RuntimeError: the backend that was asked for cannot run there.
    """
    name, source = backends.requested(backend)
    return _select(name, source, device, accumulator_dtype, operand_dtype)


@functools.cache
def _select(
    name: str, source: str, device: torch.device, accumulator: torch.dtype, operand: torch.dtype
) -> Selection:
    order = ("cuda", "cpu", "eager")
    if name == "auto":
        passed: list[str] = []
        for candidate in order:
            problem = obstacle(candidate, device, accumulator, operand)
            if problem is None:
                reason = "; ".join([f"first of {', '.join(order)} that can run here", *passed])
                return _selection(candidate, reason, accumulator, operand)
            passed.append(f"not {candidate}: {problem}")
    if name == "triton":
        reason = f"chosen by {source}={name!r}, which has no kernel for products"
        return _selection("eager", reason, accumulator, operand)
    problem = obstacle(name, device, accumulator, operand)
    if problem is not None:
        can = [other for other in order if obstacle(other, device, accumulator, operand) is None]
        raise RuntimeError(
            f"{source}={name!r} cannot add a product of {str(operand)[6:]} into {str(accumulator)[6:]} on "
            f"{device}: {problem}. Allowed here: {', '.join(map(repr, ('auto', *can)))}"
        )
    return _selection(name, f"chosen by {source}={name!r}", accumulator, operand)


def obstacle(
    name: str, device: torch.device, accumulator_dtype: torch.dtype, operand_dtype: torch.dtype
) -> str | None:
    """Why "cuda", "cpu" or "eager" cannot multiply there; None if it can."""
    problem = backends.obstacle(name, device, accumulator_dtype, operand_dtype)
    if problem is None and name == "cuda":
        problem = torch.ops.fusedacc.gemm_problem() or None
        if problem is None and operand_dtype == torch.float32 and accumulator_dtype != torch.float32:
            problem = f"cuBLAS adds no product of float32 into {str(accumulator_dtype)[6:]}"
    return problem


def _selection(name: str, reason: str, accumulator: torch.dtype, operand: torch.dtype) -> Selection:
    if name == "eager":
        return Selection(name, "torch's product", reason, gemm_eager.accumulate_)
    if name == "cuda":
        return Selection(name, "cuBLAS into the sum", reason, _native)
    if operand == torch.bfloat16 and _multiplies_bfloat16():
        run = functools.partial(_native, bfloat16_products=True)
        if accumulator == torch.float32:
            return Selection(name, "parts of torch's bfloat16 product, added one by one", reason, run)
        return Selection(name, "oneDNN into the sum", reason, run)
    if operand.itemsize > 2 and operand == accumulator:
        return Selection(name, "BLAS into the sum", reason, _blas)
    if accumulator.itemsize > 2:
        return Selection(name, "BLAS into the sum, of operands cast to float32 in parts", reason, _native)
    return Selection(name, "BLAS into float32 copies of parts of the sum", reason, _native)


@functools.cache
def _multiplies_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 faster than float32: with AMX. By the bfloat16 instructions of
    AVX-512 alone products take longer, and without either many times as long.
    """
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled and has_amx())


def _blas(accumulator: Tensor, left: Tensor, right: Tensor, scale: Number, keep: Number) -> None:
    # The operator reads tensors without a word to the dispatcher; torch's own call costs the host less.
    if isinstance(scale, Tensor) or isinstance(keep, Tensor) or left.shape[0] in SPLIT_TOKENS:
        _native(accumulator, left, right, scale, keep)
    elif torch.is_grad_enabled():
        with torch.no_grad():
            accumulator.addmm_(left.t(), right, beta=keep, alpha=scale)
    else:
        accumulator.addmm_(left.t(), right, beta=keep, alpha=scale)


def native_multiplier(run: Run) -> int:
    """The same way of multiplying as `Multiplier` in csrc/autograd/direct.h numbers it; 0 for others."""
    if run is _blas:
        return 1
    if run is _native:
        return 2
    return 3 if isinstance(run, functools.partial) and run.func is _native else 0


def _native(
    accumulator: Tensor,
    left: Tensor,
    right: Tensor,
    scale: Number,
    keep: Number,
    bfloat16_products: bool = False,
) -> None:
    if left.shape[0] == 0:
        gemm_eager.keep_only(accumulator, keep)
        return
    operator = torch.ops.fusedacc.gemm_accumulate_.default
    numbers = *_number(scale), *_number(keep)
    if torch.is_grad_enabled():
        with torch.no_grad():
            operator(accumulator, left, right, *numbers, bfloat16_products)
    else:
        operator(accumulator, left, right, *numbers, bfloat16_products)
    bump_versions([accumulator])


def _number(value: Number) -> tuple[Tensor | None, float]:
    return (value, 1.0) if isinstance(value, Tensor) else (None, value)


def _traced(
    accumulator: Tensor, left: Tensor, right: Tensor, scale: Number, keep: Number, backend: str
) -> None:
    """The graph under `torch.compile`: one operator, or plain torch for the compiler to fuse."""
    name = _traced_name(accumulator.device, accumulator.dtype, left.dtype, backend)
    with torch.no_grad():
        if left.shape[0] == 0:
            gemm_eager.keep_only(accumulator, keep)
        elif name in ("cuda", "cpu"):
            numbers = *_number(scale), *_number(keep)
            flag = _multiplies_bfloat16_traced()
            torch.ops.fusedacc.gemm_accumulate_(accumulator, left, right, *numbers, flag)
        else:
            gemm_eager.by_parts(accumulator, left, right, scale, keep, accumulator.numel())


def _traced_name(
    device: torch.device, accumulator_dtype: torch.dtype, operand_dtype: torch.dtype, backend: str
) -> str:
    return select(device, accumulator_dtype, operand_dtype, backend).name


def _multiplies_bfloat16_traced() -> bool:
    return _multiplies_bfloat16()


# As in `plan.traced_backend`: evaluated while tracing.
_traced_name._dynamo_marked_constant = True  # type: ignore[attr-defined]
_multiplies_bfloat16_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]
