"""The Triton backend: finds tensors by a table of addresses in device memory, as the CUDA backend does.

A call uploads one small table (16 bytes per tensor) from pinned memory without waiting for it. A plan uploads
the accumulators' part once, and nothing while the gradients and the scale stay the same. Dense accumulators
with gradients in the same layout go to the kernel directly. A gradient in another layout is first copied to
the accumulator's layout; an accumulator with gaps takes the eager path.

CUDA graphs: a captured call replays its upload from pinned memory, which must live as long as the graph. A
plan keeps it; a call without a plan keeps it with its first accumulator. Prepare plans before the capture,
and keep the plan and the gradients' memory as long as the graph.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import struct
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .. import flops, launch_events, reference
from ..checks import overlaps_itself, overwrite_flags, reach
from ..constants import INFINITY, ROW_RUN, norm_kind
from ..dtypes import Flags, Number, Tensors, computation_dtype, dtype_name
from ..registry import Backend
from ..rounding import Noise
from ..torch_state import capturing, on_device, raw_stream

_MINIMUM_CAPABILITY = (8, 0)


def _same_order(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one shape have the same memory layout."""
    if a.stride() == b.stride():
        return True
    strides = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(size <= 1 or first == second for size, first, second in strides)


class _Group:
    """Dense accumulators of one device and dtype pair, and their part of the table.

    keeps_table: whether that part stays on the device. captured: receives the host memory that captured
    graphs read.
    """

    def __init__(
        self, accumulators: Tensors, gradient_dtype: torch.dtype, keeps_table: bool, captured: list[Tensor]
    ) -> None:
        self.accumulators = accumulators
        self._gradient_dtype = gradient_dtype
        self._keeps_table = keeps_table
        self._captured = captured
        self._addresses = [tensor.data_ptr() for tensor in accumulators]
        self._words, self._programs = address_table(accumulators)
        self._device = accumulators[0].device
        self._table: Tensor | None = None
        #: The stream on which the table was allocated.
        self._made_on = 0
        #: The call's part of the table as last uploaded: words, stream, and the device tensor.
        self._last: tuple[list[int], int, Tensor] | None = None

    def _own_table(self) -> Tensor:
        if self._table is None and self._keeps_table and not capturing():
            self._table = self._words.to(self._device)  # visible to every stream
            self._made_on = raw_stream(self._table)
        if self._table is None:
            return upload(self._words, self._device, self._captured)
        if self._made_on != raw_stream(self._table) and not capturing():
            # Otherwise its memory could be reused while a launch there still reads it.
            self._table.record_stream(torch.cuda.current_stream(self._device))
        return self._table

    def _call_table(
        self, gradients: Tensors, flags: Sequence[bool], factors: Sequence[Number], noise: Noise | None
    ) -> Tensor:
        kernels = loaded_kernels()
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
        stream = raw_stream(self.accumulators[0])
        # A table uploaded on another stream may not have arrived yet, and one from outside a graph may be
        # freed before the graph.
        captures = capturing()
        if captures or self._last is None or self._last[:2] != (words, stream):
            table = upload(torch.tensor(words, dtype=torch.int64), self._device, self._captured)
            if captures:
                return table
            self._last = words, stream, table
        return self._last[2]

    def run(
        self,
        gradients: Tensors,
        scale: Number,
        flags: Sequence[bool],
        beta: Number,
        noise: Noise | None = None,
    ) -> None:
        ready = []
        for gradient, accumulator in zip(gradients, self.accumulators, strict=True):
            if gradient.shape != accumulator.shape or gradient.device != accumulator.device:
                raise ValueError(
                    f"a gradient of shape {tuple(gradient.shape)} on {gradient.device} for an accumulator of "
                    f"shape {tuple(accumulator.shape)} on {accumulator.device}"
                )
            if not _same_order(gradient, accumulator):
                strided = torch.empty_strided(
                    accumulator.shape, accumulator.stride(), dtype=gradient.dtype, device=gradient.device
                )
                gradient = strided.copy_(gradient.detach())
            ready.append(gradient)
        if self._programs == 0:
            return
        accumulator_dtype = self.accumulators[0].dtype
        with on_device(self._device):
            table = self._own_table()
            calls = self._call_table(ready, flags, (scale, beta), noise)
            numbers = calls[2 * len(ready) :][:2].view(torch.float64)
            kernels = loaded_kernels()
            kernels.scale_accumulate[(self._programs,)](
                table,
                calls,
                scale if isinstance(scale, Tensor) else numbers,
                beta if isinstance(beta, Tensor) else numbers[1:],
                len(ready),
                accumulator_dtype=triton_dtype(accumulator_dtype),
                gradient_dtype=triton_dtype(self._gradient_dtype),
                wide=triton_dtype(computation_dtype(accumulator_dtype)),
                noisy=noise is not None,
                **kernels.ADDING,
            )
            launch_events.launched("triton::scale_accumulate", self.accumulators, ready, (scale, beta), flags)


