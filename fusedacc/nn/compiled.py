"""Operators that let a graph of torch.compile add weight gradients to their sums inside its backward.

The forward has one operator per module. Dynamo sees only its name. Its Autograd kernel is an
autograd.Function that AOTAutograd traces, so the forward's graph has torch's own operators, which Inductor
fuses as usual. The backward's graph has one of this module's operators per product. Instead of the sum it
gets a *ticket*: a CPU tensor that holds a number. At run time the operator finds the parameter by this
number, and decides how to handle the gradient.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _are_functorch_transforms_active
from torch.autograd import forward_ad
from torch.nn import functional as F

from ..kernels import flops, native_module
from ..kernels.torch_state import runs_as_written

# AOTAutograd traces the code of these files into graphs, and caches the graphs on disk by the names of their
# operators. So a change of the code must change the names.
# The loader of an imported module can read its source from a file or an archive.
_SOURCES = [
    __spec__.loader.get_data(os.path.join(os.path.dirname(__file__), name))  # type: ignore[union-attr]
    for name in (os.path.basename(__file__), "head.py")
]
NAMESPACE = f"fusedacc_compiled_{hashlib.sha256(b''.join(_SOURCES)).hexdigest()[:12]}"

#: Weights of up to this many elements stay in PyTorch's graph: an operator would cost more than it saves.
SMALL = 128 * 128

_numbers = itertools.count(1)
_holders: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def ticket_for(holder: Any) -> Tensor:
    """Return a tensor that leads to `holder`, a `WeightSum`, and keeps it alive.

    A graph keeps the ticket until its backward has run. Graphs get its number as an input, not as a constant,
    so equal modules share a graph. Numbers are never reused.
    """
    _define_natively()
    number = next(_numbers)
    ticket: Any = torch.tensor([number], device="cpu")
    _holders[number] = holder
    ticket.holder = holder
    return ticket


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
        self.ticket = ticket_for(holder)
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
    from torch._dynamo import config

    return (
        isinstance(traced, Traced)
        # The module may have another parameter now, or functional_call may replace it.
        and weight is traced.weight
        and is_grad_enabled()
        and weight.requires_grad
        and len(traced.hooks) == 0
        and len(ignoring) == 0
        and not _are_functorch_transforms_active()
        and forward_ad._current_level < 0
        # Dynamo of torch 2.10 takes is_exporting() for True.
        and not torch.compiler._is_exporting_flag
        and not config.compiled_autograd
        and not getattr(config, "trace_autograd_ops", False)
    )


# The operators

_library = torch.library.Library(NAMESPACE, "DEF")
_operators = getattr(torch.ops, NAMESPACE)
_TAGS = (torch.Tag.flexible_layout, torch._C.Tag.cudagraph_unsafe)


def holder_of(ticket: Tensor) -> Any:
    number = int(ticket.item())
    holder = _holders.get(number)
    if holder is None:
        raise RuntimeError(
            "the backward of a compiled graph has a weight's gradient for an "
            "AccumulatingOptimizer(model=...) that no longer exists, and neither does the module: run the "
            "forward again"
        )
    holder.remember(number)
    return holder


@runs_as_written
def add(holder: Any, gradient: Callable[[], Tensor], *arguments: Any, by: str = "try_add") -> None:
    """Handle a weight's gradient in the backward of a compiled graph.

    gradient: computes the gradient. by: the name of the holder's method that adds the gradient without
    computing it first, and arguments: its arguments without `armed`. Raises RuntimeError if
    `torch.autograd.grad` needs the gradient itself, which the graph does not return.
    """
    slot = holder.slot
    slot.compiled = True
    node = holder.node
    try:
        hooked = node is not None and torch._C._will_engine_execute_node(node)
        # No gradient is needed, or the graph ends in the node of the parameter before it was moved.
        if not hooked:
            node = _end_of_graph(slot.param)
            if node is None or not torch._C._will_engine_execute_node(node):
                return
    except RuntimeError as error:
        raise RuntimeError(
            f"torch.autograd.grad() asks for the gradient by {slot.name!r}. The compiled forward adds this "
            "gradient to its sum and does not return it. Call both the forward and torch.autograd.grad() "
            "inside optimizer.ignore(), or run the forward uncompiled"
        ) from error
    first, second, *options = arguments
    if not (hooked and getattr(holder, by)(first, second, True, *options)):
        holder.deliver(node, gradient())


def _end_of_graph(param: Tensor) -> Any:
    """Return the parameter's AccumulateGrad node in the running graph; None if the graph has none."""
    current: Any = torch._C._current_autograd_node()
    ends = () if current is None else current.next_functions
    return next((node for node, _ in ends if getattr(node, "variable", None) is param), None)


