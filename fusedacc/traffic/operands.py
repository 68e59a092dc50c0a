"""What one operator call reads and writes: each operand once, by the operator's schema and these rules.

Compulsory bytes: what an ideal kernel with a perfect cache would move. A tensor that is passed twice is read
once; an expanded one only in the elements it really has; temporaries inside an operator count nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from ..kernels.constants import plan_entry
from .operators import METADATA, OVERWRITING, UNREAD, WHOLE


@dataclass
class Operand:
    """Bytes read from and written to one tensor, or, where there is no tensor to hand, to some sum."""

    tensor: Tensor | None
    read: int = 0
    written: int = 0
    device: str = ""


class Call:
    """One operator call, its arguments by name, its results in a list."""

    def __init__(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        schema = func._schema
        self.arguments = schema.arguments
        self.values: dict[str, Any] = {}
        for index, argument in enumerate(schema.arguments):
            given = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
            self.values[argument.name] = given
        self.results = list(_tensors(result))

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name)

    def tensors(self, name: str) -> list[Tensor]:
        return list(_tensors(self.values.get(name)))


Rule = Callable[[Call], "list[Operand] | None"]


def name_of(func: OpOverload) -> str:
    """The operator's name with its namespace, without the overload."""
    return func._schema.name


def tensors_in(*values: Any) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    return _tensors(values)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def bytes_of(tensor: Tensor) -> int:
    """Bytes of the elements that a strided tensor really has: those of an expanded one are counted once."""
    if tensor.numel() == 0:
        return 0
    sizes = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    elements = math.prod(size for size, _ in sizes)
    reach = 1 + sum((size - 1) * abs(stride) for size, stride in sizes)  # windows that overlap
    return min(elements, reach) * tensor.element_size()


def is_metadata(func: OpOverload) -> bool:
    """Whether the call looks at no data and makes no view."""
    namespace, _, name = name_of(func).partition("::")
    if namespace in ("prim", "profiler"):
        return True
    return name in METADATA if namespace == "aten" else name_of(func) in _OUR_METADATA


def is_view(func: OpOverload) -> bool:
    """Whether the call returns views, or changes one, by its schema. Not asked of composite operators."""
    return func.is_view or torch.Tag.inplace_view in func.tags


_OUR_METADATA = frozenset({"fusedacc::prepare", "fusedacc::gemm_problem", "fusedacc::build_info"})


