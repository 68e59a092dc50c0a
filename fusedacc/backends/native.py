"""The cpu and cuda backends: the native library's operators, which check every tensor themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import ops
from ..checks import PAIRS


class NativeBackend:
    """One device type of the native library.

    Tensors are passed as they are: the operators raise RuntimeError, before anything is modified, for
    whatever would not be safe or not be the sum asked for.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def unavailable(self) -> str | None:
        problem = ops.load_error()
        if problem is None and self.name == "cuda":
            if not ops.built_with()["cuda_architectures"]:
                return "the native library was built without CUDA (nvcc was not found, or FORCE_CUDA=0)"
            if not torch.cuda.is_available():
                return "torch sees no CUDA device"
        return problem

    def unsupported(
        self, device: torch.device, accumulator_dtype: torch.dtype, gradient_dtype: torch.dtype
    ) -> str | None:
        if device.type != self.name:
            return f"the {self.name} backend takes {self.name} tensors, not {device.type}"
        if (gradient_dtype, accumulator_dtype) not in PAIRS:
            return f"no kernel adds {gradient_dtype} into {accumulator_dtype}"
        return None

    def accumulate_(
        self,
        accumulators: Sequence[Tensor],
        gradients: Sequence[Tensor],
        scale: float | Tensor,
        overwrite: bool | Sequence[bool],
    ) -> None:
        operator = torch.ops.fusedacc.scale_accumulate_.default
        ops.call(operator, accumulators, gradients, *_scale_arguments(scale), _flags(overwrite, accumulators))

    def prepare(
        self, accumulators: Sequence[Tensor]
    ) -> Callable[[Sequence[Tensor], float | Tensor, bool | Sequence[bool]], None]:
        plan = torch.ops.fusedacc.prepare.default(accumulators)
        accumulate = torch.ops.fusedacc.accumulate_prepared_.default

        def run(gradients: Sequence[Tensor], scale: float | Tensor, overwrite: bool | Sequence[bool]) -> None:
            ops.call(accumulate, plan, gradients, *_scale_arguments(scale), _flags(overwrite, gradients))

        return run


def _scale_arguments(scale: float | Tensor) -> tuple[Tensor | None, float]:
    return (scale, 1.0) if isinstance(scale, Tensor) else (None, scale)


def _flags(overwrite: bool | Sequence[bool], tensors: Sequence[Tensor]) -> Sequence[bool]:
    """As the operators take it: none for all False, one for all, or one per tensor."""
    if isinstance(overwrite, bool):
        return (True,) if overwrite else ()
    if len(overwrite) != len(tensors):
        raise ValueError(f"overwrite has {len(overwrite)} values for {len(tensors)} tensors")
    return overwrite


cpu = NativeBackend("cpu")
cuda = NativeBackend("cuda")
