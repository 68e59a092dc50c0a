"""The semantics of every kernel in plain torch: the oracle, and the eager backend.

Rounding. float32 and float64 sums are one fused multiply-add: torch's `add_(alpha=)` and `addcmul_` contract
to one on every device with the instruction (all CUDA devices, CPUs with AVX2). 16-bit sums are computed in
float32 and rounded once. Two exceptions, where the product is rounded before it is added: a CPU without the
instruction, and, in torch's CPU loops, an expanded gradient. With noise, the rounding to bfloat16 is
stochastic.

Memory. For float32 and float64 accumulators, only torch's cast copy of a 16-bit gradient on a CPU is
allocated, one tensor at a time. A 16-bit accumulator with a scale other than 1, or with stochastic rounding,
needs a float32 temporary of its size, because torch would round the scale and the product to 16 bits.

Rows of a table. Shapes depend on the indices' shapes only, so nothing waits for a device. Gradients are
copied in the order of their rows, in the computation's dtype: temporaries of the gradients' size, none of the
table's.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .checks import overwrite_flags
from .constants import INFINITY, ROW_RUN, norm_kind
from .dtypes import Flags, Number, Tensors, computation_dtype
from .registry import Backend
from .rounding import Noise, round_into_


def _overwrite(accumulator: Tensor, gradient: Tensor, scale: Number) -> None:
    wide = computation_dtype(accumulator.dtype)
    if not isinstance(scale, Tensor) and scale == 1.0:
        accumulator.copy_(gradient)
    elif accumulator.dtype == wide:
        accumulator.copy_(gradient)
        accumulator.mul_(scale)
    else:
        product = gradient.to(wide)
        accumulator.copy_(product.mul(scale) if product is gradient else product.mul_(scale))


def _add(accumulator: Tensor, gradient: Tensor, scale: Number, beta: Number) -> None:
    keeps = not isinstance(beta, Tensor) and beta == 1.0
    if keeps and not isinstance(scale, Tensor) and scale == 1.0:
        accumulator.add_(gradient)
        return
    total = _total(accumulator, gradient, scale, beta)
    if total is not accumulator:
        accumulator.copy_(total)


def _total(accumulator: Tensor, gradient: Tensor, scale: Number, beta: Number) -> Tensor:
    """Return the sum in the computation's dtype: the accumulator itself if that is its dtype."""
    total = accumulator.to(computation_dtype(accumulator.dtype))
    if isinstance(beta, Tensor) or beta != 1.0:
        total.mul_(beta)
    if isinstance(scale, Tensor):
        total.addcmul_(gradient, scale)
    elif torch.compiler.is_compiling():  # torch 2.10 would round the product to the gradient's dtype
        total.add_(gradient.to(total.dtype), alpha=scale)
    else:
        total.add_(gradient, alpha=scale)
    return total


def scale_accumulate_(
    accumulators: Tensors,
    gradients: Tensors,
    scale: Number,
    overwrite: Flags,
    beta: Number = 1.0,
    noise: Noise | None = None,
) -> None:
    """As `registry.Backend.accumulate_`. Inputs are not checked here: see `checks.check_lists`."""
    factors: dict[torch.dtype, tuple[Number, Number]] = {}
    with torch.no_grad():
        for index, (accumulator, gradient, flag) in enumerate(
            zip(accumulators, gradients, overwrite_flags(overwrite, len(accumulators)), strict=True)
        ):
            wide = computation_dtype(accumulator.dtype)
            if wide not in factors:
                factors[wide] = _factor(scale, wide), _factor(beta, wide)
            if noise is not None:
                total = (
                    gradient.to(wide) * factors[wide][0]
                    if flag
                    else _total(accumulator, gradient, *factors[wide])
                )
                round_into_(accumulator, total, noise.seed, noise.streams[index])
            elif flag:
                _overwrite(accumulator, gradient, factors[wide][0])
            else:
                _add(accumulator, gradient, *factors[wide])


def _factor(value: Number, dtype: torch.dtype) -> Number:
    return value.to(dtype) if isinstance(value, Tensor) else float(value)


