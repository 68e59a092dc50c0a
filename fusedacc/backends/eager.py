"""The eager backend: plain torch on any device. Fallback, and path for tensor subclasses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import reference


class EagerBackend:
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
    ) -> None:
        reference.scale_accumulate_(accumulators, gradients, scale, overwrite)

    def prepare(
        self, accumulators: Sequence[Tensor]
    ) -> Callable[[Sequence[Tensor], float | Tensor, bool | Sequence[bool]], None]:
        def run(gradients: Sequence[Tensor], scale: float | Tensor, overwrite: bool | Sequence[bool]) -> None:
            reference.scale_accumulate_(accumulators, gradients, scale, overwrite)

        return run


backend = EagerBackend()
