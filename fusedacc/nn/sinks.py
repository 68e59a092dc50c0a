"""Lets code outside fusedacc add gradients to the sums of parameters, in the backward of its own functions.

`sink` finds the sum of a parameter for such a backward. `linear_into_sum` is a Linear layer for any parameter
of a wrapper.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional as F

from ..accumulators import Slot
from ..accumulators.in_place import Write
from ..autograd.capture import Capture
from ..autograd.registration import accumulate_grad_node
from ..kernels import native_module, registry
from ..kernels.checks import ORDINARY_TYPES
from ..kernels.dtypes import PAIRS
from ..kernels.torch_private import (
    assume_constant_result,
    current_graph_task,
    disable_dynamo,
    innermost_transform,
    runs_as_written,
)
from . import compiled
from .embedding import RowSum
from .linear import ProductSum
from .patched_forward import WeightSum
from .patches import WHOLE_GRADIENTS
from .stacked import GroupedSum

#: The native functions. Wrappers without them offer no sinks.
_native: Any = native_module.loaded()


@runs_as_written
def sink(param: Tensor) -> Sink | None:
    """Return where to add the gradient of a parameter. Call it inside the backward of an autograd function.

    Add the gradient to the sink and return None for the parameter. Where `sink` returns None, return the
    gradient, as without fusedacc. The sink may be used until the backward returns:

        sink = fusedacc.sink(weight)
        if sink is None:
            return grad @ weight, grad.t() @ x
        sink.add_product(grad, x)
        return grad @ weight, None

    It returns None in these cases:

    - No live `AccumulatingOptimizer` has the parameter, or there is no native engine.
    - Something needs the gradient itself: a hook on the parameter, `create_graph=True`,
      `torch.autograd.grad`, a transform of torch.func, a reducer of ranks that the wrapper does not know,
      anomaly detection.
    - The gradient does not count: the parameter was frozen, is not among the `inputs=` of `backward()`, the
      pass is inside `ignore()`, or the micro-batch has weight 0.
    - The gradient needs Python's or PyTorch's own handling: stochastic rounding, a complex or sparse
      gradient, a DTensor. While FSDP2 defers its reduction, a wrapper with `model=` has sinks for the
      unsharded parameters.
    - The parameter was not an argument of the autograd function.

    In a graph of torch.compile the answer holds for the graph. If `torch.autograd.grad` then needs the
    gradient, the backward raises RuntimeError.

    Args:
        param: the parameter, as it was passed to the function, or as `ctx.saved_tensors` returns it.

    Returns:
        The sink, which may be used until this backward function returns, or None.

    Raises:
        TypeError: `param` is not a tensor.
        RuntimeError: the micro-batch needs a weight and has none.
    """
    if is_compiling():
        _offer_to_compiler(_SINK)
        traced: Any = getattr(param, _SINK, None)
        return _TracedSink(traced) if compiled.is_accumulated(traced, param) else None
    if not isinstance(param, Tensor):
        raise TypeError(f"param is {type(param).__name__}; allowed: a parameter, which is a tensor")
    if innermost_transform() is not None:  # torch.func, vmap, ...
        return None
    found = _sum_of(param, _SINK) or _sum_of(_parameter_behind(param), _SINK)
    return None if found is None else found.sink()


class Sink:
    """Adds gradients of one parameter to its sum, times their scale. `fusedacc.sink` returns it.

    Each method adds one gradient, and several calls add several. A method checks its arguments before it
    changes anything. Operands are dense tensors on the parameter's device. They may be changed afterwards.
    """

    def __init__(self, owner: SinkSum, node: Any) -> None:
        self._owner = owner
        self._node = node
        self._weight = owner.slot.param
        self._task = current_graph_task()

    @runs_as_written
    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add the gradient left^T right of a parameter (m, n).

        Args:
            left: (tokens, m).
            right: (tokens, n), in the same floating-point dtype.

        Raises:
            TypeError: an operand is no dense floating-point tensor, or the dtypes differ.
            ValueError: a shape or a device does not match.
            RuntimeError: the backward has ended, or the sum is open in `write`.
        """
        _check_product(self._weight, left, right, 2)
        self._check_usable()
        owner = self._owner
        if owner.product(left.dtype, left.shape[0]) is None or not _native.try_add_product(
            owner.ticket, left, right
        ):
            self._add("add_product", lambda: torch.mm(left.t(), right), left, right)

    @runs_as_written
    def add_grouped(self, left: Tensor, right: Tensor, offs: Tensor) -> None:
        """Add the gradient of a stack of matrices (experts, m, n): left[s:t]^T right[s:t] for each expert.

        Args:
            left: (tokens, m), sorted by expert.
            right: (tokens, n), in the same floating-point dtype.
            offs: int32 (experts), the end of each expert's rows. Rows after the last end are not read. The
                values are checked on a CPU only.

        Raises:
            TypeError: an operand is no dense floating-point tensor, the dtypes of left and right differ, or
                that of `offs` is not int32.
            ValueError: a shape, a device or a value of `offs` does not match.
            RuntimeError: the backward has ended, or the sum is open in `write`.
        """
        _check_product(self._weight, left, right, 3)
        _check_offs(self._weight, offs)
        _check_ends(offs, left.shape[0])
        self._check_usable()
        self._add("add_products", lambda: F.grouped_mm(left.t(), right, offs=offs), left, right, offs)

    @runs_as_written
    def add_rows(self, indices: Tensor, rows: Tensor) -> None:
        """Add gradients of rows of a parameter (rows, features): row indices[i] gets rows[i].

        Args:
            indices: int64 or int32 (...). A row may occur several times. The values are checked on a CPU
                only.
            rows: (..., features), floating-point.

        Raises:
            TypeError: a tensor is not dense, or has another kind of dtype.
            ValueError: a shape or a device does not match.
            IndexError: an index is no row of the parameter.
            RuntimeError: the backward has ended, or the sum is open in `write`.
        """
        _check_rows(self._weight, indices, rows)
        _check_indices(indices, self._weight.shape[0])
        self._check_usable()

        def dense() -> Tensor:
            count = self._weight.shape[0]
            return torch.ops.aten.embedding_dense_backward(rows, indices, count, -1, False)

        self._add("add_rows", dense, indices, rows, -1, False)

    @runs_as_written
    def add(self, gradient: Tensor) -> None:
        """Add a gradient.

        Args:
            gradient: of the parameter's shape, floating-point. In the dtype of the sum it is not rounded to
                the parameter's.

        Raises:
            TypeError: it is no dense floating-point tensor.
            ValueError: its shape or device is not the parameter's.
            RuntimeError: the backward has ended, or the sum is open in `write`.
        """
        _check_gradient(self._weight, gradient)
        self._check_usable()
        self._add("add_gradient", lambda: gradient, gradient)

    @contextlib.contextmanager
    @runs_as_written
    def write(self) -> Iterator[tuple[Tensor, float | Tensor, float]]:
        """Context in which a kernel of your own adds one gradient.

        Compute `accumulator <- beta * accumulator + scale * gradient` on the current stream. Where beta is
        0.0, the accumulator's content is undefined: overwrite all of it. Inside torch.compile the context
        breaks the graph.

        Yields:
            accumulator: a tensor of the parameter's shape, in the dtype that `explain()` shows in the column
                `sum`. Its strides are usually the parameter's. They may be others, but without overlaps.
            scale: a float, or a 0-dim tensor on the accumulator's device.
            beta: a float.

        Raises:
            RuntimeError: the backward has ended, or the sum is open already. An exception inside the context
                taints the window: `step()` and `flush()` raise until `discard()`.
        """
        self._check_usable()
        owner = self._owner
        capture = owner._capture()
        if capture is None:
            raise RuntimeError(f"the AccumulatingOptimizer of parameter {owner.slot.name!r} no longer exists")
        owner.open_in = self._task
        try:
            with capture.opened(owner.slot) as opened:
                yield opened
        finally:
            owner.open_in = None

    def _check_usable(self) -> None:
        slot = self._owner.slot
        if current_graph_task() != self._task:
            raise RuntimeError(
                f"the sink of parameter {slot.name!r} was used after the backward that had asked for it: "
                "call fusedacc.sink() in each backward"
            )
        if self._owner.open_in == self._task:
            raise RuntimeError(
                f"the sum of parameter {slot.name!r} is open: leave `with sink.write()` before you add to it "
                "again"
            )

    def _add(self, method: str, gradient: Callable[[], Tensor], *arguments: Any) -> None:
        """Add by a method of the sum, or, where it refuses, add the gradient that `gradient` computes."""
        if not getattr(self._owner, method)(self._node, *arguments):
            self._owner.deliver(self._node, gradient())