def _norm(tensor: Tensor, norm_type: float) -> Tensor:
    """Return the norm in float64. It is finite unless an element is not."""
    largest = torch.linalg.vector_norm(tensor, float("inf")).double()
    if norm_kind(norm_type) is INFINITY:
        return largest
    if tensor.dtype != torch.float64:
        return torch.linalg.vector_norm(tensor.double(), norm_type)
    # Squares of float64 can overflow or underflow.
    scale = torch.where(largest.isfinite() & (largest > 0), largest, 1.0)
    norm = torch.linalg.vector_norm(tensor / scale, norm_type) * scale
    return torch.where(largest.isfinite(), norm.clamp(max=torch.finfo(torch.float64).max), norm)


def norm_partials(tensors: Tensors, norm_type: float) -> Tensor:
    """Return one float64 norm for each tensor with elements; it is finite unless an element is not.

    `finish_norm` combines any number of such partial norms, of whatever parts. One tensor at a time is copied
    to float64.
    """
    with torch.no_grad():
        norms = [_norm(tensor, norm_type) for tensor in tensors if tensor.numel() > 0]
        return torch.stack(norms) if norms else tensors[0].new_zeros(0, dtype=torch.float64)


def finish_norm(partials: Tensors, norm_type: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `registry.Backend.finish_norm`."""
    together = torch.cat(list(partials))
    if together.numel() == 0:
        return together.new_zeros((), dtype=dtype), together.new_zeros((), dtype=torch.float32)
    norm = _norm(together, norm_type)
    return norm.to(dtype), (~norm.isfinite()).float()


def _first_places(rows: Tensor) -> Tensor:
    """Return for each place of a sorted vector the first place with the same value."""
    places = torch.arange(len(rows), device=rows.device)
    new = torch.ones_like(rows, dtype=torch.bool)
    new[1:] = rows[1:] != rows[:-1]
    return torch.where(new, places, 0).cummax(0).values


def _stretch_sums(values: Tensor, begins: Tensor) -> Tensor:
    """Return the sums of stretches of rows [n, columns], each at the place of its first row.

    begins: whether a stretch begins with each row; the first one does.
    """
    count = len(values)
    stretch = begins.cumsum(0) - 1
    places = torch.arange(count, device=values.device)
    offsets = places.new_full((count + 1,), count)
    offsets.scatter_reduce_(0, stretch, places, "amin")
    # Unlike `index_add_`, it adds in order on every device.
    packed = torch.segment_reduce(values, "sum", offsets=offsets, axis=0, unsafe=True, initial=0)
    return torch.where(begins[:, None], packed[stretch], 0)


def accumulate_rows_(
    table: Tensor,
    indices: Tensor,
    gradients: Tensor,
    scale: Number,
    padding: int,
    by_frequency: bool,
) -> None:
    """As `registry.Backend.accumulate_rows_`.

    Inputs are not checked here, except by torch's operators: a number that is no row raises IndexError on a
    CPU, before anything is written.
    """
    if indices.numel() == 0:
        return
    with torch.no_grad():
        rows, order = torch.sort(indices, stable=True)
        old = table.index_select(0, rows)
        wide = gradients.detach().index_select(0, order).to(computation_dtype(table.dtype))
        places = torch.arange(len(rows), device=rows.device)
        first = _first_places(rows)
        runs = (places - first) % ROW_RUN == 0
        sums = _stretch_sums(_stretch_sums(wide, runs), first == places)[first]
        if by_frequency:
            counts = torch.zeros_like(rows, dtype=sums.dtype).scatter_add_(
                0, first, torch.ones_like(rows, dtype=sums.dtype)
            )
            sums /= counts[first][:, None]
        new = old.clone()
        scale_accumulate_([new], [sums], scale, False)
        if padding >= 0:
            new = torch.where((rows == padding)[:, None], old, new)
        # Duplicates of a row write equal values.
        table.index_copy_(0, rows.long(), new)


#: Plain torch on any device: the fallback, also for tensor subclasses.
eager = Backend(
    name="eager",
    obstacle=lambda *where: None,
    accumulate_=scale_accumulate_,
    prepare=lambda accumulators: functools.partial(scale_accumulate_, accumulators),
    norm_partials=norm_partials,
    finish_norm=finish_norm,
    accumulate_rows_=accumulate_rows_,
)