class _Bound:
    """Accumulators of one device by dtype pair. Groups are cached per sequence of gradient dtypes."""

    def __init__(
        self, accumulators: Tensors, keep_tables: bool = True, captured: list[Tensor] | None = None
    ) -> None:
        self._accumulators = accumulators
        self._keep_tables = keep_tables
        self._runs: dict[tuple[torch.dtype, ...], list[tuple[list[int], Callable[..., Any]]]] = {}
        #: Pinned memory that captured graphs read.
        self._captured: list[Tensor] = [] if captured is None else captured

    def _group(self, dtypes: tuple[torch.dtype, ...]) -> list[tuple[list[int], Callable[..., Any]]]:
        """Return indices and the function that adds there; torch adds to accumulators with gaps."""
        pairs: dict[tuple[torch.dtype, torch.dtype] | None, list[int]] = {}
        for index, (accumulator, dtype) in enumerate(zip(self._accumulators, dtypes, strict=True)):
            pair = (accumulator.dtype, dtype) if is_dense(accumulator) else None
            pairs.setdefault(pair, []).append(index)
        runs: list[tuple[list[int], Callable[..., Any]]] = []
        for pair, indices in pairs.items():
            chosen = [self._accumulators[index] for index in indices]
            if pair is None:
                runs.append((indices, functools.partial(reference.scale_accumulate_, chosen)))
            else:
                runs.append((indices, _Group(chosen, pair[1], self._keep_tables, self._captured).run))
        return runs

    def __call__(
        self,
        gradients: Tensors,
        scale: Number,
        overwrite: Flags,
        beta: Number = 1.0,
        noise: Noise | None = None,
    ) -> None:
        flags = overwrite_flags(overwrite, len(gradients))
        dtypes = tuple(gradient.dtype for gradient in gradients)
        if dtypes not in self._runs:
            self._runs[dtypes] = self._group(dtypes)
        for indices, run in self._runs[dtypes]:
            own = noise and Noise(noise.seed, [noise.streams[index] for index in indices])
            chosen = [gradients[index] for index in indices], [flags[index] for index in indices]
            run(chosen[0], scale, chosen[1], beta, noise=own)


def _obstacle(device: torch.device, *dtypes: torch.dtype) -> str | None:
    kernels, problem = load()
    if kernels is None:
        return problem
    if kernels.INTERPRETED:
        return None if device.type == "cpu" else f"interpreted, it takes CPU tensors, not {device.type}"
    if not torch.cuda.is_available():
        return "no CUDA GPU (set TRITON_INTERPRET=1 before Python starts to run it interpreted, slowly)"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "no C compiler, which Triton needs at run time (install gcc, or set CC)"
    if device.type != "cuda":
        return f"it takes CUDA tensors, not {device.type}"
    if torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability < _MINIMUM_CAPABILITY:
            return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    return None


def _accumulate_(accumulators: Tensors, *arguments: Any, **named: Any) -> None:
    _Bound(accumulators, False, _pinned_with(accumulators))(*arguments, **named)


#: Pinned memory of captured calls without a plan, kept while the first tensor lives.
_captured: Any = WeakTensorKeyDictionary()


def _pinned_with(tensors: Tensors) -> list[Tensor]:
    return _captured.setdefault(tensors[0], []) if tensors and capturing() else []


