"""Operators that let a graph of torch.compile add weight gradients to their sums inside its backward.

The forward has one operator per module. Dynamo sees only its name. Its Autograd kernel is the C++ function
that eager calls use too (csrc/autograd/operators.cpp). AOTAutograd traces it, so the forward's graph has
torch's own operators, which Inductor fuses as usual. The backward's graph has one of this module's operators
per product. Instead of the sum it gets a *ticket*: a CPU tensor that holds a number. At run time the operator
finds the parameter by this number, and decides how to handle the gradient.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.nn import functional as F

from ..kernels import flops, native_module
from ..kernels.torch_private import (
    current_node,
    may_compile_backward,
    register_ordered_effect,
    runs_as_written,
    traces_for_inductor,
    transforms_are_active,
    will_run,
)


def _sources() -> list[bytes]:
    """Return the contents of the files whose code AOTAutograd traces into graphs."""
    folder = os.path.dirname(__file__)
    # The loader reads from a file or an archive.
    read = __spec__.loader.get_data  # type: ignore[union-attr]  # imported modules have a loader
    sources = [read(os.path.join(folder, name)) for name in (os.path.basename(__file__), "head.py")]
    engine = native_module.path()
    if native_module.loaded() is not None and engine is not None:
        sources.append(engine.read_bytes())
    return sources


def _namespace_of(sources: list[bytes]) -> str:
    """Return the name of the library of operators.

    AOTAutograd caches graphs on disk by the names of their operators, so a change of the code must change
    the names.
    """
    return f"fusedacc_compiled_{hashlib.sha256(b''.join(sources)).hexdigest()[:12]}"


NAMESPACE = _namespace_of(_sources())

#: Weights of up to this many elements stay in PyTorch's graph: an operator would cost more than it saves.
SMALL = 128 * 128

#: Numbers of sums and of casts. They are never reused.
_numbers = itertools.count(1)
_holders: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def number_for(holder: Any) -> int:
    """Return a new number, by which operators find `holder`, a `WeightSum`, while it exists."""
    number = next(_numbers)
    _holders[number] = holder
    return number


def make_ticket(number: int) -> Any:
    """Return a tensor with this number: a plain tensor, in all modes of PyTorch."""
    native: Any = native_module.loaded()
    return torch.tensor([number], device="cpu") if native is None else native.make_ticket(number)


class Traced:
    """The attributes of a patched module that Dynamo reads. Each value that it reads becomes a guard.

    holder: a `WeightSum`. keeps_cast: whether the weight's autocast cast is kept over the window. stock: the
    forward that is replaced, if any.
    """

    def __init__(self, holder: Any, keeps_cast: bool = False, stock: Any = None) -> None:
        param = holder.slot.param
        if param._backward_hooks is None:
            # Dynamo makes no guard for a missing dictionary. Hooks registered later are added to this one.
            param._backward_hooks = OrderedDict()
        # A graph keeps the ticket, and the sum with it, until its backward has run. Graphs get the number as
        # an input, not as a constant, so equal modules share a graph.
        self.ticket: Any = make_ticket(holder.number)
        self.ticket.holder = holder
        self.weight = param
        self.hooks: Any = param._backward_hooks
        self.keeps_cast = keeps_cast
        self.stock = stock

    def __reduce__(self) -> tuple:
        # Copies of a module's or a parameter's attributes get an empty OrderedDict: `torch.load` allows it.
        return OrderedDict, ()


#: The windows inside `ignore()`, by id. All wrappers share this dictionary, so a graph has one guard for it.
ignoring: dict[int, None] = {}


def replaces(traced: Any, module: Any) -> bool:
    """Whether the forward of the module's class is still the one that was replaced."""
    return isinstance(traced, Traced) and type(module).forward is traced.stock


def accumulates(traced: Any, weight: Tensor) -> bool:
    """Whether the graph that Dynamo is tracing gets the operator that accumulates.

    Dynamo traces this function, and compiles again when a value that it reads has changed. If Dynamo reaches
    an object in two ways, it compares both in a Python guard. The direct imports in this file avoid that.
    """
    return is_grad_enabled() and is_accumulated(traced, weight)


def is_accumulated(traced: Any, weight: Tensor) -> bool:
    """The same in a backward that Dynamo is tracing."""
    return (
        isinstance(traced, Traced)
        # The module may have another parameter now, or functional_call may replace it.
        and weight is traced.weight
        and weight.requires_grad
        and len(traced.hooks) == 0
        and len(ignoring) == 0
        and not transforms_are_active()
        and forward_ad._current_level < 0
        # Dynamo of torch 2.10 takes is_exporting() for True.
        and not torch.compiler._is_exporting_flag
        and not may_compile_backward()
    )


# The operators

_library = torch.library.Library(NAMESPACE, "DEF")
_operators = getattr(torch.ops, NAMESPACE)
_TAGS = (torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe)


def holder_of(ticket: Tensor) -> Any:
    number = int(ticket.item())
    holder = _holders.get(number)
    if holder is None:
        raise RuntimeError(
            "the backward of a compiled graph has a weight's gradient for an "
            "AccumulatingOptimizer(model=...) that no longer exists, and neither does the module: run the "
            "forward again"
        )
    return holder


