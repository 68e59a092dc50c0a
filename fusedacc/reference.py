"""The semantics of an accumulation pass in plain torch: the oracle, and the eager backend's arithmetic.

Rounding. float32 and float64 sums are one fused multiply-add: torch's own `add_(alpha=)` and `addcmul_`
contract to one on every device with the instruction (all CUDA devices, CPUs with AVX2). 16-bit sums are
computed in float32 and rounded once to the accumulator. Two exceptions, where the product is rounded before
it is added: a CPU without the instruction, and, in torch's CPU loops, an expanded gradient.

Memory. Nothing is allocated for float32 and float64 accumulators beyond the cast copy that torch makes on a
CPU of a 16-bit gradient (one tensor at a time); a 16-bit accumulator with a scale other than 1 takes a
float32 temporary of its size, since torch would round the scale and the product to 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .checks import computation_dtype, overwrite_flags


def _overwrite(accumulator: Tensor, gradient: Tensor, scale: float | Tensor) -> None:
    wide = computation_dtype(accumulator.dtype)
    if not isinstance(scale, Tensor) and scale == 1.0:
        accumulator.copy_(gradient)
    elif accumulator.dtype == wide:
        accumulator.copy_(gradient)
        accumulator.mul_(scale)
    else:
        product = gradient.to(wide)
        accumulator.copy_(product.mul(scale) if product is gradient else product.mul_(scale))


def _add(accumulator: Tensor, gradient: Tensor, scale: float | Tensor) -> None:
    if not isinstance(scale, Tensor) and scale == 1.0:
        accumulator.add_(gradient)
        return
    # The accumulator itself where it is wide already.
    total = accumulator.to(computation_dtype(accumulator.dtype))
    if isinstance(scale, Tensor):
        total.addcmul_(gradient, scale)
    else:
        total.add_(gradient, alpha=scale)
    if total is not accumulator:
        accumulator.copy_(total)


def scale_accumulate_(
    accumulators: Sequence[Tensor],
    gradients: Sequence[Tensor],
    scale: float | Tensor,
    overwrite: bool | Sequence[bool],
) -> None:
    """accumulator <- beta * accumulator + scale * gradient for each pair; beta = 0 where overwritten, else 1.

    Args:
        accumulators: tensors that do not overlap, of any strides; float64, float32, bfloat16 or float16.
        gradients: one of the same shape and device for each, in a dtype that `checks.PAIRS` pairs with it.
        scale: a float, or a 0-dim floating tensor on the tensors' device (read on the device: no
            synchronisation).
        overwrite: one flag for all or one per tensor; an overwritten accumulator is not read.

    No input is checked here: see `checks.check_lists`.
    """
    scales: dict[torch.dtype, float | Tensor] = {}
    with torch.no_grad():
        for accumulator, gradient, flag in zip(
            accumulators, gradients, overwrite_flags(overwrite, len(accumulators)), strict=True
        ):
            wide = computation_dtype(accumulator.dtype)
            if wide not in scales:
                scales[wide] = scale.to(wide) if isinstance(scale, Tensor) else float(scale)
            if flag:
                _overwrite(accumulator, gradient, scales[wide])
            else:
                _add(accumulator, gradient, scales[wide])