def _add_product(ticket: Tensor, left: Tensor, right: Tensor) -> None:
    add(holder_of(ticket), lambda: torch.mm(left.t(), right), left, right)


def _add_rows(ticket: Tensor, indices: Tensor, gradients: Tensor, padding: int, by_frequency: bool) -> None:
    holder = holder_of(ticket)

    def dense() -> Tensor:
        rows = holder.slot.param.shape[0]
        return torch.ops.aten.embedding_dense_backward(gradients, indices, rows, padding, by_frequency)

    add(holder, dense, indices, gradients, padding, by_frequency)


def _add_grouped(ticket: Tensor, left: Tensor, right: Tensor, offs: Tensor) -> None:
    add(holder_of(ticket), lambda: torch._grouped_mm(left.t(), right, offs=offs), left, right, offs)


def _add_part(ticket: Tensor, gradient: Tensor, at: Tensor | None, index: int) -> None:
    holder = holder_of(ticket)
    shape = holder.slot.param.shape
    part = (index if at is None else int(at)) % shape[0]

    def dense() -> Tensor:
        return torch.ops.aten.select_backward(gradient, shape, 0, part)

    add(holder, dense, gradient, part, by="try_add_part")


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
    torch.library._register_effectful_op(f"{NAMESPACE}::{name}", _ORDERED, lib=_library)
    written = getattr(_operators, f"{name}_").default
    ordered = getattr(_operators, name).default

    def call(*arguments: Any) -> Any:
        # This setting is on while AOTAutograd traces for Inductor.
        return (written if torch._functorch.config.unlift_effect_tokens else ordered)(*arguments)

    return call


_ORDERED = torch._library.effects.EffectType.ORDERED
_add_product_ = define("add_product", "Tensor left, Tensor right", _add_product)
_add_rows_ = define("add_rows", "Tensor indices, Tensor gradients, int padding, bool by_frequency", _add_rows)
_add_grouped_ = define("add_grouped", "Tensor left, Tensor right, Tensor offs", _add_grouped)
_add_part_ = define("add_part", "Tensor gradient, Tensor? at, int index", _add_part)
for _form in ("add_product_", "add_product", "add_grouped_", "add_grouped"):
    flops.add_formula(f"{NAMESPACE}::{_form}", flops.into_sum)


def _define(
    schema: str, kernel: Any, recorded: Any = None, fake: Any = None, formula: Any = None, tags: Any = ()
) -> Any:
    """Define an operator of a forward pass, and return it.

    kernel: the implementation without autograd. recorded: the one with autograd, which Dynamo's graphs call.
    fake: the one for fake tensors; None if the compiler traces the kernel. formula: the number of FLOPs of an
    operator with `fake`.
    """
    name = _library.define(schema, tags=tags)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    if recorded is not None:
        _library.impl(name, recorded, "Autograd")
    if fake is not None:
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
        flops.add_formula(f"{NAMESPACE}::{name}", formula)
    return getattr(_operators, name).default


@functools.cache
def _define_natively() -> None:
    """Let native code run these operators on a CPU. It calls these Python functions in unusual cases."""
    native: Any = native_module.module()
    if native is not None:
        for last in ("_", ""):
            product = f"{NAMESPACE}::add_product{last}"
            rows = f"{NAMESPACE}::add_rows{last}"
            native.define_compiled(product, _add_product, rows, _add_rows)


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


