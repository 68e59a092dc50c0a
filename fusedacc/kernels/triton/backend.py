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
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .. import launch_events, reference
from ..checks import overwrite_flags
from ..dtypes import computation_dtype
from ..registry import Backend
from ..rounding import Noise
from ..torch_state import raw_stream
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
    """Dense accumulators of one device and one dtype pair, and their part of the table.

    Args:
        accumulators, gradient_dtype: what it is of.
        keeps_table: whether the accumulators' part of the table stays on the device.
        captured: where host memory is put that captured graphs read.
    """

    def __init__(
        self,
        accumulators: Sequence[Tensor],
        gradient_dtype: torch.dtype,
        keeps_table: bool,
        captured: list[Tensor],
    ) -> None:
        self.accumulators = accumulators
        self._gradient_dtype = gradient_dtype
        self._keeps_table = keeps_table
        self._captured = captured
        self._addresses = [tensor.data_ptr() for tensor in self.accumulators]
        self._words, self._programs = shared.address_table(self.accumulators)
        self._device = self.accumulators[0].device
        self._table: Tensor | None = None
        #: The stream on which the table was allocated.
        self._made_on = 0
        #: What a call adds to the table, as it was last uploaded: its words, the stream, and where it is.
        self._last: tuple[list[int], int, Tensor] | None = None

    def _upload(self, words: Tensor) -> Tensor:
        """A copy for this launch, or for the graph that it is captured in."""
        table, pinned = shared.upload(words, self._device)
        if shared.capturing(self._device):
            self._captured.append(pinned)
        return table

    def _own_table(self) -> Tensor:
        if self._table is None and self._keeps_table and not shared.capturing(self._device):
            self._table = self._words.to(self._device)  # visible to every stream
            self._made_on = raw_stream(self._table)
        if self._table is None:
            return self._upload(self._words)
        if self._made_on != raw_stream(self._table) and not shared.capturing(self._device):
            # Else a launch there might still read it when the plan is gone and its memory has a new owner.
            self._table.record_stream(torch.cuda.current_stream(self._device))
        return self._table

    def _call_table(
        self,
        gradients: Sequence[Tensor],
        flags: Sequence[bool],
        factors: Sequence[float | Tensor],
        noise: Noise | None,
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
        if noise is not None:
            words += [noise.seed, *noise.streams]
        stream = torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else 0
        # A table uploaded on another stream may not have arrived yet; one from outside a graph may be freed
        # before the graph is.
        if shared.capturing(self._device):
            return self._upload(torch.tensor(words, dtype=torch.int64))
        if self._last is None or self._last[:2] != (words, stream):
            self._last = words, stream, self._upload(torch.tensor(words, dtype=torch.int64))
        return self._last[2]

    def run(
        self,
        gradients: Sequence[Tensor],
        scale: float | Tensor,
        flags: Sequence[bool],
        beta: float | Tensor,
        noise: Noise | None = None,
    ) -> None:
        """Launch once."""
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
            table, calls = self._own_table(), self._call_table(ready, flags, (scale, beta), noise)
            numbers = calls[2 * len(ready) :][:2].view(torch.float64)
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
                noisy=noise is not None,
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
        self._runs: dict[tuple[torch.dtype, ...], list[tuple[list[int], Callable[..., Any]]]] = {}
        #: Pinned memory that captured graphs read when they are replayed.
        self.captured: list[Tensor] = []

    def _group(self, dtypes: tuple[torch.dtype, ...]) -> list[tuple[list[int], Callable[..., Any]]]:
        """For gradients of these dtypes: indices, and what adds there (torch, where there are gaps)."""
        pairs: dict[tuple[torch.dtype, torch.dtype] | None, list[int]] = {}
        for index, (accumulator, dtype) in enumerate(zip(self._accumulators, dtypes, strict=True)):
            pair = (accumulator.dtype, dtype) if shared.is_dense(accumulator) else None
            pairs.setdefault(pair, []).append(index)
        found: list[tuple[list[int], Callable[..., Any]]] = []
        for pair, indices in pairs.items():
            chosen = [self._accumulators[index] for index in indices]
            if pair is None:
                found.append((indices, functools.partial(reference.scale_accumulate_, chosen)))
            else:
                found.append((indices, _Group(chosen, pair[1], self._keep_tables, self.captured).run))
        return found

    def __call__(
        self,
        gradients: Sequence[Tensor],
        scale: float | Tensor,
        overwrite: bool | Sequence[bool],
        beta: float | Tensor = 1.0,
        norm_type: float | None = None,
        noise: Noise | None = None,
    ) -> Tensor | None:
        flags = overwrite_flags(overwrite, len(gradients))
        dtypes = tuple(gradient.dtype for gradient in gradients)
        if dtypes not in self._runs:
            self._runs[dtypes] = self._group(dtypes)
        for indices, run in self._runs[dtypes]:
            options = {}
            if noise is not None:
                options["noise"] = Noise(noise.seed, [noise.streams[index] for index in indices])
            chosen = [gradients[index] for index in indices], [flags[index] for index in indices]
            run(chosen[0], scale, chosen[1], beta, **options)
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


def _accumulate_(accumulators: Sequence[Tensor], *arguments: Any, **named: Any) -> Tensor | None:
    bound = _Bound(accumulators, keep_tables=False)
    found = bound(*arguments, **named)
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
