"""Lets code outside fusedacc add gradients to the sums of parameters, in the backward of its functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional as F

from ..kernels import native_module
from ..kernels.torch_private import (
    current_graph_task,
    disable_dynamo,
    innermost_transform,
    runs_as_written,
)
from . import compiled
from .offered_sums import SINK, SinkSum, offer_to_compiler, parameter_behind, sum_of_parameter
from .sink_arguments import (
    check_ends,
    check_gradient,
    check_indices,
    check_offs,
    check_product,
    check_rows,
)

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
        offer_to_compiler(SINK)
        traced: Any = getattr(param, SINK, None)
        return _TracedSink(traced) if compiled.is_accumulated(traced, param) else None
    if not isinstance(param, Tensor):
        raise TypeError(f"param is {type(param).__name__}; allowed: a parameter, which is a tensor")
    if innermost_transform() is not None:  # torch.func, vmap, ...
        return None
    found = sum_of_parameter(param, SINK) or sum_of_parameter(parameter_behind(param), SINK)
    node = None if found is None else found.node_to_take()
    return None if node is None else Sink(found, node)


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
        check_product(self._weight, left, right, 2)
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
        check_product(self._weight, left, right, 3)
        check_offs(self._weight, offs)
        check_ends(offs, left.shape[0])
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
        check_rows(self._weight, indices, rows)
        check_indices(indices, self._weight.shape[0])
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
        check_gradient(self._weight, gradient)
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
        check_product(self._weight, left, right, 2)
        compiled.add_product(self._ticket, left, right)

    def add_grouped(self, left: Tensor, right: Tensor, offs: Tensor) -> None:
        check_product(self._weight, left, right, 3)
        check_offs(self._weight, offs)
        compiled.add_grouped(self._ticket, left, right, offs)

    def add_rows(self, indices: Tensor, rows: Tensor) -> None:
        check_rows(self._weight, indices, rows)
        compiled.add_rows(self._ticket, indices, rows, -1, False)

    def add(self, gradient: Tensor) -> None:
        check_gradient(self._weight, gradient)
        compiled.add_gradient(self._ticket, gradient)

    def write(self) -> Any:
        return _break_graph()


@disable_dynamo
def _break_graph() -> Any:
    """Break the graph. PyTorch then runs the autograd function uncompiled."""
