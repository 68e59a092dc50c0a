"""Fake implementations of `torch.ops.fusedacc.*`: shapes and errors without data, for torch's compiler."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .constants import CHUNK_ELEMENTS, plan_words


def _check_fake(accumulators: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    if len(accumulators) != len(gradients):
        raise RuntimeError(f"fusedacc: {len(accumulators)} accumulators but {len(gradients)} gradients")
    for index, (accumulator, gradient) in enumerate(zip(accumulators, gradients, strict=True)):
        for what, of_sum, of_gradient in (
            ("device", accumulator.device, gradient.device),
            ("shape", accumulator.shape, gradient.shape),
        ):
            if of_sum != of_gradient:
                raise RuntimeError(
                    f"fusedacc: gradients[{index}] has {what} {of_gradient} but its accumulator has {of_sum}"
                )


def _check_not_meta(plan: Tensor, gradients: Sequence[Tensor], *factors: Tensor | None) -> None:
    """A meta tensor among real ones brings a call here; without this it would return with nothing done."""
    others = [factor for factor in factors if factor is not None]
    if plan.device.type != "meta" and any(tensor.device.type == "meta" for tensor in (*gradients, *others)):
        raise RuntimeError("fusedacc: a gradient, the scale or keep is on meta")


def _fake_partials(tensors: Sequence[Tensor]) -> Tensor:
    chunks = sum((tensor.numel() + CHUNK_ELEMENTS - 1) // CHUNK_ELEMENTS for tensor in tensors)
    return torch.empty(chunks, dtype=torch.float64, device=tensors[0].device if tensors else "cpu")


def register() -> None:
    """Give the operators of the library, which is loaded, their fake implementations. Once a process."""

    @torch.library.register_fake("fusedacc::scale_accumulate_")
    def _(
        accumulators: list[Tensor],
        gradients: list[Tensor],
        scale_tensor: Tensor | None = None,
        scale: float = 1.0,
        overwrite: Sequence[bool] = (),
        keep_tensor: Tensor | None = None,
        keep: float = 1.0,
    ) -> None:
        _check_fake(accumulators, gradients)
        if accumulators:
            _check_not_meta(accumulators[0], gradients, scale_tensor, keep_tensor)

    @torch.library.register_fake("fusedacc::prepare")
    def _(accumulators: list[Tensor]) -> Tensor:
        return torch.empty(plan_words(accumulators), dtype=torch.int64, device="cpu")

    @torch.library.register_fake("fusedacc::accumulate_prepared_")
    def _(
        plan: Tensor,
        gradients: list[Tensor],
        scale_tensor: Tensor | None = None,
        scale: float = 1.0,
        overwrite: Sequence[bool] = (),
        keep_tensor: Tensor | None = None,
        keep: float = 1.0,
    ) -> None:
        _check_not_meta(plan, gradients, scale_tensor, keep_tensor)

    @torch.library.register_fake("fusedacc::scale_accumulate_norm_")
    def _(
        accumulators: list[Tensor],
        gradients: list[Tensor],
        scale_tensor: Tensor | None = None,
        scale: float = 1.0,
        overwrite: Sequence[bool] = (),
        norm_type: float = 2.0,
        keep_tensor: Tensor | None = None,
        keep: float = 1.0,
    ) -> Tensor:
        _check_fake(accumulators, gradients)
        if accumulators:
            _check_not_meta(accumulators[0], gradients, scale_tensor, keep_tensor)
        return _fake_partials(accumulators)

    @torch.library.register_fake("fusedacc::accumulate_prepared_norm_")
    def _(
        plan: Tensor,
        gradients: list[Tensor],
        scale_tensor: Tensor | None = None,
        scale: float = 1.0,
        overwrite: Sequence[bool] = (),
        norm_type: float = 2.0,
        keep_tensor: Tensor | None = None,
        keep: float = 1.0,
    ) -> Tensor:
        _check_not_meta(plan, gradients, scale_tensor, keep_tensor)
        return _fake_partials(gradients)

    @torch.library.register_fake("fusedacc::norm_partials")
    def _(tensors: list[Tensor], norm_type: float = 2.0) -> Tensor:
        if tensors:
            _check_not_meta(tensors[0], tensors)
        return _fake_partials(tensors)

    @torch.library.register_fake("fusedacc::finish_norm")
    def _(partials: list[Tensor], norm_type: float = 2.0, wide: bool = False) -> tuple[Tensor, Tensor]:
        device = partials[0].device if partials else "cpu"
        dtype = torch.float64 if wide else torch.float32
        return torch.empty((), dtype=dtype, device=device), torch.empty((), device=device)

    @torch.library.register_fake("fusedacc::gemm_accumulate_")
    def _(
        accumulator: Tensor,
        left: Tensor,
        right: Tensor,
        scale_tensor: Tensor | None = None,
        scale: float = 1.0,
        keep_tensor: Tensor | None = None,
        keep: float = 1.0,
        way: int = 0,
    ) -> None:
        torch._check(accumulator.dim() == left.dim() == right.dim() == 2, lambda: "fusedacc: not matrices")
        for size, other in (
            (left.shape[0], right.shape[0]),
            (left.shape[1], accumulator.shape[0]),
            (right.shape[1], accumulator.shape[1]),
        ):
            torch._check(
                size == other,
                lambda: (
                    f"fusedacc: left {tuple(left.shape)} and right {tuple(right.shape)} do not go into "
                    f"accumulator {tuple(accumulator.shape)}"
                ),
            )
        others = [tensor for tensor in (left, right, scale_tensor, keep_tensor) if tensor is not None]
        if any(tensor.device != accumulator.device for tensor in others):
            raise RuntimeError("fusedacc: left, right, scale or keep is not on the accumulator's device")

    @torch.library.register_fake("fusedacc::accumulate_rows_")
    def _(
        table: Tensor,
        indices: Tensor,
        gradients: Tensor,
        scale_tensor: Tensor | None = None,
        scale: float = 1.0,
        padding: int = -1,
        by_frequency: bool = False,
    ) -> None:
        wanted = (indices.shape[0], table.shape[1])
        if gradients.shape != wanted:
            raise RuntimeError(f"fusedacc: gradients has shape {gradients.shape}; it must be {wanted}")
        _check_not_meta(table, [indices, gradients], scale_tensor)