def operands(
    func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> list[Operand] | None:
    """What a call has read and written; None for an operator without a rule, or tensors without strides."""
    call = Call(func, args, kwargs, result)
    if not all(map(_is_countable, tensors_in(args, kwargs, result))):
        return None
    namespace, _, name = name_of(func).partition("::")
    if namespace == "fusedacc":
        rule = _OUR_RULES.get(name)
        return None if rule is None else rule(call)
    if namespace != "aten":
        return None
    base = name if name.startswith("__") else name.removesuffix("_")
    if name in _RULES or base in _RULES:
        return (_RULES.get(name) or _RULES[base])(call)
    known = (
        base in WHOLE
        or base in UNREAD
        or name in OVERWRITING
        or base.startswith("_foreach_")
        or torch.Tag.pointwise in func.tags
    )
    if not known:
        return None
    if base in ("addmm", "addmv", "addbmm", "baddbmm", "addr") and call["beta"] == 0:
        return whole(call, unread=("self",))
    return whole(call, unread=UNREAD.get(base, ()), overwrites=name in OVERWRITING)


def _is_countable(tensor: Tensor) -> bool:
    """Whether it has strides, and sizes that are numbers."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return not any(isinstance(size, torch.SymInt) for size in (*tensor.shape, *tensor.stride()))


def whole(
    call: Call,
    unread: Sequence[str] = (),
    overwrites: bool = False,
    kept: Sequence[str] = (),
    partial: dict[str, int] | None = None,
) -> list[Operand]:
    """Each operand once: arguments read, those that the schema marks as changed written, results written.

    Args:
        call: the call.
        unread: arguments that are not read.
        overwrites: arguments that are changed in place are not read either.
        kept: arguments that the schema marks as changed and that are not.
        partial: bytes read of arguments that are read in part only.
    """
    found: dict[tuple, Operand] = {}
    partial = partial or {}
    for argument in call.arguments:
        changed = argument.alias_info is not None and argument.alias_info.is_write
        written = changed and argument.name not in kept
        read = not (argument.name in unread or argument.is_out or (written and overwrites))
        for tensor in call.tensors(argument.name):
            operand = found.setdefault(_identity(tensor), Operand(tensor))
            size = bytes_of(tensor)
            if read:
                operand.read = max(operand.read, min(size, partial.get(argument.name, size)))
            if written:
                operand.written = size
    for tensor in call.results:
        if _identity(tensor) not in found:
            found[_identity(tensor)] = Operand(tensor, written=bytes_of(tensor))
    return list(found.values())


def _identity(tensor: Tensor) -> tuple:
    """Equal for two tensors that are the same elements in the same order."""
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.dtype,
    )


# Operators that read or write a part of an operand


def _gathered(call: Call) -> list[Operand]:
    """As many elements of `self` (an embedding's `weight`) are read as there are in the result."""
    source = "weight" if "weight" in call.values else "self"
    size = sum(map(bytes_of, call.results))
    return whole(call, partial={source: size})


def _nll_loss(call: Call) -> list[Operand]:
    """One element of `self` for each target."""
    (scores,) = call.tensors("self")
    (target,) = call.tensors("target")
    return whole(call, partial={"self": target.numel() * scores.element_size()})


def _scattered(reads: bool) -> Rule:
    """As many elements of `self` are written (and read, where it adds) as the indices name."""

    def rule(call: Call) -> list[Operand] | None:
        (target,) = call.tensors("self")
        source = next((name for name in ("source", "src", "values") if name in call.values), None)
        index = "index" if "index" in call.values else "indices"
        if any(tensor.dtype in (torch.bool, torch.uint8) for tensor in call.tensors(index)):
            return None  # how many elements a mask names is in its data
        if source == "values":
            elements = _indexed_elements(target, call["indices"])
        elif index == "index" and source == "source":
            elements = call.tensors("source")[0].numel()
        else:
            elements = call.tensors(index)[0].numel()
        size = min(elements * target.element_size(), bytes_of(target))
        adds = reads or bool(call["accumulate"]) or call["reduce"] is not None
        found = [Operand(target, size if adds else 0, size)]
        if call.results and _identity(call.results[0]) != _identity(target):  # not in place: a copy too
            found = [Operand(target, bytes_of(target)), Operand(call.results[0], 0, bytes_of(target))]
        for name in filter(None, (index, source)):
            for tensor in call.tensors(name):
                size = bytes_of(tensor)
                found.append(
                    Operand(tensor, min(size, elements * tensor.element_size()) if name == "src" else size)
                )
        return found

    return rule


def _filled(call: Call) -> list[Operand]:
    """As many slices of `self` are written as there are indices."""
    (target,), (index,) = call.tensors("self"), call.tensors("index")
    slice_size = bytes_of(target) // max(1, target.shape[call["dim"]]) if target.dim() else bytes_of(target)
    written = min(index.numel() * slice_size, bytes_of(target))
    found = [Operand(target, 0, written), Operand(index, bytes_of(index))]
    if call.results and _identity(call.results[0]) != _identity(target):  # not in place: a copy too
        found = [Operand(target, bytes_of(target)), found[1], Operand(call.results[0], 0, bytes_of(target))]
    return found


def _indexed_elements(target: Tensor, indices: Sequence[Tensor | None]) -> int:
    given = [index for index in indices if index is not None]
    named = math.prod(torch.broadcast_shapes(*(index.shape for index in given)))
    rest = [size for dim, size in enumerate(target.shape) if dim >= len(indices) or indices[dim] is None]
    return named * math.prod(rest)


def _convolution_backward(call: Call) -> list[Operand]:
    """The input is read for the weight's gradient only, the weight for the input's only."""
    for_input, for_weight, _ = call["output_mask"]
    unread = [name for name, wanted in (("weight", for_input), ("input", for_weight)) if not wanted]
    return whole(call, unread=unread)


def _norm_backward(call: Call) -> list[Operand]:
    mask = call["output_mask"]
    return whole(call, unread=() if mask is None or mask[0] or mask[1] else ("input",))


def _batch_norm(call: Call) -> list[Operand]:
    """Running statistics are changed in training, whatever the schema says."""
    found = whole(call)
    running = {_identity(t) for n in ("running_mean", "running_var") for t in call.tensors(n)}
    training = call["training"] is not False and call["train"] is not False
    for operand in found:
        if operand.tensor is not None and _identity(operand.tensor) in running:
            operand.written = operand.read if training else 0
    return found


def _batch_norm_backward(call: Call) -> list[Operand]:
    """In training the batch's own statistics are read, not the running ones."""
    running = ("running_mean", "running_var") if call["train"] else ("save_mean", "save_invstd")
    needs_input = call["output_mask"][0] or call["output_mask"][1]
    return whole(call, unread=running if needs_input else (*running, "input"))


# Fused optimizers: gradients are marked as changed, and are only if there is a scale to take out of them


def _fused_optimizer(call: Call) -> list[Operand]:
    kept = ["state_steps"] if call["grad_scale"] is not None else ["state_steps", "grads"]
    unread = ["momentum_buffer_list"] if call["is_first_step"] else []
    return whole(call, unread=unread, kept=kept)


_RULES: dict[str, Rule] = {
    "embedding": _gathered,
    "index": _gathered,
    "index_select": _gathered,
    "gather": _gathered,
    "take": _gathered,
    "nll_loss_forward": _nll_loss,
    "nll_loss2d_forward": _nll_loss,
    "index_put": _scattered(reads=False),
    "_index_put_impl": _scattered(reads=False),
    "_unsafe_index_put": _scattered(reads=False),
    "scatter": _scattered(reads=False),
    "index_copy": _scattered(reads=False),
    "index_fill": _filled,
    "index_add": _scattered(reads=True),
    "scatter_add": _scattered(reads=True),
    "convolution_backward": _convolution_backward,
    "native_group_norm_backward": _norm_backward,
    "native_batch_norm_backward": _batch_norm_backward,
    "bernoulli": lambda call: whole(call, unread=("self",) if call["p"] is not None else ()),
    "cudnn_batch_norm_backward": whole,
    "native_batch_norm": _batch_norm,
    "_native_batch_norm_legit": _batch_norm,
    "_batch_norm_with_update": _batch_norm,
    "cudnn_batch_norm": _batch_norm,
    **dict.fromkeys(("_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad"), _fused_optimizer),
}


# Ours


def accumulation(
    accumulators: Sequence[Tensor],
    gradients: Sequence[Tensor],
    factors: Sequence[float | Tensor | None],
    overwrite: Sequence[bool],
) -> list[Operand]:
    """accumulator <- beta * accumulator + scale * gradient; a gradient may be its accumulator.

    factors: what is multiplied by; tensors among them are read.
    """
    found: dict[tuple, Operand] = {}
    for index, (accumulator, gradient) in enumerate(zip(accumulators, gradients, strict=True)):
        operand = found.setdefault(_identity(accumulator), Operand(accumulator))
        operand.written = bytes_of(accumulator)
        if not _flag(overwrite, index):
            operand.read = operand.written
        source = found.setdefault(_identity(gradient), Operand(gradient))
        source.read = bytes_of(gradient)
    for factor in factors:
        if isinstance(factor, Tensor):
            found.setdefault(_identity(factor), Operand(factor)).read = factor.element_size()
    return list(found.values())


def measurement(tensors: Sequence[Tensor], results: Sequence[Tensor]) -> list[Operand]:
    """Tensors are read and results are written, each once."""
    found = {_identity(tensor): Operand(tensor, read=bytes_of(tensor)) for tensor in tensors}
    return [*found.values(), *(Operand(result, written=bytes_of(result)) for result in results)]


def _rows_named(indices: Tensor, padding: int) -> tuple[int, int] | None:
    """How many indices name a row other than `padding`, and how many such rows: by the data, for which a GPU
    is waited for. None where there is none to read."""
    if isinstance(indices, FakeTensor) or indices.is_meta:
        return None
    if indices.is_cuda and torch.cuda.is_current_stream_capturing():
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
    found = [Operand(table, touched, touched), Operand(indices, bytes_of(indices)), Operand(gradients, fresh)]
    if isinstance(scale, Tensor):
        found.append(Operand(scale, scale.element_size()))
    return found


def _accumulate_rows(call: Call) -> list[Operand] | None:
    return rows_accumulation(
        call["table"], call["indices"], call["gradients"], call["scale_tensor"], call["padding"]
    )


def _flag(overwrite: Sequence[bool], index: int) -> bool:
    """As the operators take flags: none for all False, one for all, or one per tensor."""
    return bool(overwrite) and overwrite[index if len(overwrite) > 1 else 0]


def _scale_accumulate(call: Call) -> list[Operand]:
    factors = call["scale_tensor"], call["keep_tensor"]
    return accumulation(call.tensors("accumulators"), call.tensors("gradients"), factors, call["overwrite"])


def _accumulate_prepared(call: Call) -> list[Operand] | None:
    """The plan says what its accumulators are."""
    (plan,) = call.tensors("plan")
    gradients = call.tensors("gradients")
    if isinstance(plan, FakeTensor):
        return None
    words = plan.tolist()
    found = [Operand(gradient, bytes_of(gradient)) for gradient in gradients]
    factors = *call.tensors("scale_tensor"), *call.tensors("keep_tensor")
    found += [Operand(factor, factor.element_size()) for factor in factors]
    for index, gradient in enumerate(gradients):
        address, elements, dtype = plan_entry(words, index)
        size = elements * dtype.itemsize
        in_place = address == gradient.data_ptr()  # read already
        read = 0 if in_place or _flag(call["overwrite"], index) else size
        found.append(Operand(None, read, size, str(gradient.device)))
    return found


def _gemm_accumulate(call: Call) -> list[Operand]:
    """Both factors, and the sum, which is not read where none of it is kept."""
    overwrites = call["keep_tensor"] is None and call["keep"] == 0
    return whole(call, overwrites=overwrites)


def _and_results(rule: Rule) -> Rule:
    """What `rule` says, and the partial norms that come out of it."""

    def with_results(call: Call) -> list[Operand] | None:
        found = rule(call)
        return None if found is None else [*found, *measurement((), call.results)]

    return with_results


def _measurement(name: str) -> Rule:
    return lambda call: measurement(call.tensors(name), call.results)


_OUR_RULES: dict[str, Rule] = {
    "scale_accumulate_": _scale_accumulate,
    "accumulate_prepared_": _accumulate_prepared,
    "scale_accumulate_norm_": _and_results(_scale_accumulate),
    "accumulate_prepared_norm_": _and_results(_accumulate_prepared),
    "gemm_accumulate_": _gemm_accumulate,
    "norm_partials": _measurement("tensors"),
    "finish_norm": _measurement("partials"),
    "accumulate_rows_": _accumulate_rows,
}

#: Launches outside the dispatcher, and what their operands are to these.
_LAUNCHES: dict[str, Callable[..., list[Operand] | None]] = {
    "triton::scale_accumulate": accumulation,
    "triton::norm_partials": measurement,
    "triton::finish_norm": measurement,
    "triton::add_rows": rows_accumulation,
}


def launch_operands(kernel: str, *operands: Any) -> list[Operand] | None:
    """What a kernel that no dispatcher has seen has read and written; None where it cannot be known."""
    return _LAUNCHES[kernel](*operands)
