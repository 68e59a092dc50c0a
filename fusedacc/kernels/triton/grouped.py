"""Products of groups of rows, each into a matrix of its own, by one launch: experts' weight gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import flops, launch_events
from ..dtypes import computation_dtype
from ..rounding import BLOCK, Noise
from . import address_table as shared

Number = float | Tensor


def grouped_accumulate_(
    accumulator: Tensor,
    left: Tensor,
    right: Tensor,
    offsets: Tensor,
    scale: Number,
    keep: Number,
    noise: Noise | None = None,
) -> None:
    """accumulator[e] <- keep * accumulator[e] + scale * left[s_e:t_e]^T right[s_e:t_e] for all experts.

    Summed in float32 (float64 for float64) and rounded once; the same bits on every run. float32 operands are
    multiplied as torch's setting for products of float32 has it. The host waits for nothing. An operand whose
    rows have gaps is copied; nothing else is allocated.

    Args:
        accumulator: [E, M, N], each matrix with rows or columns without gaps.
        left: [S, M]; right: [S, N], of left's dtype. What they hold from `offsets[-1]` on is not read.
        offsets: int32 [E], on the device: t_e, where the rows of expert e end; s_e is t_(e-1), or 0.
        scale: a number, or a 0-dim floating tensor on the device, read there.
        keep: likewise. Where it is 0, the accumulator is not read, and experts without rows become zeros.
        noise: with it, the accumulator is bfloat16 and is rounded stochastically; one stream.

    Raises:
        RuntimeError: a matrix of the accumulator has gaps in rows and in columns.
    """
    from . import grouped_kernels as kernels

    if not _has_whole_rows(accumulator):
        if not _has_whole_rows(accumulator.mT):
            raise RuntimeError(
                f"accumulator has strides {accumulator.stride()}: one of the last two must be 1"
            )
        accumulator, left, right = accumulator.mT, right, left
    experts, rows, columns = accumulator.shape
    block_rows, block_columns, block_tokens, warps = kernels.TILES[left.element_size()]
    programs = experts * -(-rows // block_rows) * -(-columns // block_columns)
    if programs == 0:
        return
    left, right = (each if _has_whole_rows(each) else each.contiguous() for each in (left, right))
    wide = computation_dtype(accumulator.dtype)
    seed, stream = (0, 0) if noise is None else (noise.seed, noise.streams[0])
    aligned = all(stride % BLOCK == 0 for stride in accumulator.stride()[:2])
    with shared.on_device(accumulator.device):
        kernels.grouped_accumulate[(programs,)](
            accumulator.detach(),
            left.detach(),
            right.detach(),
            offsets.contiguous(),
            _argument(scale, wide, accumulator.device),
            _argument(keep, wide, accumulator.device),
            rows,
            columns,
            left.shape[0],
            accumulator.stride(0),
            accumulator.stride(1),
            left.stride(0),
            right.stride(0),
            seed,
            stream,
            scale_on_device=isinstance(scale, Tensor) or wide == torch.float64,
            keep_on_device=isinstance(keep, Tensor) or wide == torch.float64,
            wide=shared.triton_dtype(wide),
            precision=_precision(),
            block_rows=block_rows,
            block_columns=block_columns,
            block_tokens=block_tokens,
            noisy=noise is not None,
            eights=noise is not None and aligned,
            num_warps=warps,
        )
    flops.show_launch(left, right)
    if launch_events.watching:
        launch_events.launched("triton::grouped_accumulate", accumulator, left, right, offsets, scale, keep)


def _has_whole_rows(tensor: Tensor) -> bool:
    return tensor.stride(-1) == 1 or tensor.shape[-1] <= 1


def _argument(number: Number, wide: torch.dtype, device: torch.device) -> Number:
    """Triton takes numbers as float32; those of float64 go to the device as the argument of a fill."""
    if isinstance(number, Tensor):
        return number.detach()
    return torch.full((), number, dtype=wide, device=device) if wide == torch.float64 else float(number)


def _precision() -> str:
    """How float32 operands are multiplied: torch's setting, which both its interfaces let be read here."""
    allowed = torch.version.hip is None and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if allowed else "ieee"