_multiply_kept_ = _define(
    "multiply_kept(Tensor input, Tensor weight, Tensor? bias, Tensor ticket, bool transposed) "
    "-> (Tensor, Tensor)",
    runs_as_written(_multiply_kept),
    fake=_kept_shapes,
    formula=_kept_flops,
    tags=_TAGS,
)
_multiply_held_ = _define(
    "multiply_held(Tensor rows, Tensor held, bool transposed, SymInt columns) -> Tensor",
    runs_as_written(_multiply_held),
    fake=lambda rows, held, transposed, columns: rows.new_empty(rows.shape[0], columns),
    formula=_held_flops,
    tags=_TAGS,
)


def operand_of(input: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor | None:
    """Return the input of a Linear in the dtype of the product, as under autocast; None if PyTorch must
    compute it, or raise.
    """
    dtype = weight.dtype
    device = input.device.type
    operand = input
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        if input.is_floating_point() and input.dtype != torch.float64:
            operand = input.to(dtype)
    fits = (
        operand.dtype == dtype
        and not weight.dtype.is_complex
        and input.shape
        and input.shape[-1] == weight.shape[0 if transposed else 1]
        and bias_fits(bias, weight)
    )
    return operand if fits else None


def bias_fits(bias: Tensor | None, weight: Tensor) -> bool:
    """Whether the backward of a Linear can return the gradient of this bias."""
    return bias is None or (bias.dtype == weight.dtype and bias.dim() == 1)


def no_view(output: Tensor) -> Tensor:
    """Return the output as a tensor that is no view, with the same memory.

    For some inputs ATen returns a view of its product, and autograd forbids in-place writes to a view that a
    custom function returns.
    """
    return torch.ops.aten._unsafe_view(output, output.shape) if output._is_view() else output


class _Linear(torch.autograd.Function):
    """The same as `linear.LinearFunction`, for compiled graphs.

    keeps_cast: whether to multiply by a cast of the weight that is kept over the window.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ticket: Tensor,
        transposed: bool,
        keeps_cast: bool,
    ) -> Tensor:
        ctx.dtype = weight.dtype
        ctx.transposed = transposed
        ctx.keeps_cast = keeps_cast
        bias = None if bias is None else bias.to(input.dtype)
        if keeps_cast:
            output, used = _multiply_kept_(input, weight.detach(), bias, ticket, transposed)
        else:
            used = weight.detach().to(input.dtype)
            output = F.linear(input, used.t() if transposed else used, bias)
        ctx.save_for_backward(input, used, ticket)
        return no_view(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, used, ticket = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        inputs = input.reshape(-1, input.shape[-1])
        of_input = of_bias = None
        if ctx.needs_input_grad[0]:
            if ctx.keeps_cast:
                of_input = _multiply_held_(rows, used, ctx.transposed, input.shape[-1])
            else:
                of_input = torch.mm(rows, used.t() if ctx.transposed else used)
            of_input = of_input.view(input.shape)
        if ctx.transposed:
            _add_product_(ticket, inputs, rows)
        else:
            _add_product_(ticket, rows, inputs)
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0).to(ctx.dtype)
        return of_input, None, of_bias, None, None, None


class _Embedding(torch.autograd.Function):
    """The same as `embedding.EmbeddingFunction`, for compiled graphs."""

    @staticmethod
    def forward(
        ctx: Any, indices: Tensor, weight: Tensor, ticket: Tensor, padding: int, by_frequency: bool
    ) -> Tensor:
        ctx.save_for_backward(indices, ticket)
        ctx.options = padding, by_frequency
        return F.embedding(indices, weight.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        indices, ticket = ctx.saved_tensors
        _add_rows_(ticket, indices, gradient, *ctx.options)
        return None, None, None, None, None


def _multiply(rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Call `torch._grouped_mm`, or, for other dtypes than bfloat16, an operator that has a fake version."""
    multiply = torch._grouped_mm if rows.dtype is torch.bfloat16 else _multiply_groups
    return multiply(rows, weight, offs=offs)


class _Grouped(torch.autograd.Function):
    """The same as `stacked.GroupedFunction`, for compiled graphs."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, offs: Tensor, ticket: Tensor, inward: bool) -> Tensor:
        used = weight.detach()
        ctx.inward = inward
        ctx.save_for_backward(rows, used, offs, ticket)
        return _multiply(rows, used if inward else used.transpose(-2, -1), offs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, used, offs, ticket = ctx.saved_tensors
        of_rows = None
        if ctx.needs_input_grad[0]:
            of_rows = _multiply(gradient, used.transpose(-2, -1) if ctx.inward else used, offs)
        left, right = (rows, gradient) if ctx.inward else (gradient, rows)
        _add_grouped_(ticket, left, right, offs)
        return of_rows, None, None, None, None


class _Selected(torch.autograd.Function):
    """The same as `stacked.SelectedFunction`, for compiled graphs."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, at: Tensor | None, index: int, ticket: Tensor) -> Tensor:
        ctx.save_for_backward(at, ticket)
        ctx.index = index
        return _plain_selected(weight.detach(), at, index, ticket)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        at, ticket = ctx.saved_tensors
        _add_part_(ticket, gradient, at, ctx.index)
        return None, None, None, None


def _plain_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, ticket: Tensor, transposed: bool, keeps_cast: bool
) -> Tensor:
    return F.linear(input, weight.t() if transposed else weight, bias)