class _TracedSink(Sink):
    """A sink in a backward that Dynamo traces. Its methods put operators into the graph."""

    def __init__(self, traced: compiled.Traced) -> None:
        self._weight = traced.weight
        self._ticket = traced.ticket

    def add_product(self, left: Tensor, right: Tensor) -> None:
        _check_product(self._weight, left, right, 2)
        compiled.add_product(self._ticket, left, right)

    def add_grouped(self, left: Tensor, right: Tensor, offs: Tensor) -> None:
        _check_product(self._weight, left, right, 3)
        _check_offs(self._weight, offs)
        compiled.add_grouped(self._ticket, left, right, offs)

    def add_rows(self, indices: Tensor, rows: Tensor) -> None:
        _check_rows(self._weight, indices, rows)
        compiled.add_rows(self._ticket, indices, rows, -1, False)

    def add(self, gradient: Tensor) -> None:
        _check_gradient(self._weight, gradient)
        compiled.add_gradient(self._ticket, gradient)

    def write(self) -> Any:
        return _break_graph()


@disable_dynamo
def _break_graph() -> Any:
    """Break the graph. PyTorch then runs the autograd function uncompiled."""


# The checks of arguments, which a compiler traces too


def _check_operand(name: str, tensor: Any, weight: Tensor, *, is_integer: bool = False) -> None:
    # Dynamo does not know the layouts of a backward's tensors.
    if not is_compiling() and (type(tensor) not in ORDINARY_TYPES or tensor.layout is not torch.strided):
        kind = type(tensor).__name__
        given = f"{kind} ({tensor.layout})" if isinstance(tensor, Tensor) else repr(tensor)
        raise TypeError(f"{name} is {given}; allowed: a dense tensor")
    if tensor.device != weight.device:
        raise ValueError(f"{name} is on {tensor.device}, but the parameter is on {weight.device}")
    if not (is_integer or tensor.is_floating_point()):
        raise TypeError(f"{name} has dtype {tensor.dtype}; allowed: a floating-point dtype")