@functools.cache
def load() -> tuple[ModuleType | None, str | None]:
    """Return the kernels, or why they are unavailable. Warn if Triton is installed but fails to import."""
    if importlib.util.find_spec("triton") is None:
        return None, "Triton is not installed (pip install triton)"
    try:
        from . import kernels
    except Exception as error:
        problem = f"Triton fails to import ({type(error).__name__}: {error}); reinstall it"
        warnings.warn(f"fusedacc: {problem}. Another backend is used instead.", stacklevel=2)
        return None, problem
    return kernels, None


def loaded_kernels() -> ModuleType:
    """Return the kernels' module, or raise RuntimeError."""
    module, problem = load()
    if module is None:
        raise RuntimeError(problem)
    return module


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements, none of which overlap, fill one stretch of memory."""
    return reach(tensor) == tensor.numel()


def upload(words: Tensor, device: torch.device, captured: list[Tensor]) -> Tensor:
    """Return the table on the device. In a graph capture, add its pinned source to `captured`."""
    if device.type == "cpu":
        return words
    pinned = words.pin_memory()
    if capturing():
        captured.append(pinned)
    return pinned.to(device, non_blocking=True)


def address_table(tensors: Tensors) -> tuple[Tensor, int]:
    """Return the table of `kernels.scale_accumulate`, on the host, and the number of programs."""
    chunk = loaded_kernels().CHUNK
    addresses = torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)
    sizes = torch.tensor([tensor.numel() for tensor in tensors], dtype=torch.int64)
    programs = (sizes + chunk - 1) // chunk
    first = programs.cumsum(0) - programs
    rows = torch.stack([addresses, sizes, first], dim=1)
    owner = torch.repeat_interleave(torch.arange(len(sizes)), programs)
    return torch.cat([rows.flatten(), owner]), len(owner)


def triton_dtype(dtype: torch.dtype) -> Any:
    """Return Triton's dtype."""
    import triton.language as tl

    return getattr(tl, dtype_name(dtype))


def _norm_partials(tensors: Tensors, norm_type: float) -> Tensor:
    """Return a float64 norm per program."""
    kernels = loaded_kernels()
    captured = _pinned_with(tensors)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        plain = tensor.detach()
        if not is_dense(plain) or overlaps_itself(plain):
            plain = plain.contiguous()
        by_dtype.setdefault(plain.dtype, []).append(plain)
    tables = [(group, *address_table(group)) for group in by_dtype.values()]
    device = tensors[0].device
    partials = torch.empty(sum(programs for *_, programs in tables), dtype=torch.float64, device=device)
    first = 0
    for group, words, programs in tables:
        if programs == 0:
            continue
        dtype = group[0].dtype
        with on_device(device):
            table = upload(words, device, captured)
            part = partials[first : first + programs]
            kernels.norm_partials[(programs,)](
                table,
                part,
                len(group),
                dtype=triton_dtype(dtype),
                wide=triton_dtype(computation_dtype(dtype)),
                infinity=norm_kind(norm_type) is INFINITY,
                num_warps=kernels.WARPS,
            )
        launch_events.launched("triton::norm_partials", group, [part])
        first += programs
    return partials