@runs_as_written
def add(holder: Any, gradient: Callable[[], Tensor], method: str, *arguments: Any) -> None:
    """Handle a weight's gradient in the backward of a compiled graph.

    gradient: computes the gradient. method: the name of the holder's method that adds the gradient without
    computing it first, and arguments: its arguments after the node. Raises RuntimeError if
    `torch.autograd.grad` needs the gradient itself, which the graph does not return.
    """
    slot = holder.slot
    slot.compiled = True
    node = holder.node
    try:
        hooked = node is not None and will_run(node)
        # No gradient is needed, or the graph ends in the node of the parameter before it was moved.
        if not hooked:
            node = end_of_graph(slot.param)
            if node is None or not will_run(node):
                return
    except RuntimeError as error:
        raise RuntimeError(
            f"torch.autograd.grad() asks for the gradient by {slot.name!r}. The compiled forward adds this "
            "gradient to its sum and does not return it. Call both the forward and torch.autograd.grad() "
            "inside optimizer.ignore(), or run the forward uncompiled"
        ) from error
    if not (hooked and getattr(holder, method)(node, *arguments)):
        holder.deliver(node, gradient())


def end_of_graph(param: Tensor) -> Any:
    """Return the parameter's AccumulateGrad node behind the running node; None if there is none."""
    current: Any = current_node()
    ends = () if current is None else current.next_functions
    return next((node for node, _ in ends if getattr(node, "variable", None) is param), None)


def _add_product(ticket: Tensor, left: Tensor, right: Tensor) -> None:
    add(holder_of(ticket), lambda: torch.mm(left.t(), right), "add_product", left, right)


def _add_rows(ticket: Tensor, indices: Tensor, gradients: Tensor, padding: int, by_frequency: bool) -> None:
    holder = holder_of(ticket)

    def dense() -> Tensor:
        rows = holder.slot.param.shape[0]
        return torch.ops.aten.embedding_dense_backward(gradients, indices, rows, padding, by_frequency)

    add(holder, dense, "add_rows", indices, gradients, padding, by_frequency)


def _add_grouped(ticket: Tensor, left: Tensor, right: Tensor, offs: Tensor) -> None:
    def whole() -> Tensor:
        return F.grouped_mm(left.t(), right, offs=offs)

    add(holder_of(ticket), whole, "add_products", left, right, offs)


def _add_gradient(ticket: Tensor, gradient: Tensor) -> None:
    add(holder_of(ticket), lambda: gradient, "add_gradient", gradient)


def _add_part(ticket: Tensor, gradient: Tensor, at: Tensor | None, index: int) -> None:
    holder = holder_of(ticket)
    shape = holder.slot.param.shape
    part = (index if at is None else int(at)) % shape[0]

    def whole() -> Tensor:
        return torch.ops.aten.select_backward(gradient, shape, 0, part)

    add(holder, whole, "add_part", gradient, part)


def define(
    name: str,
    arguments: str,
    function: Callable[..., Any],
    returns: str = "()",
    fake: Callable[..., Any] = lambda *arguments: None,
) -> Callable[..., Any]:
    """Define an operator that gets a ticket, in two forms; a backward chooses one.

    A compiler must neither remove a call nor merge two equal ones. The first form declares that it writes to
    the ticket. Inductor keeps such a call as it is, and its caches support it. Other backends would write the
    ticket, and a second backward that is still to run would find it changed. They use the second form, which
    is registered as having an ordered effect.

    Returns a function that calls one of the forms. name: of the second form; the first form's has an
    underscore at the end. arguments, returns: the schema of the arguments after the ticket, and of the
    results. fake: the implementation for fake tensors.
    """
    for form, first in ((f"{name}_", "Tensor(a!) ticket"), (name, "Tensor ticket")):
        _library.define(f"{form}({first}, {arguments}) -> {returns}", tags=_TAGS)
        _library.impl(form, runs_as_written(function), "CompositeExplicitAutograd")
        for key in ("ADInplaceOrView", "Autograd"):
            _library.impl(form, torch.library.fallthrough_kernel, key)
        torch.library.register_fake(f"{NAMESPACE}::{form}", fake, lib=_library)
    register_ordered_effect(f"{NAMESPACE}::{name}", _library)
    written = getattr(_operators, f"{name}_").default
    ordered = getattr(_operators, name).default

    def call(*arguments: Any) -> Any:
        return (written if traces_for_inductor() else ordered)(*arguments)

    return call