def _plain_embedding(
    indices: Tensor, weight: Tensor, ticket: Tensor, padding: int, by_frequency: bool
) -> Tensor:
    return F.embedding(indices, weight)


def _plain_grouped(rows: Tensor, weight: Tensor, offs: Tensor, ticket: Tensor, inward: bool) -> Tensor:
    return torch._grouped_mm(rows, weight if inward else weight.transpose(-2, -1), offs=offs)


def _plain_selected(weight: Tensor, at: Tensor | None, index: int, ticket: Tensor) -> Tensor:
    return weight[index if at is None else at]


def _linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, ticket: Tensor, transposed: bool, keeps_cast: bool
) -> Tensor:
    operand = operand_of(input, weight, bias, transposed)
    if operand is None or input.device != weight.device or input.layout is not torch.strided:
        return _plain_linear(input, weight, bias, ticket, transposed, keeps_cast)  # may raise
    return _Linear.apply(
        operand, weight, bias, ticket, transposed, keeps_cast and operand.dtype != weight.dtype
    )


def _embedding(indices: Tensor, weight: Tensor, ticket: Tensor, padding: int, by_frequency: bool) -> Tensor:
    if indices.dtype not in (torch.int64, torch.int32) or indices.device != weight.device:
        return _plain_embedding(indices, weight, ticket, padding, by_frequency)
    return _Embedding.apply(indices, weight, ticket, padding, by_frequency)


def _grouped(rows: Tensor, weight: Tensor, offs: Tensor, ticket: Tensor, inward: bool) -> Tensor:
    if rows.dim() != 2 or rows.dtype != weight.dtype or rows.device != weight.device:
        return _plain_grouped(rows, weight, offs, ticket, inward)  # may raise
    return _Grouped.apply(rows, weight, offs, ticket, inward)


_multiply_groups = _define(
    "multiply_groups(Tensor rows, Tensor weight, Tensor offs) -> Tensor",
    torch._grouped_mm,
    fake=lambda rows, weight, offs: rows.new_empty(rows.shape[0], weight.shape[-1]),
    formula=flops.left_times_right,
)
#: input @ weight.T + bias, or input @ weight + bias if `transposed`.
linear = _define(
    "linear(Tensor input, Tensor weight, Tensor? bias, Tensor ticket, bool transposed, bool keeps_cast) "
    "-> Tensor",
    _plain_linear,
    _linear,
)
#: weight[indices]; padding, by_frequency: as in `PatchedEmbedding.try_add`.
embedding = _define(
    "embedding(Tensor indices, Tensor weight, Tensor ticket, int padding, bool by_frequency) -> Tensor",
    _plain_embedding,
    _embedding,
)
#: A product for each group of rows; inward: as in `stacked.GroupedFunction`.
grouped = _define(
    "grouped(Tensor rows, Tensor weight, Tensor offs, Tensor ticket, bool inward) -> Tensor",
    _plain_grouped,
    _grouped,
)
#: weight[at], where the tensor `at` is the index of one expert, or weight[index] if `at` is None.
selected = _define(
    "selected(Tensor weight, Tensor? at, int index, Tensor ticket) -> Tensor",
    _plain_selected,
    _Selected.apply,
)
