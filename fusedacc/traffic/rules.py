"""What one operator call reads and writes: each operand once.

Compulsory bytes are what an ideal kernel with a perfect cache would move. A tensor passed twice is read once,
an expanded one only in the elements that it really has, and temporaries inside an operator do not count. By
default the schema decides, and each operand counts whole; a rule handles operators that move only a part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels.constants import plan_entry
from ..kernels.torch_private import FakeTensor, OpOverload, disable_dispatch_modes


@dataclass
class Operand:
    """Bytes read from and written to one tensor, or to a sum that no tensor refers to (None)."""

    tensor: Tensor | None
    read: int = 0
    written: int = 0
    device: str = ""


class Call:
    """One operator call: its arguments by name, and its results as a list."""

    def __init__(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        schema = func._schema
        self.func = func
        self.arguments = schema.arguments
        self.values: dict[str, Any] = {}
        for index, argument in enumerate(schema.arguments):
            given = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
            self.values[argument.name] = given
        self.results = list(tensors_in(result))

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name)

    def tensors(self, name: str) -> list[Tensor]:
        return list(tensors_in(self.values.get(name)))


Rule = Callable[[Call], "list[Operand] | None"]


def name_of(func: OpOverload) -> str:
    """Return the operator's name with its namespace, without the overload."""
    return func._schema.name


