"""The eager backend: plain torch on any device. Fallback, and path for tensor subclasses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import reference
from .registry import Backend


class EagerBackend(Backend):
    """`reference.scale_accumulate_` as a backend: one to three torch operations per tensor."""

    name = "eager"

    def unavailable(self) -> str | None:
        return None

    def unsupported(
        self, device: torch.device, accumulator_dtype: torch.dtype, gradient_dtype: torch.dtype
    ) -> str | None:
        return None

    def accumulate_(
        self,
        accumulators: Sequence[Tensor],
        gradients: Sequence[Tensor],
        scale: float | Tensor,
        overwrite: bool | Sequence[bool],
        keep: float | Tensor = 1.0,
    ) -> None:
        reference.scale_accumulate_(accumulators, gradients, scale, overwrite, keep)

    def prepare(self, accumulators: Sequence[Tensor]) -> Bound:
        return Bound(self, accumulators)

    def norm_partials(self, tensors: Sequence[Tensor], norm_type: float) -> Tensor:
        return reference.norm_partials(tensors, norm_type)

    def finish_norm(
        self, partials: Sequence[Tensor], norm_type: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        return reference.finish_norm(partials, norm_type, dtype)

    def accumulate_rows_(
        self,
        table: Tensor,
        indices: Tensor,
        gradients: Tensor,
        scale: float | Tensor,
        padding: int,
        by_frequency: bool,
    ) -> None:
        reference.accumulate_rows_(table, indices, gradients, scale, padding, by_frequency)


class Bound:
    """Accumulators, and nothing prepared."""

    def __init__(self, owner: EagerBackend, accumulators: Sequence[Tensor]) -> None:
        self._backend = owner
        self._accumulators = accumulators

    def __call__(
        self,
        gradients: Sequence[Tensor],
        scale: float | Tensor,
        overwrite: bool | Sequence[bool],
        keep: float | Tensor = 1.0,
    ) -> None:
        self._backend.accumulate_(self._accumulators, gradients, scale, overwrite, keep)

    def with_norm(
        self,
        gradients: Sequence[Tensor],
        scale: float | Tensor,
        overwrite: bool | Sequence[bool],
        norm_type: float,
        keep: float | Tensor = 1.0,
    ) -> Tensor:
        return self._backend.accumulate_with_norm_(
            self._accumulators, gradients, scale, overwrite, norm_type, keep
        )


eager = EagerBackend()
