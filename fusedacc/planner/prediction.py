"""Predict the memory and traffic of an update for any micro-batch, by a run on fake tensors.

`train` is the training step that is planned, on copies of the model and the optimizer. `Trace` records what
its operators would allocate and release. Fake tensors show what operators return. What CPU operators allocate
beyond that is measured: each shape runs once on real tensors (`OperatorTrials`). Some operators behave
differently on fake CPU tensors; they are replaced while the step runs (`GroupedProducts`, `RunLstmByOneDnn`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import random
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from ..accumulators.reduction import reduction_of
from ..kernels.rounding import NEAREST, STOCHASTIC
from ..kernels.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    TorchDispatchMode,
    UnsupportedOperatorException,
    disable_dispatch_modes,
    keystr,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_with_path,
)
from ..optimizer import AccumulatingOptimizer
from ..traffic import TrafficMeter
from ..traffic.rules import name_of
from .allocations import (
    ACCUMULATORS,
    ACTIVATIONS,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARIES,
    Block,
    Inside,
    Look,
    Operator,
    Peak,
    inside_of_calls,
    peak,
    recorded_peak,
)
from .budget import available, format_bytes

# The training step

#: The dimension that counts samples: for all tensors, or by path; None for a tensor without one.
BatchDims = int | Mapping[str, int | None]


class Batch:
    """One real batch, and how to make others of another size. Arguments and errors as those of `plan`.

    batch_dims: a dict names a tensor by its path (`"['mask']"`, `"[0]"`) or the last part of it (`"mask"`).
    Tensors that it does not name count samples in dimension 0.
    """

    def __init__(self, sample: Any, batch_dims: BatchDims = 0) -> None:
        self._sample = sample
        leaves, _ = tree_flatten_with_path(sample)
        tensors = {keystr(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}
        if not tensors:
            raise TypeError(f"sample_batch must hold a tensor, got {type(sample).__name__} without any")
        self._dims = {path: _dim(path, tensor, batch_dims) for path, tensor in tensors.items()}
        for name in batch_dims if isinstance(batch_dims, Mapping) else ():
            if not any(_named(path, name) for path in tensors):
                raise ValueError(
                    f"batch_dims names {name!r}, which is not in sample_batch; allowed: {', '.join(tensors)}"
                )
        sizes = {path: tensors[path].shape[dim] for path, dim in self._dims.items() if dim is not None}
        if not sizes:
            raise ValueError(f"batch_dims={batch_dims!r} leaves no tensor that counts samples")
        #: Samples in it.
        self.size, _ = Counter(sizes.values()).most_common(1)[0]
        odd = [path for path, size in sizes.items() if size != self.size]
        if odd:
            seen = ", ".join(
                f"{path}: {size} in dimension {self._dims[path]}" for path, size in sizes.items()
            )
            raise ValueError(
                f"sample_batch's tensors do not agree on the number of samples ({seen}); name the dimension "
                f"that counts them, or None where there is none, as batch_dims={{{odd[0]!r}: None}}"
            )
        if self.size == 0:
            raise ValueError("sample_batch has no samples; allowed: at least one")

    def drawn(self, size: int) -> Any:
        """Return a batch of `size` samples: the first ones, repeated if there are too few."""

        def draw(leaf: Tensor, dim: int) -> Tensor:
            if size <= self.size:
                return leaf.narrow(dim, 0, size).clone()
            return leaf.index_select(dim, torch.arange(size, device=leaf.device) % self.size)

        return self._map(draw, self._sample)

    def shapes(self, size: int, device: torch.device) -> Any:
        """Return empty tensors on a device with the shapes and dtypes of `drawn(size)`."""

        def make(path: Any, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            shape = list(leaf.shape)
            dim = self._dims[keystr(path)]
            if dim is not None:
                shape[dim] = size
            made = torch.empty(shape, dtype=leaf.dtype, device=device)
            return made.requires_grad_() if leaf.requires_grad else made

        return tree_map_with_path(make, self._sample)

    def split(self, batch: Any, size: int) -> Iterator[tuple[int, Any]]:
        """Return the sizes and views of the parts of at most `size` samples of a batch of this layout."""
        sizes = parts_of(Batch(batch, self._dims).size, size)
        parts = []
        for index, samples in enumerate(sizes):
            cut = partial(Tensor.narrow, start=index * size, length=samples)
            parts.append((samples, self._map(cut, batch)))
        return iter(parts)

    def _map(self, change: Callable[[Tensor, int], Tensor], batch: Any) -> Any:
        def changed(path: Any, leaf: Any) -> Any:
            dim = self._dims.get(keystr(path)) if isinstance(leaf, Tensor) else None
            return leaf if dim is None else change(leaf, dim)

        return tree_map_with_path(changed, batch)


def parts_of(samples: int, size: int) -> list[int]:
    """Return the sizes of the parts of at most `size`; the last one may be smaller."""
    full_parts, rest = divmod(samples, size)
    return [size] * full_parts + ([rest] if rest else [])


def _named(path: str, name: str) -> bool:
    return path == name or path.endswith((f"['{name}']", f".{name}"))


def _dim(path: str, tensor: Tensor, batch_dims: BatchDims) -> int | None:
    dim: Any = batch_dims
    if isinstance(batch_dims, Mapping):
        dim = next((named for name, named in batch_dims.items() if _named(path, name)), 0)
    if dim is None:
        return None
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"batch_dims must be an int, or a dict of ints and None; got {batch_dims!r}")
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(
            f"sample_batch{path} has shape {tuple(tensor.shape)}, and so no dimension {dim} that counts "
            f"samples; give its own dimension, or None: batch_dims={{{path!r}: ...}}"
        )
    return dim


#: A model and the optimizer that trains it: the wrapper, or a bare one.
Copy = tuple[nn.Module, Optimizer]


class Recipe(NamedTuple):
    """How to make an optimizer for a copy. Keeps no wrapper, so that another one can claim its parameters."""

    inner: Optimizer
    #: The wrapper's arguments, without the inner optimizer, the model and the ranks; None for the plain loop.
    arguments: dict[str, Any] | None
    #: Whether the wrapper was made with `model=`.
    takes_model: bool


def recipe_of(optimizer: Optimizer | Recipe) -> Recipe:
    """Return the recipe of an optimizer as it is now; return a recipe unchanged."""
    if isinstance(optimizer, Recipe):
        return optimizer
    if not isinstance(optimizer, AccumulatingOptimizer):
        return Recipe(optimizer, None, False)
    window = optimizer._window
    parameters = optimizer._parameter_set
    seed = optimizer._accumulators.noise.seed
    arguments = {
        "gradient_accumulation_steps": window.schedule,
        "reduction": window.reduction.name,
        "accumulate_dtype": optimizer._accumulate_dtype,
        "rounding": NEAREST if seed is None else STOCHASTIC,
        "seed": seed,
        **dataclasses.asdict(optimizer._inner_update.settings),
        "master_weights": optimizer._masters is not None,
        "keep_casts": parameters.casts is not None,
        "backend": optimizer._accumulators.backend,
    }
    return Recipe(optimizer.optimizer, arguments, parameters._replacements is not None)


def _faked(mode: FakeTensorMode, device: torch.device, tensor: Tensor) -> Tensor:
    """Return a fake tensor on a device. `mode` is entered."""
    if tensor.dim() == 0 and tensor.device.type == "cpu" and not tensor.requires_grad:
        with disable_dispatch_modes():
            value = tensor.item()
        return torch.tensor(value, dtype=tensor.dtype)  # the value stays known, as of an optimizer's step
    if tensor.device.type == device.type:
        return mode.from_tensor(tensor)
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def copy_of(
    model: nn.Module,
    recipe: Recipe,
    windows: Sequence[int],
    replaced: Callable[[Tensor], Tensor] | None = None,
) -> Copy:
    """Return a copy to train and throw away. `replaced` makes its tensors; by default they are copied.

    windows: micro-batches of each update to come, for a wrapper that counts them.
    """
    inner = recipe.inner
    memo: dict[int, Any] = {}
    if replaced is not None:
        # Also the tensors of modules that are not registered.
        holders = (*map(vars, model.modules()), *inner.param_groups, *inner.state.values())
        held_by = [list(holder.values()) for holder in holders]
        for leaf in tree_leaves([list(model.parameters()), list(model.buffers()), *held_by]):
            if isinstance(leaf, Tensor):
                memo.setdefault(id(leaf), replaced(leaf))
    copied_model = copy.deepcopy(model, memo)
    copied_model.zero_grad(set_to_none=True)
    copied_inner = copy.deepcopy(inner, memo)
    if recipe.arguments is None:
        return copied_model, copied_inner
    arguments = dict(recipe.arguments)
    if arguments["gradient_accumulation_steps"] is not None:
        arguments["gradient_accumulation_steps"] = lambda updates: windows[min(updates, len(windows) - 1)]
    arguments["model"] = copied_model if recipe.takes_model else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the user has seen them
        return copied_model, AccumulatingOptimizer(copied_inner, **arguments)


#: The loss of a batch, a 0-dim tensor.
LossFunction = Callable[[nn.Module, Any], Tensor]
#: Called with the phase that begins: "forward", "backward" or "update".
Phase = Callable[[str], contextlib.AbstractContextManager[Any]]
#: Micro-batches per window that need to run: the first and the last. Those between are like the last.
MICRO_BATCHES = 2


def windows_of(steps: int) -> tuple[int, ...]:
    """Return the windows to run: one that creates the state, then one like those of `steps` micro-batches."""
    return 1, min(steps, MICRO_BATCHES)


def models_own_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return `model(**batch).loss`, as in Transformers."""
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"loss_fn=None calls model(**sample_batch).loss, and sample_batch is a {type(batch).__name__}; "
            "allowed: a dict, or a loss_fn(model, batch) that returns the loss"
        )
    return model(**batch).loss


