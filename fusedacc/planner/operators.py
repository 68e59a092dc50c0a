"""What operators allocate beyond what they return, measured by running each once on real tensors.

Fake tensors show outputs. On a CPU, oneDNN also copies operands into layouts of its own, takes scratch for
products of 16 bits and convolutions, and the recurrent layers keep a workspace whose size no fake
implementation knows; attention and a few reductions take a buffer for each thread; and operands of two dtypes
are cast first. Those operators are named here, and each shape is tried once in a process.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from .allocations import Inside
from .recorded import inside_of_calls

aten = torch.ops.aten
#: Those that allocate in any dtype, in proportion to their operands.
_ALWAYS = frozenset(
    getattr(aten, name)
    for name in (
        "convolution",
        "convolution_backward",
        "mkldnn_rnn_layer",
        "mkldnn_rnn_layer_backward",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "embedding_dense_backward",
        "native_batch_norm_backward",
        "native_layer_norm_backward",
        "native_group_norm_backward",
    )
)
#: Our own products into sums: they cut operands up for the threads, or round the product first.
_OURS = frozenset({"fusedacc::gemm_accumulate_", "fusedacc::grouped_accumulate_"})
#: Those that do where operands are of 16 bits.
_NARROW = frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm})
#: Those that do where operands have several dtypes.
_MIXED = frozenset({aten.add, aten.sub, aten.mul, aten.div, aten.where, aten.addcmul, aten.lerp})
_KNOWN = _ALWAYS | _NARROW | _MIXED
#: Operands of more bytes are not made for a trial.
MOST_BYTES = 2**26


class Operand(NamedTuple):
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

    def made(self) -> Tensor:
        """One of zeros."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype).zero_()


@dataclasses.dataclass(frozen=True)
class Signature:
    """An operator, and the layouts of what it is called with."""

    text: str
    func: Any = dataclasses.field(compare=False)
    args: Any = dataclasses.field(compare=False)
    kwargs: Any = dataclasses.field(compare=False)

    @property
    def operands(self) -> list[Operand]:
        leaves = tree_leaves((self.args, self.kwargs), is_leaf=_is_operand)
        return [leaf for leaf in leaves if isinstance(leaf, Operand)]

    @property
    def bytes(self) -> int:
        """Of all operands."""
        return sum(operand.bytes for operand in self.operands)


#: Given signatures: what is known of them.
Measure = Callable[[Iterable[Signature]], Mapping[Signature, Inside]]


def signature(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> Signature | None:
    """That of a call of CPU tensors which may allocate more than it returns; None of others."""
    packet = func.overloadpacket
    if packet not in _KNOWN and packet._qualified_op_name not in _OURS:
        return None
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    dtypes = {tensor.dtype for tensor in tensors if tensor.dim() > 0}
    if packet in _NARROW and not any(dtype.itemsize == 2 for dtype in dtypes):
        return None
    if packet in _MIXED and len(dtypes - {torch.bool}) < 2:
        return None
    args, kwargs = tree_map(_operand, (args, dict(kwargs)))
    return Signature(f"{func}{args}{kwargs}", func, args, kwargs)


def _is_operand(leaf: Any) -> bool:
    return isinstance(leaf, Operand)


def _operand(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return Operand(tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype)
    return leaf


class OperatorTrials:
    """Runs each signature once in this object's life, on a CPU."""

    def __init__(self) -> None:
        self._known: dict[Signature, Inside | None] = {}

    def __call__(self, asked: Iterable[Signature]) -> dict[Signature, Inside]:
        """What is known of these. Where operands are too large to be made, fewer samples tell."""
        asked = set(asked)
        smaller = {own: _smaller(own) for own in asked}
        fresh = list({own for own, _ in smaller.values() if own.bytes <= MOST_BYTES} - set(self._known))
        self._known.update(zip(fresh, self._try(fresh), strict=True))
        found = {}
        for own, (tried, share) in smaller.items():
            inside = self._known.get(tried)
            if inside is not None:
                found[own] = Inside(math.ceil(inside.peak / share), math.ceil(inside.kept / share))
            elif tried not in self._known and own.func.overloadpacket in _NARROW:
                found[own] = self._most_of(own.func)
        return found

    def _most_of(self, func: Any) -> Inside:
        """What a product of 16 bits needs beside its output at most: scratch does not grow with operands."""
        tried = [inside for own, inside in self._known.items() if inside is not None and own.func is func]
        return Inside(max((inside.peak - inside.kept for inside in tried), default=0), 0)

    @staticmethod
    def _try(signatures: Sequence[Signature]) -> list[Inside | None]:
        with _disable_current_modes(), torch.enable_grad():  # without, an LSTM keeps no workspace
            return inside_of_calls([partial(_made, own) for own in signatures])


def _smaller(own: Signature) -> tuple[Signature, float]:
    """The same call of a share of the samples, whose operands can be made, and the share."""
    batch = own.operands[0].shape[0] if own.operands[0].shape else 0
    size = batch
    found = own
    while found.bytes > MOST_BYTES and size > 1 and own.func.overloadpacket not in _NARROW:
        size = (size + 1) // 2
        fewer = partial(_with_samples, batch, size)
        args, kwargs = tree_map(fewer, (own.args, own.kwargs), is_leaf=_is_operand)
        found = Signature(f"{own.func}{args}{kwargs}", own.func, args, kwargs)
    return found, size / max(1, batch)


def _with_samples(batch: int, size: int, leaf: Any) -> Any:
    """An operand of `size` samples for one of `batch`, its strides as they were."""
    if isinstance(leaf, Operand) and len(leaf.shape) > 2 and leaf.shape[0] == batch:
        return leaf._replace(shape=(size, *leaf.shape[1:]))
    return leaf


def _made(own: Signature) -> Callable[[], Any]:
    """The call on real tensors."""

    def made(leaf: Any) -> Any:
        return leaf.made() if isinstance(leaf, Operand) else leaf

    args, kwargs = tree_map(made, (own.args, own.kwargs), is_leaf=_is_operand)
    if own.func.overloadpacket is aten.mkldnn_rnn_layer_backward:
        args = _with_workspace(args)
    elif own.func.overloadpacket._qualified_op_name == "fusedacc::grouped_accumulate_":
        args = _with_rows(args)
    return partial(own.func, *args, **kwargs)


def _with_workspace(args: tuple) -> tuple:
    """The backward's arguments with the workspace of a forward, whose size fakes do not know."""
    tensors, (reverse, mode, hidden, layers, biases, train, both, sizes, first) = args[:7], args[13:22]
    made = aten.mkldnn_rnn_layer(*tensors, reverse, sizes, mode, hidden, layers, biases, both, first, train)
    return (*args[:22], made[3])


def _with_rows(args: tuple) -> tuple:
    """The arguments of a grouped product with offsets that give each expert as many rows."""
    experts, rows = len(args[3]), len(args[1])
    ends = [rows * (expert + 1) // experts for expert in range(experts)]
    return (*args[:3], torch.tensor(ends, dtype=torch.int32), *args[4:])
