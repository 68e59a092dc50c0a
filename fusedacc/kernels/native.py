"""The cpu and cuda backends: the native library's operators, which check every tensor themselves."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import library, undispatched
from .dtypes import PAIRS

_MOST_LISTS = 200


def runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether a GPU of that capability runs what was built for an entry of TORCH_CUDA_ARCH_LIST.

    Machine code runs on its own architecture and on later ones of the same major number, that for 9.0a on 9.0
    alone; PTX is compiled by the driver for whatever is later.
    """
    match = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", architecture)
    if match is None:
        return False
    built, kind, ptx = (int(match[1]), int(match[2])), match[3], match[4]
    if kind == "a":
        return capability == built
    return capability >= built and (capability[0] == built[0] or (ptx is not None and not kind))


class NativeBackend:
    """One device type of the native library.

    Tensors are passed as they are: the operators raise RuntimeError, before anything is modified, for
    whatever would not be safe or not be the sum asked for.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._on_cpu = name == "cpu"

    def unavailable(self) -> str | None:
        problem = library.load_error()
        if problem is None and self.name == "cuda":
            if torch.version.hip is not None:
                return "this torch is for ROCm, which has no CUDA kernels"
            if not library.built_with()["cuda_architectures"]:
                return "the native library was built without CUDA (nvcc was not found, or FORCE_CUDA=0)"
            if not torch.cuda.is_available():
                return "torch sees no CUDA device"
        return problem

    def unsupported(
        self, device: torch.device, accumulator_dtype: torch.dtype, gradient_dtype: torch.dtype
    ) -> str | None:
        if device.type != self.name:
            return f"the {self.name} backend takes {self.name} tensors, not {device.type}"
        if device.type == "cuda" and self.unavailable() is None:
            capability, built = (
                torch.cuda.get_device_capability(device),
                library.built_with()["cuda_architectures"],
            )
            if not any(runs_on(architecture, capability) for architecture in built):
                number = ".".join(map(str, capability))
                return f"the native library was built for {', '.join(built)}, and {device} is of {number}"
        if (gradient_dtype, accumulator_dtype) not in PAIRS:
            return f"no kernel adds {gradient_dtype} into {accumulator_dtype}"
        return None

    def accumulate_(
        self,
        accumulators: Sequence[Tensor],
        gradients: Sequence[Tensor],
        scale: float | Tensor,
        overwrite: bool | Sequence[bool],
        keep: float | Tensor = 1.0,
    ) -> None:
        if self._on_cpu and undispatched.accumulate(
            accumulators, gradients, scale, overwrite, keep, None, False, False
        ):
            return
        operator = torch.ops.fusedacc.scale_accumulate_.default
        flags = _flags(overwrite, accumulators)
        library.call(operator, accumulators, gradients, *_factor(scale), flags, *_kept(keep))

    def prepare(self, accumulators: Sequence[Tensor]) -> Bound:
        return Bound(accumulators, self._on_cpu)

    def norm_partials(self, tensors: Sequence[Tensor], norm_type: float) -> Tensor:
        if self._on_cpu:
            found = undispatched.norm_partials(tensors, norm_type)
            if found is not False:
                return found
        return _unrecorded(torch.ops.fusedacc.norm_partials.default, tensors, norm_type)

    def finish_norm(
        self, partials: Sequence[Tensor], norm_type: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        # A launch has room for this many.
        if len(partials) > _MOST_LISTS:
            partials = [torch.cat(list(partials))]
        return torch.ops.fusedacc.finish_norm.default(partials, norm_type, dtype == torch.float64)

    def accumulate_with_norm_(
        self,
        accumulators: Sequence[Tensor],
        gradients: Sequence[Tensor],
        scale: float | Tensor,
        overwrite: bool | Sequence[bool],
        norm_type: float,
        keep: float | Tensor = 1.0,
    ) -> Tensor:
        if self._on_cpu:
            found = undispatched.accumulate(
                accumulators, gradients, scale, overwrite, keep, norm_type, False, False
            )
            if found is not False:
                return found
        operator = torch.ops.fusedacc.scale_accumulate_norm_.default
        flags = _flags(overwrite, accumulators)
        factors = *_factor(scale), flags, norm_type, *_kept(keep)
        return _unrecorded(operator, accumulators, gradients, *factors)

    def accumulate_rows_(
        self,
        table: Tensor,
        indices: Tensor,
        gradients: Tensor,
        scale: float | Tensor,
        padding: int,
        by_frequency: bool,
    ) -> None:
        operator = torch.ops.fusedacc.accumulate_rows_.default
        operator(table, indices, gradients, *_factor(scale), padding, by_frequency)


class Bound:
    """Accumulators with their checks done, as a table that the operators read."""

    def __init__(self, accumulators: Sequence[Tensor], on_cpu: bool) -> None:
        self._plan = torch.ops.fusedacc.prepare.default(accumulators)
        self._undispatched = on_cpu and undispatched.prepare(accumulators, ())

    def __call__(
        self,
        gradients: Sequence[Tensor],
        scale: float | Tensor,
        overwrite: bool | Sequence[bool],
        keep: float | Tensor = 1.0,
    ) -> None:
        if self._undispatched and self._undispatched(gradients, scale, overwrite, keep, None):
            return
        operator = torch.ops.fusedacc.accumulate_prepared_.default
        flags = _flags(overwrite, gradients)
        library.call(operator, self._plan, gradients, *_factor(scale), flags, *_kept(keep))

    def with_norm(
        self,
        gradients: Sequence[Tensor],
        scale: float | Tensor,
        overwrite: bool | Sequence[bool],
        norm_type: float,
        keep: float | Tensor = 1.0,
    ) -> Tensor:
        if self._undispatched:
            found = self._undispatched(gradients, scale, overwrite, keep, norm_type)
            if found is not False:
                return found
        operator = torch.ops.fusedacc.accumulate_prepared_norm_.default
        flags = _flags(overwrite, gradients)
        factors = *_factor(scale), flags, norm_type, *_kept(keep)
        return _unrecorded(operator, self._plan, gradients, *factors)


def _unrecorded(operator: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """A call whose result would otherwise require a gradient where an argument does."""
    with torch.no_grad():
        return library.call(operator, *arguments)


def _factor(value: float | Tensor) -> tuple[Tensor | None, float]:
    """As the operators take it: a tensor or a number."""
    return (value, 1.0) if isinstance(value, Tensor) else (None, value)


def _kept(keep: float | Tensor) -> tuple[Tensor | None, float] | tuple[()]:
    """As the operators take it: left to their default of 1 where it is, since each argument takes time."""
    return (keep, 1.0) if isinstance(keep, Tensor) else () if keep == 1.0 else (None, keep)


def _flags(overwrite: bool | Sequence[bool], tensors: Sequence[Tensor]) -> Sequence[bool]:
    """As the operators take it: none for all False, one for all, or one per tensor."""
    if isinstance(overwrite, bool):
        return (True,) if overwrite else ()
    if len(overwrite) != len(tensors):
        raise ValueError(f"overwrite has {len(overwrite)} values for {len(tensors)} tensors")
    return overwrite


cpu = NativeBackend("cpu")
cuda = NativeBackend("cuda")
