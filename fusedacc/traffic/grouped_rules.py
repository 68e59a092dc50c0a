"""The rules of products of grouped rows: an expert without rows costs no read of its matrix."""

from __future__ import annotations

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .operands import Call, Operand, bytes_of, has_data, reads, whole, writes


def _shares(offsets: Tensor, rows: int) -> tuple[float, float] | None:
    """Of the experts and of the rows, the share that is worked on; a GPU is waited for."""
    if not has_data(offsets):
        return None
    with _disable_current_modes():  # the meter's own look is nobody's traffic
        ends = offsets.tolist()
    used = sum(end > start for start, end in zip([0, *ends], ends, strict=False))
    return used / max(len(ends), 1), (ends[-1] if ends else 0) / max(rows, 1)


def product(call: Call) -> list[Operand] | None:
    """aten::_grouped_mm: of rows with their experts' matrices, or of rows and rows into all of these."""
    left, right, offsets = call["self"], call["mat2"], call["offs"]
    if offsets is None or left.dim() != 2:
        return whole(call)
    shares = _shares(offsets, left.shape[0 if right.dim() == 3 else 1])
    if shares is None:
        return None
    experts, rows = shares
    read = {"self": round(bytes_of(left) * rows)}
    read["mat2"] = round(bytes_of(right) * (experts if right.dim() == 3 else rows))
    found = whole(call, partial=read)
    if right.dim() == 3:
        for operand in found:
            operand.written = round(operand.written * rows)
    return found


def accumulation(
    accumulator: Tensor,
    left: Tensor,
    right: Tensor,
    offsets: Tensor,
    scale: float | Tensor | None,
    keep: float | Tensor,
) -> list[Operand] | None:
    """Products of rows are added into the matrices of their experts; all are written where none is kept."""
    shares = _shares(offsets, left.shape[0])
    if shares is None:
        return None
    experts, rows = shares
    with _disable_current_modes():
        kept = float(keep)
    (total,) = writes([accumulator])
    if kept == 1:
        total.written = round(total.written * experts)
    total.read = 0 if kept == 0 else total.written
    operands = [Operand(each, round(bytes_of(each) * rows)) for each in (left, right)]
    return [total, *operands, *reads(offsets, scale, keep)]
