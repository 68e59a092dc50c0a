"""The Triton backend: the CUDA backend's contract by a table of addresses in device memory.

A call uploads one small table (16 bytes per tensor) from pinned memory without waiting for it; a plan uploads
the accumulators' part once, and nothing at all while the same gradients come with the same scale.
Accumulators that are dense, with gradients in the same layout, go to the kernel as they are. A gradient in
another layout is first copied into the accumulator's (its size read and written once more); an accumulator
with gaps takes the eager path.

CUDA graphs. A captured call replays its upload from the pinned memory that it was captured with, so that
memory must live as long as the graph: a plan keeps it, and a call without a plan keeps it with its first
accumulator. Prepare plans before the capture, and keep the plan and the gradients' memory as long as the
graph.
"""

from __future__ import annotations

import functools
import os
import shutil
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .. import launch_events, reference
from ..checks import overwrite_flags
from ..dtypes import computation_dtype
from ..registry import Backend
from . import address_table as shared
from . import norms, rows

_MINIMUM_CAPABILITY = (8, 0)


def _same_order(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape lay their elements out alike."""
    if a.stride() == b.stride():
        return True
    strides = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(size <= 1 or first == second for size, first, second in strides)


class _Group:
    """Dense accumulators of one device and one dtype pair, and their part of the table."""

    def __init__(self, indices: Sequence[int], accumulators: Sequence[Tensor], gradient_dtype: torch.dtype):
        self.indices = indices
        self.accumulators = [accumulators[index] for index in indices]
        self._gradient_dtype = gradient_dtype
        self._addresses = [tensor.data_ptr() for tensor in self.accumulators]
        self._words, self._programs = shared.address_table(self.accumulators)
        self._device = self.accumulators[0].device
        self._table: Tensor | None = None
        #: What a call adds to the table, as it was last uploaded: its words, the stream, and where it is.
        self._last: tuple[list[int], int, Tensor] | None = None

    def upload(self) -> None:
        """Put the accumulators' part on the device for good, visible to every stream."""
        if self._table is None:
            self._table = self._words.to(self._device)

    def _call_table(
        self,
        gradients: Sequence[Tensor],
        flags: Sequence[bool],
        factors: Sequence[float | Tensor],
        captured: list[Tensor],
    ) -> Tensor:
        kernels = shared.kernels()
        words = []
        for address, gradient, overwrite in zip(self._addresses, gradients, flags, strict=True):
            pointer = gradient.data_ptr()
            misaligned = kernels.MISALIGNED if (address | pointer) % 16 else 0
            words += [pointer, (kernels.OVERWRITE if overwrite else 0) | misaligned]
        for factor in factors:
            number = 1.0 if isinstance(factor, Tensor) else float(factor)
            words += struct.unpack("q", struct.pack("d", number))
        capturing = shared.capturing(self._device)
        stream = torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else 0
        # A table uploaded on another stream may not have arrived yet; one from outside a graph may be freed
        # before the graph is.
        if self._last is not None and self._last[:2] == (words, stream) and not capturing:
            return self._last[2]
        table, pinned = shared.upload(torch.tensor(words, dtype=torch.int64), self._device)
        if capturing:
            captured.append(pinned)
        else:
            self._last = words, stream, table
        return table

    def run(
        self,
        gradients: Sequence[Tensor],
        scale: float | Tensor,
        flags: Sequence[bool],
        beta: float | Tensor,
        captured: list[Tensor],
    ) -> None:
        """Launch once. In a graph capture, host memory that the graph reads is appended to `captured`."""
        ready = []
        for gradient, accumulator in zip(gradients, self.accumulators, strict=True):
            if gradient.shape != accumulator.shape or gradient.device != accumulator.device:
                raise ValueError(
                    f"a gradient of shape {tuple(gradient.shape)} on {gradient.device} for an accumulator of "
                    f"shape {tuple(accumulator.shape)} on {accumulator.device}"
                )
            alike = _same_order(gradient, accumulator)
            ready.append(gradient if alike else _relayout(gradient, accumulator))
        if self._programs == 0:
            return
        accumulator_dtype = self.accumulators[0].dtype
        with shared.on_device(self._device):
            table = self._table
            if table is None:
                table, pinned = shared.upload(self._words, self._device)
                if shared.capturing(self._device):
                    captured.append(pinned)
            calls = self._call_table(ready, flags, (scale, beta), captured)
            numbers = calls[2 * len(ready) :].view(torch.float64)
            kernels = shared.kernels()
            kernels.scale_accumulate[(self._programs,)](
                table,
                calls,
                scale if isinstance(scale, Tensor) else numbers,
                beta if isinstance(beta, Tensor) else numbers[1:],
                len(ready),
                accumulator_dtype=shared.triton_dtype(accumulator_dtype),
                gradient_dtype=shared.triton_dtype(self._gradient_dtype),
                wide=shared.triton_dtype(computation_dtype(accumulator_dtype)),
                **kernels.ADDING,
            )
            if launch_events.watching:
                launch_events.launched(
                    "triton::scale_accumulate", self.accumulators, ready, (scale, beta), flags
                )


def _relayout(gradient: Tensor, accumulator: Tensor) -> Tensor:
    """A copy of the gradient with the accumulator's strides."""
    return torch.empty_strided(
        accumulator.shape, accumulator.stride(), dtype=gradient.dtype, device=gradient.device
    ).copy_(gradient.detach())


class _Bound:
    """Accumulators of one device, grouped by dtype pair; groups are kept per sequence of gradient dtypes."""

    def __init__(self, accumulators: Sequence[Tensor], keep_tables: bool):
        self._accumulators = accumulators
        self._keep_tables = keep_tables
        self._groups: dict[tuple[torch.dtype, ...], tuple[list[_Group], list[int]]] = {}
        #: Pinned memory that captured graphs read when they are replayed.
        self.captured: list[Tensor] = []

    def _grouped(self, dtypes: tuple[torch.dtype, ...]) -> tuple[list[_Group], list[int]]:
        """Groups for gradients of these dtypes, and the indices of accumulators with gaps."""
        if dtypes not in self._groups:
            pairs: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
            gaps = []
            for index, (accumulator, dtype) in enumerate(zip(self._accumulators, dtypes, strict=True)):
                if shared.is_dense(accumulator):
                    pairs.setdefault((accumulator.dtype, dtype), []).append(index)
                else:
                    gaps.append(index)
            groups = [_Group(found, self._accumulators, pair[1]) for pair, found in pairs.items()]
            self._groups[dtypes] = (groups, gaps)
        return self._groups[dtypes]

    def __call__(
        self,
        gradients: Sequence[Tensor],
        scale: float | Tensor,
        overwrite: bool | Sequence[bool],
        beta: float | Tensor = 1.0,
        norm_type: float | None = None,
    ) -> Tensor | None:
        flags = overwrite_flags(overwrite, len(gradients))
        groups, gaps = self._grouped(tuple(gradient.dtype for gradient in gradients))
        for group in groups:
            if self._keep_tables and not shared.capturing(self._accumulators[0].device):
                group.upload()
            group.run(
                [gradients[index] for index in group.indices],
                scale,
                [flags[index] for index in group.indices],
                beta,
                self.captured,
            )
        if gaps:
            reference.scale_accumulate_(
                [self._accumulators[index] for index in gaps],
                [gradients[index] for index in gaps],
                scale,
                [flags[index] for index in gaps],
                beta,
            )
        if norm_type is None:
            return None
        found, pinned = norms.partials(self._accumulators, norm_type)
        self.captured += pinned
        return found


def _unavailable() -> str | None:
    kernels, problem = shared.load()
    if kernels is None:
        return problem
    if kernels.INTERPRETED:
        return None
    if not torch.cuda.is_available():
        return "no CUDA GPU (set TRITON_INTERPRET=1 before Python starts to run it interpreted, slowly)"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "no C compiler, which Triton needs at run time (install gcc, or set CC)"
    return None


def _unsupported(
    device: torch.device, accumulator_dtype: torch.dtype, gradient_dtype: torch.dtype
) -> str | None:
    kernels = shared.kernels()
    if device.type != ("cpu" if kernels.INTERPRETED else "cuda"):
        where = "interpreted, it takes CPU tensors" if kernels.INTERPRETED else "it takes CUDA tensors"
        return f"{where}, not {device.type}"
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability < _MINIMUM_CAPABILITY:
            return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    return None


def _accumulate_(
    accumulators: Sequence[Tensor],
    gradients: Sequence[Tensor],
    scale: float | Tensor,
    overwrite: bool | Sequence[bool],
    beta: float | Tensor = 1.0,
    norm_type: float | None = None,
) -> Tensor | None:
    bound = _Bound(accumulators, keep_tables=False)
    found = bound(gradients, scale, overwrite, beta, norm_type)
    _keep_captured(accumulators, bound.captured)
    return found


def _norm_partials(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    found, pinned = norms.partials(tensors, norm_type)
    _keep_captured(tensors, pinned)
    return found


#: For calls without a plan: what their captured graphs read, as long as the first tensor lives.
_captured: Any = WeakTensorKeyDictionary()


def _keep_captured(tensors: Sequence[Tensor], pinned: list[Tensor]) -> None:
    if pinned:
        _captured.setdefault(tensors[0], []).extend(pinned)


triton = Backend(
    name="triton",
    unavailable=_unavailable,
    unsupported=_unsupported,
    accumulate_=_accumulate_,
    prepare=functools.partial(_Bound, keep_tables=True),
    norm_partials=_norm_partials,
    finish_norm=norms.finish,
    accumulate_rows_=rows.accumulate_rows_,
)