def _check_product(weight: Tensor, left: Tensor, right: Tensor, dims: int) -> None:
    """Check the operands of a product into a parameter with this number of dimensions."""
    if weight.dim() != dims:
        wanted = "(m, n)" if dims == 2 else "(experts, m, n)"
        raise ValueError(f"the parameter has shape {tuple(weight.shape)}; allowed: {wanted}")
    for name, operand, columns in (("left", left, weight.shape[-2]), ("right", right, weight.shape[-1])):
        _check_operand(name, operand, weight)
        if operand.dim() != 2 or operand.shape[1] != columns:
            raise ValueError(
                f"{name} has shape {tuple(operand.shape)}; allowed for a parameter of shape "
                f"{tuple(weight.shape)}: (tokens, {columns})"
            )
    if left.shape[0] != right.shape[0]:
        raise ValueError(f"left has {left.shape[0]} rows, and right has {right.shape[0]}; allowed: as many")
    if left.dtype != right.dtype:
        raise TypeError(f"left has dtype {left.dtype}, and right has {right.dtype}; allowed: the same dtype")


def _check_offs(weight: Tensor, offs: Tensor) -> None:
    _check_operand("offs", offs, weight, is_integer=True)
    if offs.dtype != torch.int32:
        raise TypeError(f"offs has dtype {offs.dtype}; allowed: torch.int32")
    if offs.shape != weight.shape[:1]:
        raise ValueError(f"offs has shape {tuple(offs.shape)}; allowed: ({weight.shape[0]},)")


def _check_ends(offs: Tensor, tokens: int) -> None:
    """Check the values of `offs` on a CPU. On a GPU the host would wait for them."""
    start = 0
    for index, end in enumerate(offs.tolist() if offs.is_cpu else ()):
        if not start <= end <= tokens:
            raise ValueError(
                f"offs[{index}] is {end}; allowed: {start} to {tokens}, from the end before it to the number "
                "of rows"
            )
        start = end