def tensors_in(*values: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested lists, tuples and dicts."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(*value)
        elif isinstance(value, dict):
            yield from tensors_in(*value.values())


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a strided tensor's elements; those of an expanded tensor count once."""
    if tensor.numel() == 0:
        return 0
    sizes = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    elements = math.prod(size for size, _ in sizes)
    reach = 1 + sum((size - 1) * abs(stride) for size, stride in sizes)  # windows that overlap
    return min(elements, reach) * tensor.element_size()


def whole(
    call: Call,
    unread: Sequence[str] = (),
    overwrites: bool = False,
    kept: Sequence[str] = (),
    partial: dict[str, int] | None = None,
) -> list[Operand]:
    """Count each operand once: read arguments, write results and the arguments that the schema marks as
    changed.

    unread: arguments that are not read. overwrites: arguments changed in place are not read either. kept:
    arguments that the schema marks as changed, but that are not. partial: bytes read of arguments of which
    only a part is read.
    """
    operands: list[Operand] = []
    partial = partial or {}
    for argument in call.arguments:
        changed = argument.alias_info is not None and argument.alias_info.is_write
        written = changed and argument.name not in kept
        read = not (argument.name in unread or argument.is_out or (written and overwrites))
        for tensor in call.tensors(argument.name):
            size = bytes_of(tensor)
            share = min(size, partial.get(argument.name, size))
            operands.append(Operand(tensor, share if read else 0, size if written else 0))
    given = set(map(identity, tensors_in(call.values)))
    return merged([*operands, *writes(result for result in call.results if identity(result) not in given)])


def reads(*values: Any) -> list[Operand]:
    return [Operand(tensor, bytes_of(tensor)) for tensor in tensors_in(*values)]


def writes(tensors: Iterable[Tensor]) -> list[Operand]:
    return [Operand(tensor, written=bytes_of(tensor)) for tensor in tensors]


def has_data(tensor: Tensor) -> bool:
    """Return whether the elements can be read now; on a GPU this waits for the device."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def merged(operands: Iterable[Operand]) -> list[Operand]:
    """Return each tensor once, with the most that is read and written of it."""
    by_tensor: dict[tuple, Operand] = {}
    for operand in operands:
        assert operand.tensor is not None
        known = by_tensor.setdefault(identity(operand.tensor), operand)
        known.read = max(known.read, operand.read)
        known.written = max(known.written, operand.written)
    return list(by_tensor.values())


def identity(tensor: Tensor) -> tuple:
    """Return a key that is equal for tensors with the same elements in the same order."""
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.dtype,
    )


#: Our operators that read no data.
_OUR_METADATA = frozenset({"fusedacc::prepare", "fusedacc::build_info", "fusedacc::launched_product"})


def accumulation(
    accumulators: Sequence[Tensor],
    gradients: Sequence[Tensor],
    factors: Sequence[float | Tensor | None],
    overwrite: Sequence[bool],
) -> list[Operand]:
    """accumulator <- beta * accumulator + scale * gradient; a gradient may be its accumulator.

    factors: the multipliers; tensors among them are read.
    """
    operands = writes(accumulators)
    for index, operand in enumerate(operands):
        operand.read = 0 if _flag(overwrite, index) else operand.written
    return merged([*operands, *reads(gradients, factors)])


def measurement(tensors: Sequence[Tensor], results: Sequence[Tensor]) -> list[Operand]:
    return merged([*reads(tensors), *writes(results)])


def rows_accumulation(
    table: Tensor, indices: Tensor, gradients: Tensor, scale: float | Tensor | None, padding: int
) -> list[Operand] | None:
    """Gradients are added to the rows that the indices name; each row is read and written once."""
    if not has_data(indices):
        return None
    with disable_dispatch_modes():  # do not count the meter's own reads
        named = indices[indices != padding]
        rows = named.unique().numel()
    columns = table.shape[1]
    fresh = min(bytes_of(gradients), named.numel() * columns * gradients.element_size())
    touched = rows * columns * table.element_size()
    return [Operand(table, touched, touched), Operand(gradients, fresh), *reads(indices, scale)]


def _flag(overwrite: Sequence[bool], index: int) -> bool:
    """Flags as the operators take them: none for all False, one for all, or one per tensor."""
    return bool(overwrite) and overwrite[index if len(overwrite) > 1 else 0]


def _scale_accumulate(call: Call) -> list[Operand]:
    moved = accumulation(
        call.tensors("accumulators"),
        call.tensors("gradients"),
        factors=(call["scale_tensor"], call["beta_tensor"]),
        overwrite=call["overwrite"],
    )
    return [*moved, *writes(call.results)]


def _accumulate_prepared(call: Call) -> list[Operand] | None:
    (plan,) = call.tensors("plan")
    gradients = call.tensors("gradients")
    if isinstance(plan, FakeTensor):
        return None
    words = plan.tolist()
    operands = [*reads(gradients, call["scale_tensor"], call["beta_tensor"]), *writes(call.results)]
    for index, gradient in enumerate(gradients):
        address, elements, dtype = plan_entry(words, index)
        size = elements * dtype.itemsize
        in_place = address == gradient.data_ptr()  # read already
        read = 0 if in_place or _flag(call["overwrite"], index) else size
        operands.append(Operand(None, read, size, str(gradient.device)))
    return operands


def _shares(offsets: Tensor, rows: int) -> tuple[float, float] | None:
    """Return the shares of experts and of rows that are used; on a GPU this waits for the device."""
    if not has_data(offsets):
        return None
    with disable_dispatch_modes():  # do not count the meter's own reads
        ends = offsets.tolist()
    if not ends:
        return 0.0, 0.0
    used_experts = sum(end > start for start, end in zip([0, *ends], ends, strict=False))
    return used_experts / len(ends), ends[-1] / max(rows, 1)


def _grouped_product(call: Call) -> list[Operand] | None:
    """aten::_grouped_mm, with rows times their experts' matrices, or rows times rows into matrices."""
    left = call["self"]
    right = call["mat2"]
    offsets = call["offs"]
    if offsets is None or left.dim() != 2:
        return whole(call)
    shares = _shares(offsets, left.shape[0 if right.dim() == 3 else 1])
    if shares is None:
        return None
    experts, rows = shares
    has_matrices = right.dim() == 3
    read = {
        "self": round(bytes_of(left) * rows),
        "mat2": round(bytes_of(right) * (experts if has_matrices else rows)),
    }
    operands = whole(call, partial=read)
    if has_matrices:
        for operand in operands:
            operand.written = round(operand.written * rows)
    return operands


def grouped_accumulation(
    accumulator: Tensor,
    left: Tensor,
    right: Tensor,
    offsets: Tensor,
    scale: float | Tensor | None,
    beta: float | Tensor,
) -> list[Operand] | None:
    """Products of rows are added to their experts' matrices; all are written if `beta` is not 1."""
    shares = _shares(offsets, left.shape[0])
    if shares is None:
        return None
    experts, rows = shares
    with disable_dispatch_modes():
        kept = float(beta)
    (total,) = writes([accumulator])
    if kept == 1:
        total.written = round(total.written * experts)
    total.read = 0 if kept == 0 else total.written
    operands = [Operand(operand, round(bytes_of(operand) * rows)) for operand in (left, right)]
    return [total, *operands, *reads(offsets, scale, beta)]


def change(changed: Tensor, *read: Tensor | None) -> list[Operand]:
    """One tensor is read and written, others are read."""
    (operand,) = writes([changed])
    operand.read = operand.written
    return [operand, *reads(*read)]


def _of(launch: Callable[..., list[Operand] | None], *names: str) -> Rule:
    """Return the rule of an operator that moves what a launch with these arguments moves."""
    return lambda call: launch(*map(call.__getitem__, names))


def _grouped_accumulate(call: Call) -> list[Operand] | None:
    beta = "beta" if call["beta_tensor"] is None else "beta_tensor"
    return _of(grouped_accumulation, "accumulator", "left", "right", "offsets", "scale_tensor", beta)(call)


#: Rules of our operators.
_OUR_RULES: dict[str, Rule] = {
    "scale_accumulate_": _scale_accumulate,
    "accumulate_prepared_": _accumulate_prepared,
    **dict.fromkeys(("norm_partials", "finish_norm", "softmax_statistics_", "softmax_gradient_"), whole),
    "gemm_accumulate_": lambda call: whole(
        call, overwrites=call["beta_tensor"] is None and call["beta"] == 0
    ),
    "grouped_accumulate_": _grouped_accumulate,
    "accumulate_rows_": _of(rows_accumulation, "table", "indices", "gradients", "scale_tensor", "padding"),
}

#: Rules of kernels launched outside the dispatcher; they return None if the bytes are unknown.
LAUNCHES: dict[str, Callable[..., list[Operand] | None]] = {
    "triton::scale_accumulate": accumulation,
    "triton::add_rows": rows_accumulation,
    "triton::grouped_accumulate": grouped_accumulation,
    **dict.fromkeys(("triton::norm_partials", "triton::finish_norm"), measurement),
    **dict.fromkeys(("triton::softmax_statistics", "triton::softmax_gradient"), change),
}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# torch's operators, named without overload or trailing underscore. An operator is counted if it is in a set,
# has a rule, or is tagged as pointwise by torch.

#: Operators that touch no data. Views by schema need no entry.
METADATA = _names(
    """
    _assert_tensor_metadata _fused_sdp_choice _has_compatible_shallow_copy_type _nested_tensor_size
    _reshape_alias _unsafe_view alias can_cast dense_dim detach detach_ dim empty empty_like empty_permuted
    empty_quantized empty_strided is_complex is_contiguous is_floating_point is_pinned is_same_size
    is_strides_like_format lift lift_fresh new_empty new_empty_strided numel record_stream resize_ result_type
    set_ set_data size sparse_dim storage_offset stride sym_is_contiguous sym_numel sym_size
    sym_storage_offset sym_stride unsafe_split unsafe_split_with_sizes
    """
)

#: Operators that read every operand once and write every result once. Pointwise operators (by torch's tag),
#: those of `_foreach_*`, and in-place and out variants of these names need no entry.
WHOLE = _names(
    """
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _addmm_activation
    _amp_foreach_non_finite_check_and_unscale _amp_update_scale _assert_async _conj_physical _convolution
    _efficient_attention_backward _efficient_attention_forward _flash_attention_backward
    _flash_attention_forward _fused_rms_norm _fused_rms_norm_backward _int_mm _local_scalar_dense _log_softmax
    _log_softmax_backward_data _pin_memory _safe_softmax _scaled_dot_product_cudnn_attention
    _scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention
    _scaled_dot_product_efficient_attention_backward _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention_for_cpu_backward _scaled_mm _softmax _softmax_backward_data _to_copy
    _weight_norm_interface _weight_norm_interface_backward addbmm addmm addmv addr all amax amin aminmax any
    arange argmax argmin argsort avg_pool2d avg_pool2d_backward baddbmm bernoulli binary_cross_entropy
    binary_cross_entropy_backward bincount bmm bucketize cat clone col2im complex constant_pad_nd convolution
    copy count_nonzero cudnn_convolution cummax cumprod cumsum diag_embed diagonal_backward dot
    embedding_dense_backward equal eye flip floor_divide full glu glu_backward histc huber_loss
    huber_loss_backward im2col kthvalue linalg_vector_norm linear linspace logcumsumexp logsumexp masked_fill
    max max_pool2d_with_indices max_pool2d_with_indices_backward mean median min mkldnn_convolution mm mode
    mse_loss mse_loss_backward multinomial mv native_channel_shuffle native_dropout native_dropout_backward
    native_group_norm native_layer_norm nonzero norm ones outer pixel_shuffle pixel_unshuffle prod rand
    randint randn randperm reflection_pad2d repeat repeat_interleave roll rot90 scalar_tensor searchsorted
    select_backward slice_backward smooth_l1_loss smooth_l1_loss_backward soft_margin_loss sort
    split_with_sizes_copy stack std std_mean sum topk trace tril tril_indices triu triu_indices
    unfold_backward upsample_bilinear2d upsample_bilinear2d_backward upsample_nearest2d
    upsample_nearest2d_backward var var_mean zeros
    """
)

#: In-place operators that do not read what they write.
OVERWRITING = _names(
    """
    _foreach_copy_ _foreach_zero_ bernoulli_ cauchy_ copy_ exponential_ fill_ geometric_ log_normal_ normal_
    random_ uniform_ zero_
    """
)

#: Arguments that only give a shape and a dtype.
UNREAD = {
    **dict.fromkeys(
        _names("copy empty_like full_like new_full new_ones new_zeros nll_loss_backward nll_loss2d_backward")
        | _names("ones_like rand_like randint_like randn_like zeros_like"),
        ("self",),
    ),
    "native_layer_norm_backward": ("bias",),
}


def is_metadata(func: OpOverload) -> bool:
    """Return whether the call reads no data and makes no view."""
    namespace, _, name = name_of(func).partition("::")
    if namespace in ("prim", "profiler"):
        return True
    return name in METADATA if namespace == "aten" else name_of(func) in _OUR_METADATA


def is_view(func: OpOverload) -> bool:
    """Return whether the call returns or changes views, by its schema. Not valid for composite operators."""
    return func.is_view or torch.Tag.inplace_view in func.tags


def operands_of(
    func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> list[Operand] | None:
    """Return what a call reads and writes; None without a rule, or for tensors without strides."""
    for tensor in tensors_in(args, kwargs, result):
        if tensor.layout is not torch.strided or tensor.is_nested:
            return None
        if any(isinstance(size, torch.SymInt) for size in (*tensor.shape, *tensor.stride())):
            return None
    call = Call(func, args, kwargs, result)
    namespace, _, name = name_of(func).partition("::")
    if namespace == "fusedacc" and name in _OUR_RULES:
        return _OUR_RULES[name](call)
    if name_of(func) == "mkldnn::_linear_pointwise":
        return whole(call)
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
        or torch.Tag.pointwise in call.func.tags
    )
    if not known:
        return None
    if base in ("addmm", "addmv", "addbmm", "baddbmm", "addr") and call["beta"] == 0:
        return whole(call, unread=("self",))
    return whole(call, unread=UNREAD.get(base, ()), overwrites=name in OVERWRITING)


def _gathered(call: Call) -> list[Operand]:
    """Reads as many elements of `self` (of an embedding's `weight`) as the result has."""
    source = "weight" if "weight" in call.values else "self"
    return whole(call, partial={source: sum(map(bytes_of, call.results))})


def _partly_written(call: Call, size: int, reads_too: bool, others: list[Operand]) -> list[Operand]:
    """Writes so many bytes of `self`, and reads them if it adds; everything if the result is a copy."""
    target: Tensor = call["self"]
    whole_size = bytes_of(target)
    if call.results and identity(call.results[0]) != identity(target):
        return [Operand(target, whole_size), Operand(call.results[0], 0, whole_size), *others]
    written = min(size, whole_size)
    return [Operand(target, written if reads_too else 0, written), *others]


def _scattered(adds: bool) -> Rule:
    """Writes (and reads, if it adds) as many elements of `self` as the indices name."""

    def rule(call: Call) -> list[Operand] | None:
        target: Tensor = call["self"]
        source = next((name for name in ("source", "src", "values") if name in call.values), None)
        index = "index" if "index" in call.values else "indices"
        if any(tensor.dtype in (torch.bool, torch.uint8) for tensor in call.tensors(index)):
            return None  # the number of masked elements depends on data
        if source == "values":
            indices = call["indices"]
            given = (index.shape for index in indices if index is not None)
            elements = math.prod(torch.broadcast_shapes(*given)) * math.prod(
                size for dim, size in enumerate(target.shape) if dim >= len(indices) or indices[dim] is None
            )
        elif index == "index" and source == "source":
            elements = call["source"].numel()
        else:
            elements = call[index].numel()
        reads_too = adds or bool(call["accumulate"]) or call["reduce"] is not None
        others = reads(call[index], call[source] if source else None)
        if source == "src":
            others[-1].read = min(others[-1].read, elements * call["src"].element_size())
        return _partly_written(call, elements * target.element_size(), reads_too, others)

    return rule


def _filled(call: Call) -> list[Operand]:
    """Writes as many slices of `self` as there are indices."""
    (target,) = call.tensors("self")
    (index,) = call.tensors("index")
    slice_size = bytes_of(target) // max(1, target.shape[call["dim"]]) if target.dim() else bytes_of(target)
    return _partly_written(call, index.numel() * slice_size, False, reads(index))


def _convolution_backward(call: Call) -> list[Operand]:
    """Only the weight's gradient needs the input, and only the input's gradient needs the weight."""
    for_input, for_weight, _ = call["output_mask"]
    unread = [name for name, wanted in (("weight", for_input), ("input", for_weight)) if not wanted]
    return whole(call, unread=unread)


def _batch_norm(call: Call) -> list[Operand]:
    """Training changes the running statistics, whatever the schema says."""
    operands = whole(call)
    running = {identity(t) for n in ("running_mean", "running_var") for t in call.tensors(n)}
    training = call["training"] is not False and call["train"] is not False
    for operand in operands:
        if operand.tensor is not None and identity(operand.tensor) in running:
            operand.written = operand.read if training else 0
    return operands


def _batch_norm_backward(call: Call) -> list[Operand]:
    """Training reads the batch's statistics, evaluation the running ones."""
    running = ("running_mean", "running_var") if call["train"] else ("save_mean", "save_invstd")
    needs_input = call["output_mask"][0] or call["output_mask"][1]
    return whole(call, unread=running if needs_input else (*running, "input"))


def _fused_optimizer(call: Call) -> list[Operand]:
    """Gradients are marked as changed, but change only if there is a scale to remove."""
    kept = ["state_steps"] if call["grad_scale"] is not None else ["state_steps", "grads"]
    unread = ["momentum_buffer_list"] if call["is_first_step"] else []
    return whole(call, unread=unread, kept=kept)


_RULES: dict[str, Rule] = {
    **dict.fromkeys(("embedding", "index", "index_select", "gather", "take"), _gathered),
    # One element of `self` for each target.
    **dict.fromkeys(
        ("nll_loss_forward", "nll_loss2d_forward"),
        lambda call: whole(call, partial={"self": call["target"].numel() * call["self"].element_size()}),
    ),
    **dict.fromkeys(("index_put", "_index_put_impl", "_unsafe_index_put"), _scattered(adds=False)),
    **dict.fromkeys(("scatter", "index_copy"), _scattered(adds=False)),
    **dict.fromkeys(("index_add", "scatter_add"), _scattered(adds=True)),
    "index_fill": _filled,
    "_grouped_mm": _grouped_product,
    "convolution_backward": _convolution_backward,
    "native_group_norm_backward": lambda call: whole(
        call, unread=() if any(call["output_mask"][:2]) else ("input",)
    ),
    "native_batch_norm_backward": _batch_norm_backward,
    "bernoulli": lambda call: whole(call, unread=("self",) if call["p"] is not None else ()),
    "cudnn_batch_norm_backward": whole,
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit"), _batch_norm),
    **dict.fromkeys(("_batch_norm_with_update", "cudnn_batch_norm"), _batch_norm),
    **dict.fromkeys(("_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad"), _fused_optimizer),
}