def _define_for_dynamo(name: str, arguments: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Define an operator as `define` does, and return one that Dynamo can put into a graph. When AOTAutograd
    traces it, it becomes the form that the compiler needs.
    """
    in_right_form = define(name, arguments, function)
    _library.define(f"{name}_in_either_form(Tensor(a!) ticket, {arguments}) -> ()")
    _library.impl(f"{name}_in_either_form", in_right_form, "CompositeImplicitAutograd")
    return getattr(_operators, f"{name}_in_either_form").default


add_product = _define_for_dynamo("add_product", "Tensor left, Tensor right", _add_product)
add_rows = _define_for_dynamo(
    "add_rows", "Tensor indices, Tensor gradients, int padding, bool by_frequency", _add_rows
)
add_grouped = _define_for_dynamo("add_grouped", "Tensor left, Tensor right, Tensor offs", _add_grouped)
add_gradient = _define_for_dynamo("add_gradient", "Tensor gradient", _add_gradient)
define("add_part", "Tensor gradient, Tensor? at, int index", _add_part)
for _form in ("add_product_", "add_product", "add_grouped_", "add_grouped"):
    flops.add_formula(f"{NAMESPACE}::{_form}", flops.into_sum)


def _define(schema: str, kernel: Any, fake: Any, formula: Any, tags: Any = ()) -> None:
    """Define an operator without a ticket that changes.

    kernel: the implementation. fake: the one for fake tensors. formula: the number of FLOPs.
    """
    name = _library.define(schema, tags=tags)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    flops.add_formula(f"{NAMESPACE}::{name}", formula)


# A compiler may overwrite the outputs of an operator, so no operator may return a kept cast. The following
# operators multiply by the cast, and the backward saves its number.

_casts: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


def _multiply_kept(
    input: Tensor, weight: Tensor, bias: Tensor | None, ticket: Tensor, transposed: bool
) -> tuple[Tensor, Tensor]:
    """Return the product with the weight's cast, and a tensor that leads to the cast and keeps it alive."""
    holder: Any = _holders[int(ticket.item())]  # of a Linear
    cast = holder.cast(weight, input.dtype)
    if not hasattr(cast, "number"):
        cast.number = next(_numbers)
        _casts[cast.number] = cast
    held: Any = torch.tensor([cast.number], device="cpu")
    held.cast = cast
    return F.linear(input, cast.t() if transposed else cast, bias), held


def _multiply_held(rows: Tensor, held: Tensor, transposed: bool, columns: int) -> Tensor:
    """Return the gradient of the input."""
    cast = _casts.get(int(held.item()))
    if cast is None:
        raise RuntimeError(
            "keep_casts=True has let a weight's cast go before the backward of a compiled graph that needs "
            "it: run the forward again"
        )
    return torch.mm(rows, cast.t() if transposed else cast)


def _kept_shapes(
    input: Tensor, weight: Tensor, bias: Tensor | None, ticket: Tensor, transposed: bool
) -> tuple[Tensor, Tensor]:
    columns = weight.shape[1 if transposed else 0]
    return input.new_empty(*input.shape[:-1], columns), torch.empty_like(ticket)


def _kept_flops(input: Any, weight: Any, bias: Any, ticket: Any, transposed: bool, **more: Any) -> int:
    return flops.left_times_right(input, weight if transposed else weight[::-1])


def _held_flops(rows: Any, held: Any, transposed: bool, columns: int, **more: Any) -> int:
    return flops.left_times_right(rows, (columns,))


_define(
    "multiply_kept(Tensor input, Tensor weight, Tensor? bias, Tensor ticket, bool transposed) "
    "-> (Tensor, Tensor)",
    runs_as_written(_multiply_kept),
    fake=_kept_shapes,
    formula=_kept_flops,
    tags=_TAGS,
)
_define(
    "multiply_held(Tensor rows, Tensor held, bool transposed, SymInt columns) -> Tensor",
    runs_as_written(_multiply_held),
    fake=lambda rows, held, transposed, columns: rows.new_empty(rows.shape[0], columns),
    formula=_held_flops,
    tags=_TAGS,
)


_define(
    "multiply_groups(Tensor rows, Tensor weight, Tensor offs) -> Tensor",
    lambda rows, weight, offs: F.grouped_mm(rows, weight, offs=offs),
    fake=lambda rows, weight, offs: rows.new_empty(rows.shape[0], weight.shape[-1]),
    formula=flops.left_times_right,
)


# The operators of forward passes. Their kernels are native.


def _declare(schema: str) -> Any:
    return getattr(_operators, _library.define(schema)).default


#: input @ weight.T + bias, or input @ weight + bias if `transposed`.
linear = _declare(
    "linear(Tensor input, Tensor weight, Tensor? bias, Tensor ticket, bool transposed, bool keeps_cast) "
    "-> Tensor"
)
#: weight[indices]; padding, by_frequency: as in `PatchedEmbedding.add_rows`.
embedding = _declare(
    "embedding(Tensor indices, Tensor weight, Tensor ticket, int padding, bool by_frequency) -> Tensor"
)
#: A product for each group of rows; inward: as in `stacked.apply`.
grouped = _declare("grouped(Tensor rows, Tensor weight, Tensor offs, Tensor ticket, bool inward) -> Tensor")
#: weight[at], where the tensor `at` is the index of one expert, or weight[index] if `at` is None.
selected = _declare("selected(Tensor weight, Tensor? at, int index, Tensor ticket) -> Tensor")

_native: Any = native_module.loaded()
if _native is not None:
    _native.define_operators(NAMESPACE, _add_product, _add_rows)