def _check_rows(weight: Tensor, indices: Tensor, rows: Tensor) -> None:
    if weight.dim() != 2:
        raise ValueError(f"the parameter has shape {tuple(weight.shape)}; allowed: (rows, features)")
    _check_operand("indices", indices, weight, is_integer=True)
    if indices.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"indices has dtype {indices.dtype}; allowed: torch.int64, torch.int32")
    _check_operand("rows", rows, weight)
    if rows.shape != (*indices.shape, weight.shape[1]):
        raise ValueError(
            f"rows has shape {tuple(rows.shape)}; allowed for indices of shape {tuple(indices.shape)}: "
            f"{(*indices.shape, weight.shape[1])}"
        )


def _check_indices(indices: Tensor, count: int) -> None:
    """Check the values of indices on a CPU. On a GPU the host would wait for them."""
    if not (indices.is_cpu and indices.numel()):
        return
    least, most = (int(value) for value in torch.aminmax(indices))
    if least < 0 or most >= count:
        raise IndexError(f"indices has values from {least} to {most}; allowed: 0 to {count - 1}")


def _check_gradient(weight: Tensor, gradient: Tensor) -> None:
    _check_operand("gradient", gradient, weight)
    if gradient.shape != weight.shape:
        raise ValueError(
            f"gradient has shape {tuple(gradient.shape)}; allowed: the parameter's, {tuple(weight.shape)}"
        )


# The sums


class OfferedSum(WeightSum):
    """A sum of which only calls of `sink` and `linear` tell that functions add to it."""

    @property
    def is_offered(self) -> bool:
        """Whether functions may add to the sum."""
        capture = self._capture()
        if capture is None or self.slot.sharded or self.slot.needs_eager:
            return False
        return not capture.accumulators.noise.rounds(self.slot.accumulate_dtype)

    def announce(self) -> bool:
        """Record for the engine and for `explain()` that functions add to the sum.

        Return whether they may.
        """
        if self.is_offered:
            self.declare(self.path)
            return True
        capture = self._capture()
        if capture is not None and capture.accumulators.noise.rounds(self.slot.accumulate_dtype):
            self.slot.left_to = self.slot.left_to or WHOLE_GRADIENTS
        return False

    def accumulate_in_place(
        self,
        node: Any,
        write: Write,
        operands: tuple[Tensor, ...],
        by_rows: bool = False,
        part: int | None = None,
        may_wait: bool = False,
        any_layout: bool = False,
    ) -> bool:
        # A compiled graph does not ask before.
        return self.announce() and super().accumulate_in_place(
            node, write, operands, by_rows, part, may_wait, any_layout
        )


class LinearSum(OfferedSum, ProductSum):
    """The sum of a weight that `linear` is called with."""

    path = "gemm"


class SinkSum(OfferedSum, ProductSum, GroupedSum, RowSum):
    """The sum of a parameter that `sink` is called with."""

    path = "sink"
    operands_stay = False
    #: The backward pass in which the sum is open in `Sink.write`; None if it is not.
    open_in: int | None = None

    def sink(self) -> Sink | None:
        """Return a sink for the running backward function, or None if PyTorch must get the gradient."""
        capture = self._capture()
        slot = self.slot
        node = compiled.end_of_graph(slot.param)
        if capture is None or node is None or not self.is_ordinary or not self.announce():
            return None
        if slot.param._backward_hooks or not capture.will_take_in_place(slot, node):
            return None
        return Sink(self, node)

    def select_again(self) -> None:
        """Forget which products were selected."""
        ProductSum.select_again(self)
        GroupedSum.select_again(self)

    def add_gradient(self, node: Any, gradient: Tensor) -> bool:
        """Try to add a gradient to the sum, and return whether it needs no further work.

        node: as in `Capture.take_in_place`.
        """
        device, _, dtype = self.slot.lane
        if (gradient.dtype, dtype) not in PAIRS:
            return False
        backend = registry.select(device, dtype, gradient.dtype, self.backend).backend

        def write(total: Tensor, scale: float | Tensor, beta: float | Tensor) -> None:
            is_first = beta == 0
            backend.accumulate_([total], [gradient], scale, is_first, 1.0 if is_first else beta, None)

        return self.accumulate_in_place(node, write, (gradient,), any_layout=True)


#: The attributes of a parameter that graphs of `sink` and of `linear` read, a `compiled.Traced` each.
_SINK = "_accumulating_sink"
_LINEAR = "_accumulating_linear"
_KINDS: dict[str, type[OfferedSum]] = {_SINK: SinkSum, _LINEAR: LinearSum}