def train(
    copied: Copy,
    draw: Callable[[], Any],
    loss_fn: LossFunction,
    windows: Sequence[int],
    phase: Phase,
    look: Callable[[], None],
    in_flight: int = 1,
) -> None:
    """Run whole windows, each with an update at its end.

    windows: micro-batches of each window; the wrapper's schedule must match. draw: makes a micro-batch. look:
    called between phases, when memory may have got a new use. in_flight: forward passes before the first
    backward pass, as in a pipeline schedule; the wrapper counts all of them as one micro-batch.
    """
    model, optimizer = copied
    wrapper = optimizer if isinstance(optimizer, AccumulatingOptimizer) else None
    counted = wrapper is not None and wrapper.gradient_accumulation_steps is not None
    weighted = wrapper is not None and reduction_of(wrapper.reduction).weighs
    look()
    for steps in windows:
        for step in range(steps):
            around: Any = wrapper.accumulate(weight=1.0) if wrapper and weighted else contextlib.nullcontext()
            with around:
                with phase("forward"):
                    losses = [_checked_loss(loss_fn(model, draw())) for _ in range(in_flight)]
                    if not counted and steps > 1:
                        losses = [loss / steps for loss in losses]
                with phase("backward"):
                    while losses:
                        losses.pop(0).backward()
                look()
                if counted or step == steps - 1:
                    with phase("update"):
                        optimizer.step()
            look()
            if counted or step == steps - 1:
                optimizer.zero_grad()


