"""The list-level API: one fused pass over lists of tensors, for custom training loops.

Calls do little in Python on purpose: a check per tensor would cost more than the pass over small tensors. The
compiled operators check, and only what they refuse is checked again here for the error message.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from .kernels import checks, norms, reference
from .kernels.dtypes import Flags, Number, Tensors
from .kernels.lists import BackendShare, PreparedAccumulation, bump_versions, is_traced_natively, run_parts
from .kernels.native import as_argument
from .kernels.rounding import NEAREST, Noise, noise_for

__all__ = ["prepare", "scale_accumulate_", "scale_cast_", "total_norm"]


def scale_accumulate_(
    accumulators: Sequence[Tensor],
    gradients: Sequence[Tensor],
    scale: float | Tensor = 1.0,
    *,
    overwrite: bool | Sequence[bool] = False,
    rounding: str = "nearest",
    seed: int | None = None,
    offset: int | None = None,
    backend: str = "auto",
) -> None:
    """accumulator <- beta * accumulator + scale * gradient for each pair, in one pass per device.

    beta is 1, or 0 where `overwrite` is true. Sums are computed in float32 (float64 for float64 accumulators)
    by one fused multiply-add, then rounded to the accumulator's dtype: to nearest even, or stochastically.
    Autograd does not record it; the accumulators' versions are bumped.

    Args:
        accumulators: floating tensors, modified in place. Any strides without overlap; no two share memory.
        gradients: one per accumulator, of the same shape and device, with any strides. Dtype pairs as in
            `kernels.dtypes.PAIRS`; pairs and devices may be mixed in one call. A gradient may be its
            accumulator (in-place scaling) and share memory with no other.
        scale: a float, or a 0-dim floating tensor on the accumulators' device, read there without a
            synchronization. It is rounded to the computation's dtype.
        overwrite: whether accumulators are written without being read: a bool, or one per tensor.
        rounding: "nearest", or "stochastic" for accumulators of bfloat16: up or down at random, so that sums
            are right on average. Values of bfloat16 do not change; finite values stay finite.
        seed: of the random bits, 0 to 2**63 - 1; None: `torch.initial_seed()`. Bits depend only on the seed,
            the accumulator's index, `offset` and the element's place in memory.
        offset: number of this addition, 0 to 2**31 - 1; None: 0. Two additions with one offset have the same
            errors.
        backend: "auto", "cuda", "triton", "cpu" or "eager". "auto" selects the first that can run, or the one
            that the environment variable FUSEDACC_BACKEND names.

    Raises:
        TypeError: a tensor is not dense and floating, a dtype pair is not supported, a stochastically rounded
            sum is not bfloat16, or scale, overwrite, seed or offset has a wrong type. The message names the
            argument and the index.
        ValueError: counts, shapes or devices do not match, memory overlaps, the rounding or backend is
            unknown, or seed or offset is out of range or given with rounding="nearest".
        RuntimeError: the requested backend cannot run here.

    When an error is raised, no tensor has been modified.
    """
    noise = None
    if rounding != NEAREST or seed is not None or offset is not None:
        noise = noise_for(accumulators, rounding, seed, offset)
    if torch.compiler.is_compiling():
        _traced(accumulators, gradients, scale, overwrite, backend, noise)
        return

    def run(part: BackendShare) -> None:
        own = part.of(accumulators), part.of(gradients), scale, part.of(overwrite)
        part.backend.accumulate_(*own, noise=part.noise_of(noise))

    def check() -> None:
        checks.check_lists(accumulators, gradients, scale, overwrite)

    run_parts(accumulators, gradients, backend, check, run)
    bump_versions(accumulators)


def _traced(
    accumulators: Tensors,
    gradients: Tensors,
    scale: Number,
    overwrite: Flags,
    backend: str,
    noise: Noise | None,
) -> None:
    """The graph under `torch.compile`: one operator per device, or plain torch for the compiler to fuse.

    Tracing reads no data and no addresses, so overlap is detected only when the compiled operator runs.
    """
    flags = checks.overwrite_flags(overwrite, len(accumulators))
    for device in dict.fromkeys(tensor.device for tensor in accumulators):
        chosen = [index for index, tensor in enumerate(accumulators) if tensor.device == device]
        sums = [accumulators[index] for index in chosen]
        fresh = [gradients[index] for index in chosen]
        written = [flags[index] for index in chosen]
        own = None if noise is None else Noise(noise.seed, [noise.streams[index] for index in chosen])
        if is_traced_natively(device, sums[0].dtype, fresh[0].dtype, backend):
            last = () if own is None else (None, 1.0, *own)
            torch.ops.fusedacc.scale_accumulate_(sums, fresh, *as_argument(scale), written, *last)
        else:
            reference.scale_accumulate_(sums, fresh, scale, written, noise=own)


def prepare(
    accumulators: Sequence[Tensor],
    *,
    rounding: str = "nearest",
    seed: int | None = None,
    offset: int | None = None,
    backend: str = "auto",
) -> PreparedAccumulation:
    """Bind accumulators to their backends once: `plan(gradients, scale=1.0, *, overwrite=False)`.

    The plan does the same as `scale_accumulate_`, with the accumulators' checks, pointers and groups cached.

    Args:
        accumulators: as for `scale_accumulate_`. The plan keeps their memory alive and writes to it. After a
            swap of storage (`.data = ...`, `resize_`), prepare again.
        rounding: as for `scale_accumulate_`.
        seed: as for `scale_accumulate_`.
        offset: number of the plan's first addition; later ones count up (`plan.offset` is the next).
        backend: as for `scale_accumulate_`, selected now.

    Raises:
        TypeError, ValueError, RuntimeError: as `scale_accumulate_`.
    """
    noise = noise_for(accumulators, rounding, seed, offset)
    return PreparedAccumulation(accumulators, backend, None if noise is None else noise.seed, offset or 0)


def total_norm(tensors: Sequence[Tensor], norm_type: float = 2.0, *, backend: str = "auto") -> Tensor:
    """Return the norm of all elements of all tensors, in one read.

    Every run and every number of threads gives the same bits: sums of fixed chunks, in float32 or wider, are
    combined in float64. Squares neither overflow nor underflow: the norm is infinite or nan only if an
    element is, or if it exceeds the result's dtype. Autograd does not record it.

    Args:
        tensors: floating tensors (float64, float32, bfloat16, float16) of any strides, devices and dtypes.
        norm_type: 2.0 or inf.
        backend: as for `scale_accumulate_`.

    Returns:
        A 0-dim tensor on the first GPU that has a tensor, else on the first tensor's device; float64 if one
        of the tensors is, else float32. 0 without elements. Nothing waits for a device.

    Raises:
        TypeError: a tensor is not dense with one of those dtypes.
        ValueError: `norm_type` or the backend is unknown.
        RuntimeError: the requested backend cannot run here.
    """
    return norms.norm_and_nonfinite(tensors, norm_type, backend)[0]


def scale_cast_(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], scale: float | Tensor, *, backend: str = "auto"
) -> None:
    """output <- scale * input for each pair, cast to the output's dtype, in one pass per device.

    As `scale_accumulate_` with overwrite=True: outputs are its accumulators and inputs its gradients, with
    the same dtype pairs, rounding, overlap, scale, backend and errors. An input may be its output.
    """
    try:
        scale_accumulate_(outputs, inputs, scale, overwrite=True, backend=backend)
    except (TypeError, ValueError) as error:
        said = str(error)
        for word, own in (("a gradient", "an input"), ("gradient", "input"), ("accumulator", "output")):
            said = re.sub(rf"\b{word}", own, said)
        raise type(error)(said) from None
