"""The rules of our own operators, and of our kernels that are launched outside torch's dispatcher.

In products of grouped rows, an expert without rows costs no read of its matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from ..kernels.constants import plan_entry
from .operands import Call, Operand, Rule, bytes_of, has_data, merged, reads, whole, writes

#: Operators that look at no data.
METADATA = frozenset({"fusedacc::prepare", "fusedacc::build_info", "fusedacc::launched_product"})


def accumulation(
    accumulators: Sequence[Tensor],
    gradients: Sequence[Tensor],
    factors: Sequence[float | Tensor | None],
    overwrite: Sequence[bool],
) -> list[Operand]:
    """accumulator <- beta * accumulator + scale * gradient; a gradient may be its accumulator.

    factors: what is multiplied by; tensors among them are read.
    """
    found = writes(accumulators)
    for index, operand in enumerate(found):
        operand.read = 0 if _flag(overwrite, index) else operand.written
    return merged([*found, *reads(gradients, factors)])


def measurement(tensors: Sequence[Tensor], results: Sequence[Tensor]) -> list[Operand]:
    """Tensors are read and results are written, each once."""
    return merged([*reads(tensors), *writes(results)])


def _rows_named(indices: Tensor, padding: int) -> tuple[int, int] | None:
    """How many indices name a row other than `padding`, and how many such rows: by the data, for which a GPU
    is waited for. None where there is none to read."""
    if not has_data(indices):
        return None
    with _disable_current_modes():  # the meter's own look is nobody's traffic
        named = indices[indices != padding]
        return named.numel(), named.unique().numel()


def rows_accumulation(
    table: Tensor, indices: Tensor, gradients: Tensor, scale: float | Tensor | None, padding: int
) -> list[Operand] | None:
    """Gradients are added into the rows that the indices name, each row read and written once."""
    named = _rows_named(indices, padding)
    if named is None:
        return None
    columns = table.shape[1]
    fresh = min(bytes_of(gradients), named[0] * columns * gradients.element_size())
    touched = named[1] * columns * table.element_size()
    return [Operand(table, touched, touched), Operand(gradients, fresh), *reads(indices, scale)]


def _accumulate_rows(call: Call) -> list[Operand] | None:
    return rows_accumulation(
        call["table"], call["indices"], call["gradients"], call["scale_tensor"], call["padding"]
    )


def _flag(overwrite: Sequence[bool], index: int) -> bool:
    """As the operators take flags: none for all False, one for all, or one per tensor."""
    return bool(overwrite) and overwrite[index if len(overwrite) > 1 else 0]


def _scale_accumulate(call: Call) -> list[Operand]:
    """And partial norms, where some come out."""
    lists = call.tensors("accumulators"), call.tensors("gradients")
    factors = call["scale_tensor"], call["keep_tensor"]
    return [*accumulation(*lists, factors, call["overwrite"]), *writes(call.results)]


def _accumulate_prepared(call: Call) -> list[Operand] | None:
    """The plan says what its accumulators are; partial norms may come out."""
    (plan,) = call.tensors("plan")
    gradients = call.tensors("gradients")
    if isinstance(plan, FakeTensor):
        return None
    words = plan.tolist()
    found = [*reads(gradients, call["scale_tensor"], call["keep_tensor"]), *writes(call.results)]
    for index, gradient in enumerate(gradients):
        address, elements, dtype = plan_entry(words, index)
        size = elements * dtype.itemsize
        in_place = address == gradient.data_ptr()  # read already
        read = 0 if in_place or _flag(call["overwrite"], index) else size
        found.append(Operand(None, read, size, str(gradient.device)))
    return found


def _shares(offsets: Tensor, rows: int) -> tuple[float, float] | None:
    """Of the experts and of the rows, the share that is worked on; a GPU is waited for."""
    if not has_data(offsets):
        return None
    with _disable_current_modes():  # the meter's own look is nobody's traffic
        ends = offsets.tolist()
    used = sum(end > start for start, end in zip([0, *ends], ends, strict=False))
    return used / max(len(ends), 1), (ends[-1] if ends else 0) / max(rows, 1)


def grouped_product(call: Call) -> list[Operand] | None:
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


def grouped_accumulation(
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


def _grouped_accumulate(call: Call) -> list[Operand] | None:
    keep = call["keep"] if call["keep_tensor"] is None else call["keep_tensor"]
    operands = call["accumulator"], call["left"], call["right"], call["offsets"]
    return grouped_accumulation(*operands, call["scale_tensor"], keep)


def _gemm_accumulate(call: Call) -> list[Operand]:
    """Both factors, and the sum, which is not read where none of it is kept."""
    overwrites = call["keep_tensor"] is None and call["keep"] == 0
    return whole(call, overwrites=overwrites)


#: What a call of `fusedacc::` such a name has read and written.
RULES: dict[str, Rule] = {
    "scale_accumulate_": _scale_accumulate,
    "accumulate_prepared_": _accumulate_prepared,
    "scale_accumulate_norm_": _scale_accumulate,
    "accumulate_prepared_norm_": _accumulate_prepared,
    "gemm_accumulate_": _gemm_accumulate,
    "grouped_accumulate_": _grouped_accumulate,
    "norm_partials": whole,
    "finish_norm": whole,
    "accumulate_rows_": _accumulate_rows,
}

#: Launches outside the dispatcher, and what their operands are to these.
_LAUNCHES: dict[str, Callable[..., list[Operand] | None]] = {
    "triton::scale_accumulate": accumulation,
    "triton::norm_partials": measurement,
    "triton::finish_norm": measurement,
    "triton::add_rows": rows_accumulation,
    "triton::grouped_accumulate": grouped_accumulation,
}


def launch_operands(kernel: str, *operands: Any) -> list[Operand] | None:
    """What a kernel that no dispatcher has seen has read and written; None where it cannot be known."""
    return _LAUNCHES[kernel](*operands)