def _checked_loss(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"loss_fn must return the loss, a 0-dim tensor; got {what}")
    return loss


def held(copied: Copy) -> dict[str, list[Tensor]]:
    """Return the tensors that outlive a micro-batch, by kind."""
    model, optimizer = copied
    sums: list[Any] = []
    state = [value for of_parameter in optimizer.state.values() for value in of_parameter.values()]
    if isinstance(optimizer, AccumulatingOptimizer):
        sums = [optimizer._accumulators.grads.current(slot) for slot in optimizer._slots]
        state += optimizer._masters.tensors() if optimizer._masters is not None else []
    return {
        GRADIENTS: [p.grad for p in model.parameters() if p.grad is not None],
        ACCUMULATORS: [value for value in sums if isinstance(value, Tensor)],
        OPTIMIZER: [value for value in state if isinstance(value, Tensor)],
        PARAMETERS: [*model.parameters(), *model.buffers()],
    }


# What operators allocate

aten = torch.ops.aten
#: Operators that allocate memory in proportion to their operands, in any dtype.
_ALWAYS = """
convolution convolution_backward mkldnn_rnn_layer mkldnn_rnn_layer_backward embedding_dense_backward
_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
native_batch_norm_backward native_layer_norm_backward native_group_norm_backward
"""
#: Our products into sums: they pack operands per thread, or cast them.
_OURS = frozenset({"fusedacc::gemm_accumulate_", "fusedacc::grouped_accumulate_"})
#: Operators that allocate if operands have 16 bits.
_NARROW = frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm})
#: Operators that allocate if operands have several dtypes.
_MIXED = frozenset({aten.add, aten.sub, aten.mul, aten.div, aten.where, aten.addcmul, aten.lerp})
_KNOWN = _NARROW | _MIXED | {getattr(aten, name) for name in _ALWAYS.split()}
#: Operands with more bytes are not created for a trial.
MOST_BYTES = 2**26


