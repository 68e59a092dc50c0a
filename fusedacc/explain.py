"""Why each parameter's gradient goes the way it goes, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from . import checks, traffic
from .arena import Arena
from .hooks import multi_process
from .slot import Slot
from .window import Window

HEADER = ("parameter", "shape", "path", "backend", "gradient", "sum", "bytes first", "bytes later", "why")


def explain(slots: Sequence[Slot], window: Window, arena: Arena) -> str:
    """One row per parameter: path, backend, dtypes, and bytes per element and micro-batch, and why."""
    rows = [HEADER, *(_row(slot, window, arena) for slot in slots)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    loop = "manual loop" if not window.counted else f"counted loop, {window.steps} micro-batches per update"
    note = (
        "Bytes are read and written per element in one micro-batch, the write of the gradient included; "
        "'first' where the window has no sum yet."
    )
    return "\n".join([f"{loop}, reduction {window.reduction!r}", *lines, note])


def _row(slot: Slot, window: Window, arena: Arena) -> tuple[str, ...]:
    param = slot.param
    path, backend, why = _route(slot, arena)
    shape = "x".join(map(str, param.shape)) or "scalar"
    dtypes = (str(param.dtype)[6:], str(slot.accumulate_dtype)[6:])
    if path in ("none", "stock") and not param.requires_grad:
        return slot.name, shape, path, backend, *dtypes, "0", "0", why
    if param.is_complex() or slot.odd:
        return slot.name, shape, path, backend, *dtypes, "-", "-", why
    counts = [
        traffic.total(
            traffic.bytes_per_micro_batch(
                param.dtype,
                param.dtype,
                slot.accumulate_dtype,
                loop="fusedacc" if path == "multi_tensor" or window.counted else "mixed_add",
                scale_is_one=not window.scales,
                first=first,
            )
        )
        for first in (True, False)
    ]
    return slot.name, shape, path, backend, *dtypes, *(f"{count:g}" for count in counts), why


def _route(slot: Slot, arena: Arena) -> tuple[str, str, str]:
    """Path, backend and reason."""
    param = slot.param
    if not param.requires_grad:
        return "none", "-", "frozen: requires_grad is False"
    if multi_process():
        return "eager", "stock", "a process group of several ranks: autograd fills p.grad"
    if _hooks(param):
        return (
            "eager",
            "stock",
            "a post-accumulate-grad hook needs p.grad: autograd fills it",
        )
    if (param.dtype, slot.accumulate_dtype) not in checks.PAIRS:
        return "eager", "eager", f"no kernel takes {str(param.dtype)[6:]}: plain torch adds"
    if slot.odd:
        return "eager", "eager", "its gradients are sparse or of a subclass: plain torch adds"
    selection = arena.select(slot.lane)
    return "multi_tensor", selection.backend.name, selection.reason


def _hooks(param: Tensor) -> bool:
    return bool(param._post_accumulate_grad_hooks)
