"""The cpu and cuda backends: the operators of libfusedacc.so, which check every tensor themselves."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import installation, library
from .dtypes import PAIRS, Flags, Number, Tensors
from .registry import Backend, Run
from .rounding import Noise

_MOST_LISTS = 200


def runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Return whether a GPU of that capability runs code built for an entry of TORCH_CUDA_ARCH_LIST.

    Machine code runs on its own architecture and later ones of the same major number (for 9.0a, on 9.0 only).
    The driver compiles PTX for any later architecture.
    """
    match = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", architecture)
    if match is None:
        return False
    built = (int(match[1]), int(match[2]))
    kind = match[3]
    ptx = match[4]
    same_major = capability[0] == built[0] or (ptx is not None and not kind)
    return capability == built or (capability > built and kind != "a" and same_major)


def _obstacle(
    name: str, device: torch.device, accumulator_dtype: torch.dtype, gradient_dtype: torch.dtype
) -> str | None:
    problem = library.load_error()
    if problem is not None:
        return problem
    built = library.built_with()
    if name == "cuda":
        if torch.version.hip is not None:
            return "this torch is for ROCm, which has no CUDA kernels"
        if not torch.cuda.is_available():
            return "torch sees no CUDA device"
        if not built["cuda_architectures"]:
            return (
                "the native library was built without CUDA (nvcc was not found, or FORCE_CUDA=0). "
                f"To build it with CUDA, install nvcc and {installation.how_to_build()}"
            )
    if device.type != name:
        return f"the {name} backend takes {name} tensors, not {device.type}"
    if name == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if not any(runs_on(architecture, capability) for architecture in built["cuda_architectures"]):
            number = ".".join(map(str, capability))
            architectures = ", ".join(built["cuda_architectures"])
            return f"the native library was built for {architectures}, and {device} is of {number}"
        problem = library.launch_problem(
            torch.cuda.current_device() if device.index is None else device.index
        )
        if problem is not None:
            toolkit = built["cuda"]
            return (
                f"CUDA refuses kernels on {device}: {problem}. The native library was built with CUDA "
                f"{toolkit}, which needs a driver that is new enough; update the driver, or build with an "
                "older toolkit"
            )
    if (gradient_dtype, accumulator_dtype) not in PAIRS:
        return f"no kernel adds {gradient_dtype} into {accumulator_dtype}"
    return None


def _run(
    operator: Any,
    accumulators: Tensors | Tensor,
    gradients: Tensors,
    scale: Number,
    overwrite: Flags,
    beta: Number = 1.0,
    noise: Noise | None = None,
) -> None:
    factors = *as_argument(scale), _flags(overwrite, gradients)
    # Pass no default values: each argument costs time.
    last: tuple[Any, ...] = () if not isinstance(beta, Tensor) and beta == 1.0 else as_argument(beta)
    if noise is not None:
        last = *as_argument(beta), *noise
    library.call(operator, accumulators, gradients, *factors, *last)


def _accumulate_(accumulators: Tensors, *arguments: Any, **named: Any) -> None:
    _run(torch.ops.fusedacc.scale_accumulate_.default, accumulators, *arguments, **named)


def _prepare(accumulators: Tensors) -> Run:
    """Check accumulators once and pack them as a table for the operators."""
    plan = torch.ops.fusedacc.prepare.default(accumulators)
    return functools.partial(_run, torch.ops.fusedacc.accumulate_prepared_.default, plan)


def _norm_partials(tensors: Tensors, norm_type: float) -> Tensor:
    with torch.no_grad():
        return library.call(torch.ops.fusedacc.norm_partials.default, tensors, norm_type)


def _finish_norm(partials: Tensors, norm_type: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    # A launch takes at most so many lists.
    if len(partials) > _MOST_LISTS:
        partials = [torch.cat(list(partials))]
    return torch.ops.fusedacc.finish_norm.default(partials, norm_type, dtype == torch.float64)


def _accumulate_rows_on_cpu_(
    table: Tensor,
    indices: Tensor,
    gradients: Tensor,
    scale: Number,
    padding: int,
    by_frequency: bool,
) -> None:
    operator = torch.ops.fusedacc.accumulate_rows_.default
    operator(table, indices, gradients, *as_argument(scale), padding, by_frequency)


def as_argument(value: Number) -> tuple[Tensor | None, float]:
    """Return a factor as the operators take it: a tensor or a number."""
    return (value, 1.0) if isinstance(value, Tensor) else (None, value)


def _flags(overwrite: Flags, tensors: Tensors) -> Sequence[bool]:
    """Return flags as the operators take them: none for all False, one for all, or one per tensor."""
    if isinstance(overwrite, bool):
        return (True,) if overwrite else ()
    if len(overwrite) != len(tensors):
        raise ValueError(f"overwrite has {len(overwrite)} values for {len(tensors)} tensors")
    return overwrite


def _backend(name: str, accumulate_rows_: Callable[..., None] | None) -> Backend:
    return Backend(
        name=name,
        obstacle=functools.partial(_obstacle, name),
        accumulate_=_accumulate_,
        prepare=_prepare,
        norm_partials=_norm_partials,
        finish_norm=_finish_norm,
        accumulate_rows_=accumulate_rows_,
    )


# The operators check the tensors themselves, and raise RuntimeError before anything is modified.
cpu = _backend("cpu", _accumulate_rows_on_cpu_)
cuda = _backend("cuda", None)