#: The attributes that Dynamo has asked for. Parameters of new wrappers get them at once.
_traced: set[str] = set()
_all: weakref.WeakSet[Sinks] = weakref.WeakSet()
#: By a parameter's id.
_owners: weakref.WeakValueDictionary[int, Sinks] = weakref.WeakValueDictionary()


class Sinks:
    """Lets `sink` and `linear` find the sums of a wrapper's parameters."""

    def __init__(self, capture: Capture) -> None:
        self._capture = weakref.ref(capture)
        self._slots: dict[int, Slot] = {}
        #: The sums that were asked for, by the parameter's id and the attribute.
        self._sums: dict[tuple[int, str], OfferedSum] = {}
        _all.add(self)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.remove()

    def follow(self, slots: Iterable[Slot]) -> None:
        """Offer the sums of these slots, unless there is no native engine."""
        if native_module.module() is None:
            return
        for slot in slots:
            key = id(slot.param)
            self._slots[key] = slot
            _owners[key] = self
            for attribute in _traced:
                self.offer_to_compiler(key, attribute)

    def sum_of(self, key: int, attribute: str) -> OfferedSum | None:
        """Return the sum of the parameter with this id, for the functions that read this attribute."""
        found = self._sums.get((key, attribute))
        capture = self._capture()
        if found is None and capture is not None:
            # Another thread may make one at the same time.
            found = self._sums.setdefault((key, attribute), _KINDS[attribute](self._slots[key], capture))
        return found

    def offer_to_compiler(self, key: int, attribute: str) -> None:
        """Give the parameter with this id the attribute, unless PyTorch must get its gradient in any case."""
        slot = self._slots[key]
        found = self.sum_of(key, attribute)
        if found is not None and found.is_ordinary and found.is_offered:
            slot.param.__dict__[attribute] = compiled.Traced(found)

    def offer_all_to_compiler(self, attribute: str) -> None:
        for key in self._slots:
            self.offer_to_compiler(key, attribute)

    def select_again(self) -> None:
        """Forget which products were selected, because a backend has failed its self-test."""
        for found in self._sums.values():
            found.select_again()

    def drop(self, slots: Iterable[Slot]) -> None:
        """Offer the sums of these slots no more."""
        for slot in slots:
            key = id(slot.param)
            if self._slots.pop(key, None) is None:
                continue
            if _owners.get(key) is self:
                del _owners[key]
            for attribute in _KINDS:
                slot.param.__dict__.pop(attribute, None)
                self._sums.pop((key, attribute), None)

    def remove(self) -> None:
        """Offer no sums any more."""
        self.drop(list(self._slots.values()))


@assume_constant_result  # Dynamo calls it, and does not trace it
@runs_as_written
def _offer_to_compiler(attribute: str) -> None:
    """Give all parameters of wrappers the attribute, because a graph that is being traced reads it."""
    if attribute in _traced:
        return
    _traced.add(attribute)
    for sinks in list(_all):
        sinks.offer_all_to_compiler(attribute)


def _sum_of(param: Tensor, attribute: str) -> Any:
    """Return the parameter's sum for the functions that read this attribute; None if it has none."""
    sinks = _owners.get(id(param))
    return None if sinks is None else sinks.sum_of(id(param), attribute)


def _parameter_behind(tensor: Tensor) -> Tensor:
    """Return the parameter of which a saved tensor is a copy, as hooks on saved tensors return it.

    Activation checkpointing has such hooks. The copy shares the parameter's AccumulateGrad node.
    """
    if not (_owners and tensor.is_leaf and tensor.requires_grad):
        return tensor
    return accumulate_grad_node(tensor).variable


def linear_into_sum(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return input @ weight.T + bias. Its backward adds the gradient of the weight to its sum.

    Returns None if PyTorch must compute it, or raise.
    """
    if is_compiling():
        _offer_to_compiler(_LINEAR)
        traced: Any = getattr(weight, _LINEAR, None)
        is_large = weight.numel() > compiled.SMALL
        if not (is_large and compiled.accumulates(traced, weight)) or not (
            bias is None or type(bias) in ORDINARY_TYPES
        ):
            return None
        return compiled.linear(input, weight, bias, traced.ticket, False, False)
    found = _sum_of(weight, _LINEAR)
    if found is None or weight.dim() != 2 or not found.announce():
        return None
    return found.output(input, weight, bias)