@dataclasses.dataclass(frozen=True)
class Operand:
    """A tensor's layout."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return (1 + last) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Signature:
    """An operator and the layouts of its arguments."""

    text: str
    func: Any = dataclasses.field(compare=False)
    args: Any = dataclasses.field(compare=False)
    kwargs: Any = dataclasses.field(compare=False)

    @classmethod
    def of(cls, func: Any, arguments: Any, change: Callable[[Any], Any]) -> Signature:
        """Return the signature of a call with each of its arguments changed."""
        args, kwargs = tree_map(change, arguments)
        return cls(f"{func}{args}{kwargs}", func, args, kwargs)

    @property
    def operands(self) -> list[Operand]:
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Operand)]

    @property
    def is_small(self) -> bool:
        return sum(operand.bytes for operand in self.operands) <= MOST_BYTES


def signature(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> Signature | None:
    """Return the signature of a CPU call that may allocate more than it returns; None for others."""
    packet = func.overloadpacket
    if packet not in _KNOWN and name_of(func) not in _OURS:
        return None
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    dtypes = {tensor.dtype for tensor in tensors if tensor.dim() > 0}
    if packet in _NARROW and not any(dtype.itemsize == 2 for dtype in dtypes):
        return None
    if packet in _MIXED and len(dtypes - {torch.bool}) < 2:
        return None

    def layout(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return Operand(tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype)
        return leaf

    return Signature.of(func, (args, dict(kwargs)), layout)


class OperatorTrials:
    """Measures what each signature allocates, once, on a CPU."""

    def __init__(self) -> None:
        self._known: dict[Signature, Inside | None] = {}

    def __call__(self, asked: Iterable[Signature]) -> dict[Signature, Inside]:
        """Return what these signatures allocate. Calls with large operands are tried with fewer samples."""
        smaller = {call: _smaller(call) for call in set(asked)}
        untried = list({call for call, _ in smaller.values() if call.is_small} - set(self._known))
        with disable_dispatch_modes(), torch.enable_grad():  # without, an LSTM keeps no workspace
            measured = inside_of_calls([partial(_with_real_tensors, call) for call in untried])
        self._known.update(zip(untried, measured, strict=True))
        result = {}
        for call, (smaller_call, share) in smaller.items():
            inside = self._known.get(smaller_call)
            if inside is not None:
                result[call] = Inside(math.ceil(inside.peak / share), math.ceil(inside.kept / share))
            elif smaller_call not in self._known and call.func.overloadpacket in _NARROW:
                # The scratch memory of a 16-bit product does not grow with its operands.
                scratch = [
                    of_other.peak - of_other.kept
                    for other, of_other in self._known.items()
                    if of_other and other.func is call.func
                ]
                result[call] = Inside(max(scratch, default=0), 0)
        return result


def _smaller(call: Signature) -> tuple[Signature, float]:
    """Return the same call with fewer samples, so that its operands can be made, and the share of samples."""
    batch = next(iter(call.operands[0].shape), 0)
    size = batch
    smaller = call

    def fewer(leaf: Any) -> Any:
        if isinstance(leaf, Operand) and len(leaf.shape) > 2 and leaf.shape[0] == batch:
            return dataclasses.replace(leaf, shape=(size, *leaf.shape[1:]))
        return leaf

    while not smaller.is_small and size > 1 and call.func.overloadpacket not in _NARROW:
        size = (size + 1) // 2
        smaller = Signature.of(call.func, (call.args, call.kwargs), fewer)
    return smaller, size / batch if batch else 1.0


def _with_real_tensors(call: Signature) -> Callable[[], Any]:
    """Return the call with real tensors of zeros."""

    def made(leaf: Any) -> Any:
        if isinstance(leaf, Operand):
            return torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype).zero_()
        return leaf

    args, kwargs = tree_map(made, (call.args, call.kwargs))
    if call.func.overloadpacket is aten.mkldnn_rnn_layer_backward:
        # Fake tensors do not know the size of the workspace: take that of a real forward.
        tensors = args[:7]
        reverse, mode, hidden_size, layers, has_biases, train, bidirectional, sizes, batch_first = args[13:22]
        forward = aten.mkldnn_rnn_layer(
            *tensors,
            reverse,
            sizes,
            mode,
            hidden_size,
            layers,
            has_biases,
            bidirectional,
            batch_first,
            train,
        )
        workspace = forward[3]
        args = (*args[:22], workspace)
    elif name_of(call.func) == "fusedacc::grouped_accumulate_":
        # The offsets give each expert as many rows.
        experts = len(args[3])
        rows = len(args[1])
        ends = [rows * (expert + 1) // experts for expert in range(experts)]
        args = (*args[:3], torch.tensor(ends, dtype=torch.int32), *args[4:])
    return partial(call.func, *args, **kwargs)


#: Rows of a product are aligned to this many bytes.
_ALIGNMENT = 16


class GroupedProducts(TorchDispatchMode):
    """While entered inside a `FakeTensorMode`, `grouped_mm` of CPU tensors accepts any dtype, as on real
    ones."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._grouped_mm.default and args[0].device.type == "cpu":
            return _product(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _product(
    left: Tensor, right: Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Tensor:
    groups = []
    if left.dim() == 3 and right.dim() == 3:
        groups = [left.shape[0]]
    elif left.dim() == 2 and right.dim() == 2:
        groups = [0 if offs is None else offs.shape[0]]
    step = _ALIGNMENT // left.element_size()
    width = right.shape[-1]
    shape = [*groups, left.shape[-2], -(-width // step) * step]
    return torch.empty(shape, dtype=out_dtype or left.dtype, device=left.device)[..., :width]


#: Weights per layer and direction. LSTMs with projections have one more, and do not use oneDNN.
_WITH_BIASES = 4
#: oneDNN's number for an LSTM.
_LSTM = 2
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class RunLstmByOneDnn(TorchFunctionMode):
    """While entered, an LSTM of fake CPU tensors calls the operators that real tensors would call."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.lstm and not kwargs and len(args) == 9:
            input, state, weights, has_biases, layers, _, _, bidirectional, _ = args
            if (
                isinstance(state, (list, tuple))  # else the form for packed sequences
                and torch.backends.mkldnn.is_available()
                and torch.backends.mkldnn.enabled
                and input.device.type == "cpu"
                and input.dtype in _DTYPES
                and input.numel() > 0
                and len(weights) == layers * (1 + bidirectional) * (_WITH_BIASES if has_biases else 2)
            ):
                return _lstm(args)
        return func(*args, **(kwargs or {}))


def _lstm(args: tuple) -> tuple[Tensor, Tensor, Tensor]:
    x, state, weights, has_biases, layers, dropout, train, bidirectional, batch_first = args
    weights_per_layer = _WITH_BIASES if has_biases else 2
    directions = 1 + bidirectional
    if batch_first:
        x = x.transpose(0, 1)
    hidden, cells = (part.contiguous() for part in state)
    lasts: list[tuple[Tensor, Tensor]] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            w = list(weights[index * weights_per_layer : (index + 1) * weights_per_layer])
            if not has_biases:
                w += [torch.zeros(w[0].shape[0], dtype=w[0].dtype, device=w[0].device) for _ in range(2)]
            output, h, c, _ = torch.ops.aten.mkldnn_rnn_layer(
                x,
                *w,
                hidden[index],
                cells[index],
                direction == 1,
                [],
                _LSTM,
                hidden.shape[2],
                1,
                has_biases,
                False,
                False,
                train,
            )
            outputs.append(output)
            lasts.append((h, c))
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout and train and layer < layers - 1:
            x = functional.dropout(x, dropout)
    last_hidden = torch.stack([h for h, _ in lasts])
    last_cells = torch.stack([c for _, c in lasts])
    return (x.transpose(0, 1) if batch_first else x), last_hidden, last_cells


#: Operators that add gradients to sums.
_ADDS = (torch.ops.aten._foreach_add_.List, torch.ops.aten._foreach_add_.ScalarList)


class Trace(TorchDispatchMode):
    """While entered inside a `FakeTensorMode`, records the storages that operators return, until their last
    tensor dies.

    device: only storages on it count. Declare storages that existed before by `mark`.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._moment = 0
        self._alive: dict[int, tuple[Block, weakref.ref]] = {}
        self.blocks: list[Block] = []
        self.operators: list[Operator] = []
        #: Number of classes of each cross-entropy.
        self.classes: set[int] = set()
        #: The kind of new storages.
        self.kind = TEMPORARIES

    def mark(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Set the kind of these tensors' memory, from its allocation on."""
        for tensor in tensors:
            block = self._block(tensor)
            if block is not None:
                block.kind = kind

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context: new storages are of this phase's kind."""
        before = self.kind
        self.kind = ACTIVATIONS if name == "forward" else TEMPORARIES
        try:
            yield
        finally:
            self.kind = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._moment += 1
        start = self._moment
        result = func(*args, **kwargs)
        blocks_before = len(self.blocks)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._block(leaf)
        call = signature(func, args, kwargs)
        if call is not None:
            self.operators.append(Operator(start, call, self.blocks[blocks_before:]))
        if func.overloadpacket is aten._log_softmax and args[0].dim():
            self.classes.add(args[0].shape[-1])
        if func in _ADDS or func.namespace == "fusedacc":
            for operand in tree_leaves((args, kwargs)):
                block = self._block(operand) if isinstance(operand, Tensor) else None
                if block is not None and block.kind == TEMPORARIES:  # a term of the sum
                    block.kind = GRADIENTS
        return result

    def _block(self, tensor: Tensor) -> Block | None:
        """Return the block that holds the tensor; create it if it is new."""
        if tensor.device.type != self._device.type:
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            self._moment += 1
            columns = tensor.shape[-1] if tensor.dim() else 0
            block = Block(storage.nbytes(), self._moment, self.kind, columns=columns)
            self.blocks.append(block)
            self._alive[key] = block, weakref.ref(storage, partial(_end, weakref.ref(self), key))
        return self._alive[key][0]


def _end(reference: weakref.ref[Trace], key: int, _: Any) -> None:
    """Record that a storage is freed."""
    trace = reference()
    if trace is not None:
        trace._moment += 1
        trace._alive.pop(key)[0].end = trace._moment


#: Errors of fake tensors at an operator whose result depends on data.
_UNKNOWN_TO_FAKES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


class DataDependentError(RuntimeError):
    """The model depends on values in its tensors, which fake tensors do not have."""


class Predictor:
    """Predicts for one model, optimizer, loss and batch. Each micro-batch size is run once.

    The model and the optimizer (or its recipe) are not changed. Arguments as those of `plan`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Recipe,
        batch: Batch,
        loss_fn: LossFunction | None,
        device: torch.device,
        progress: Callable[[int], None] | None,
        in_flight: int = 1,
    ) -> None:
        self._model = model
        self.recipe = recipe_of(optimizer)
        self._batch = batch
        self._loss_fn = loss_fn or models_own_loss
        self._device = device
        self._in_flight = in_flight
        self._progress = progress or (lambda size: None)
        #: Without that device, fake tensors run on the CPU, whose oneDNN needs do not apply to it.
        self.runs_there = device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available())
        self._runs_on = device if self.runs_there else torch.device("cpu")
        self._trials = OperatorTrials() if device.type == "cpu" else None
        self._peaks: dict[tuple[int, int], Peak] = {}
        #: Operators in what `traffic` ran whose traffic is not known from shapes.
        self.uncounted: set[str] = set()
        has_lstm = any(isinstance(module, nn.LSTM) for module in model.modules())
        self._lstm = RunLstmByOneDnn if has_lstm else contextlib.nullcontext

    def peak(self, size: int, steps: int) -> Peak:
        """Return the memory at the peak of training with micro-batches of `size`, `steps` per update."""
        steps_to_run = min(steps, MICRO_BATCHES)
        key = size, steps_to_run
        if key not in self._peaks:
            self._progress(size)
            self._peaks[key] = self._run(size, steps_to_run)
        return self._peaks[key]

    @property
    def tried(self) -> dict[int, int]:
        """The peak bytes of each size so far."""
        return {size: peak.bytes for (size, _), peak in sorted(self._peaks.items())}

    def _run(self, size: int, steps: int) -> Peak:
        trace = Trace(self._runs_on)
        with self._fake(size, steps) as (copied, draw):

            def look() -> None:
                for kind, tensors in held(copied).items():
                    trace.mark(tensors, kind)

            with trace:
                train(copied, draw, self._loss_fn, windows_of(steps), trace.phase, look, self._in_flight)
            calls = {call.signature for call in trace.operators}
            inside = None if self._trials is None else self._trials(calls)
            return peak(trace.blocks, trace.operators, inside, trace.classes)

    def traffic(self, size: int, steps: int) -> tuple[int, int]:
        """Return the bytes that an update of `steps` micro-batches moves, once sums and state exist, and the
        part of them that accumulates gradients.
        """
        with self._fake(size, steps) as (copied, draw):
            meter = TrafficMeter(copied[0])
            moved: list[tuple[int, int]] = []

            def look() -> None:
                figures = meter.as_dict()
                moved.append((figures["total_bytes"], figures["by_phase"].get("accumulate", 0)))

            *before, window = windows_of(steps)
            train(copied, draw, self._loss_fn, before, contextlib.nullcontext, lambda: None)
            with meter:
                train(copied, draw, self._loss_fn, (window,), contextlib.nullcontext, look)
        self.uncounted.update(meter.uncounted)
        # `moved` has the totals before, after each backward, and after each micro-batch.
        before_last, after_backward, at_end = moved[-3:]

        def of_update(which: int) -> int:
            of_micro_batch = after_backward[which] - before_last[which]
            return at_end[which] + (steps - window) * of_micro_batch

        return of_update(0), of_update(1)

    def measured_peak(self, size: int, steps: int) -> tuple[int | None, str]:
        """Return the bytes at the peak of real updates on a copy of model and optimizer, and ""; or None and
        why they were not measured.
        """
        device = self._device
        predicted = self.peak(size, steps).bytes
        first = next(self._model.parameters()).device
        if first.type != device.type:
            return None, f"the model is on {first.type}, and is planned for {device.type}"
        free = available(device)
        if predicted > free:
            return None, f"a copy would take {format_bytes(predicted)}, and {format_bytes(free)} are free"
        windows = windows_of(steps)

        def updates(look: Look) -> None:
            copied = copy_of(self._model, self.recipe, windows)
            train(
                copied,
                draw=partial(self._batch.drawn, size),
                loss_fn=self._loss_fn,
                windows=windows,
                phase=contextlib.nullcontext,
                look=lambda: look(held(copied)),
                in_flight=self._in_flight,
            )

        with kept_random_state(device):
            return recorded_peak(updates, device, TEMPORARIES).bytes, ""

    @contextlib.contextmanager
    def _fake(self, size: int, steps: int) -> Iterator[tuple[Any, Callable[[], Any]]]:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with kept_random_state(self._runs_on), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            with mode:
                make = partial(_faked, mode, self._runs_on)
                copied = copy_of(self._model, self.recipe, windows_of(steps), make)
            try:
                with mode, GroupedProducts(), self._lstm():
                    yield copied, lambda: self._batch.shapes(size, self._runs_on)
            except _UNKNOWN_TO_FAKES as error:
                raise DataDependentError(
                    f"the model calls {error.func}, whose result depends on values in its tensors, so its "
                    "memory cannot be predicted; on a GPU, fusedacc.planner.find_micro_batch_size tries sizes"
                ) from error
            except Exception as error:
                if sys.version_info >= (3, 11):
                    error.add_note(f"with fake tensors, at a micro-batch of {size}")
                raise


@contextlib.contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """Context: restore Python's, NumPy's and torch's random states at the end."""
    python_state = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)