def _finish_norm(partials: Tensors, norm_type: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    kernels = loaded_kernels()
    together = torch.cat(list(partials)) if len(partials) > 1 else partials[0].contiguous()
    norm = together.new_empty((), dtype=dtype)
    not_finite = together.new_empty((), dtype=torch.float32)
    options = {"infinity": norm_kind(norm_type) is INFINITY, "num_warps": kernels.WARPS}
    last = together
    with on_device(together.device):
        if together.numel() > kernels.MOST_PARTIALS:
            last = together.new_empty(-(-together.numel() // kernels.CHUNK))
            kernels.join_partials[(last.numel(),)](together, together.numel(), last, **options)
        kernels.finish_norm[(1,)](last, last.numel(), norm, not_finite, **options)
    launch_events.launched("triton::finish_norm", [together], [norm, not_finite])
    return norm, not_finite


#: Columns per program; the most is 8 per thread.
_MOST_COLUMNS = 1024
_FEWEST_COLUMNS = 128


def _accumulate_rows_(
    table: Tensor,
    indices: Tensor,
    gradients: Tensor,
    scale: Number,
    padding: int,
    by_frequency: bool,
) -> None:
    kernels = loaded_kernels()
    if table.shape[1] > 1 and table.stride(1) != 1:
        raise RuntimeError(f"table has stride {table.stride(1)} in its second dimension; it must be 1")
    count, width = gradients.shape
    if count == 0 or width == 0:
        return
    wide = computation_dtype(table.dtype)
    rows, order = torch.sort(indices, stable=True)
    # A fill passes the number to the device without a copy that the host would wait for.
    factor = scale if isinstance(scale, Tensor) else torch.full((), scale, dtype=wide, device=table.device)
    stride = (width + 7) // 8 * 8
    stretches = -(-count // ROW_RUN)
    sums = torch.empty(2 * stretches * stride if count > ROW_RUN else 0, dtype=wide, device=table.device)
    next_power_of_two = 1 << (width - 1).bit_length()
    block = min(max(next_power_of_two, _FEWEST_COLUMNS), _MOST_COLUMNS)
    across = -(-width // block)
    plain_table = table.detach()
    with on_device(table.device):
        kernels.add_runs[(count, across)](
            plain_table,
            plain_table.stride(0),
            plain_table.shape[0],
            width,
            rows,
            order,
            count,
            gradients,
            gradients.stride(0),
            factor,
            padding,
            sums,
            stride,
            wide=triton_dtype(wide),
            by_frequency=by_frequency,
            block=block,
            num_warps=kernels.WARPS,
        )
        if count > ROW_RUN:
            kernels.add_long_rows[(count // ROW_RUN, across)](
                plain_table,
                plain_table.stride(0),
                plain_table.shape[0],
                width,
                rows,
                count,
                factor,
                padding,
                sums,
                stride,
                by_frequency=by_frequency,
                block=block,
                num_warps=kernels.WARPS,
            )
    launch_events.launched("triton::add_rows", table, indices, gradients, scale, padding)


def grouped_accumulate_(
    accumulator: Tensor,
    left: Tensor,
    right: Tensor,
    offsets: Tensor,
    scale: Number,
    beta: Number,
) -> None:
    """As `grouped.grouped_accumulate_`, on one GPU; a matrix of the accumulator must not have gaps in rows
    and in columns.

    Sums are computed in float32 (float64 for float64) and rounded once; every run gives the same bits.
    float32 operands follow torch's TF32 setting. The host does not wait. An operand whose rows have gaps is
    copied.
    """
    kernels = loaded_kernels()
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
    if not _has_whole_rows(left):
        left = left.contiguous()
    if not _has_whole_rows(right):
        right = right.contiguous()
    wide = computation_dtype(accumulator.dtype)
    expert_stride, row_stride = accumulator.stride()[:2]
    with on_device(accumulator.device):
        kernels.grouped_accumulate[(programs,)](
            accumulator.detach(),
            left.detach(),
            right.detach(),
            offsets.contiguous(),
            _argument(scale, wide, accumulator.device),
            _argument(beta, wide, accumulator.device),
            rows,
            columns,
            left.shape[0],
            expert_stride,
            row_stride,
            left.stride(0),
            right.stride(0),
            scale_on_device=isinstance(scale, Tensor) or wide == torch.float64,
            beta_on_device=isinstance(beta, Tensor) or wide == torch.float64,
            wide=triton_dtype(wide),
            precision=_precision(),
            block_rows=block_rows,
            block_columns=block_columns,
            block_tokens=block_tokens,
            num_warps=warps,
        )
    flops.show_launch(left, right)
    launch_events.launched("triton::grouped_accumulate", accumulator, left, right, offsets, scale, beta)


def _has_whole_rows(tensor: Tensor) -> bool:
    return tensor.stride(-1) == 1 or tensor.shape[-1] <= 1


def _argument(number: Number, wide: torch.dtype, device: torch.device) -> Number:
    """Return a factor for a kernel. Triton passes numbers as float32, so a float64 one is a tensor."""
    if isinstance(number, Tensor):
        return number.detach()
    return torch.full((), number, dtype=wide, device=device) if wide == torch.float64 else float(number)


def _precision() -> str:
    """Return how float32 operands are multiplied, by torch's TF32 setting."""
    allowed = torch.version.hip is None and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if allowed else "ieee"


triton = Backend(
    name="triton",
    obstacle=_obstacle,
    accumulate_=_accumulate_,
    prepare=_Bound,
    norm_partials=_norm_partials,
    finish_norm=_finish_norm,
    accumulate_rows_=_accumulate_rows_,
)
