"""Replaces a stacked weight (experts, ...) while a forward that reads it runs.

All operations use the parameter, with two exceptions: `weight[e]`, and `grouped_mm` in modules whose grouped
products are known. The gradient of `weight[e]` is added to that expert's part of the sum. The gradient of a
grouped product is added to the matrices of the experts that have rows. PyTorch's backward writes a gradient
of all experts in every micro-batch, with zeros for experts without rows, and again for each `weight[e]`.

Transformers' experts are recognised by their common forward (`PatchedExperts`). For other modules, the first
call shows whether they read the weight expert by expert.
"""

from __future__ import annotations

import copy
import inspect
import operator
import sys
import weakref
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..accumulators import Slot
from ..accumulators.param import Lane
from ..autograd.capture import Capture
from ..functional import scale_accumulate_
from ..kernels import grouped, native_module
from ..kernels.checks import GRADIENT_TYPES, ORDINARY_TYPES
from ..kernels.dtypes import PAIRS
from ..kernels.torch_private import (
    FakeTensor,
    as_subclass,
    assume_constant_result,
    frame_compiler,
    runs_as_written,
    show_to_function_modes,
    tree_map_only,
)
from . import compiled
from .patched_forward import PATCHED, TRACED, PatchedForward, WeightSum, may_record, reads_parameter

#: The native functions. Without them nothing stands in for a parameter.
_native: Any = native_module.loaded()
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


class StackedWeight(Tensor):
    """A stand-in for a parameter, or for its transposed matrices. `stand_in` creates it."""

    #: Makes isinstance(stand_in, nn.Parameter) true, as for torch's parameters of tensor subclasses.
    _is_param = True
    plain: Tensor
    target: StackedSum
    groups: bool
    turned: bool

    @classmethod
    @runs_as_written
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        replacement = _REPLACEMENTS.get(func)
        if replacement is not None and torch.is_grad_enabled():
            output = replacement(*args, **kwargs)
            if output is not None:
                return output
        args, kwargs = tree_map_only(StackedWeight, operator.attrgetter("plain"), (args, kwargs))
        return func(*args, **kwargs)

    # nn.Parameter defines these methods, so they do not call __torch_function__.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.plain, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]  # repr() gives no tensor_contents
        return repr(self.plain)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["plain"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.plain, name, value)


def _on_plain(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    args, kwargs = tree_map_only(StackedWeight, operator.attrgetter("plain"), (args, kwargs or {}))
    return func(*args, **kwargs)


class _FakeStackedWeight(StackedWeight):
    """The stand-in for a fake parameter. Aliases of fake tensors must be fake tensors."""

    __torch_dispatch__: Any = classmethod(_on_plain)


def stand_in(plain: Tensor, target: StackedSum, groups: bool, turned: bool = False) -> StackedWeight:
    """Return a stand-in for `plain`: the parameter of `target`, or its transposed matrices (`turned`).
    groups: whether the grouped products are known.
    """
    if isinstance(plain, FakeTensor):
        made: StackedWeight = Tensor._make_wrapper_subclass(
            _FakeStackedWeight,
            plain.shape,
            plain.stride(),
            dtype=plain.dtype,
            device=plain.device,
            requires_grad=plain.requires_grad,
        )
    else:
        # An alias with a graph: gradients reach the parameter even from code that ignores the subclass.
        made = as_subclass(plain, StackedWeight)
    made.__dict__.update(plain=plain, target=target, groups=groups, turned=turned)
    return made


def plain_of(weight: Tensor) -> Tensor:
    """Return the parameter of a stand-in, or the weight itself."""
    return weight.plain if isinstance(weight, StackedWeight) else weight


def _select(weight: Any, index: Any) -> Tensor | None:
    if not isinstance(weight, StackedWeight) or weight.plain is not weight.target.slot.param:
        return None
    return _selected(weight.plain, index, weight.target)


def _selected(weight: Tensor, index: Any, target: StackedSum) -> Tensor | None:
    """Return weight[index] for the parameter of `target`; None for any other kind of index."""
    if isinstance(index, Tensor):
        if type(index) is not Tensor or not _names_expert(index):
            return None
    elif isinstance(index, bool) or not hasattr(index, "__index__"):
        return None
    expert = operator.index(index)
    num_experts = len(weight)
    if not -num_experts <= expert < num_experts:
        return None
    target.declare("grouped")
    return _native.selected(weight, None, expert % num_experts, target.ticket)


def _names_expert(index: Tensor) -> bool:
    return index.dim() == 0 and index.dtype in _INTEGERS


def _turns(dim0: int, dim1: int) -> bool:
    return {dim0 % 3, dim1 % 3} == {1, 2}


def _transpose(weight: Any, first: Any, second: Any) -> Tensor | None:
    """Return a stand-in for the transposed matrices, for a grouped product."""
    if not isinstance(weight, StackedWeight) or not weight.groups or not _turns(first, second):
        return None
    return stand_in(weight.plain.transpose(1, 2), weight.target, True, not weight.turned)


def _multiply(rows: Any, weight: Any, offs: Any = None, *others: Any, **named: Any) -> Tensor | None:
    """Multiply rows (S, in) by the experts' matrices (experts, in, out)."""
    if not isinstance(weight, StackedWeight) or not weight.groups:
        return None
    if any(value is not None for value in (*others, *named.values())):  # a bias, another dtype
        return None
    return apply(rows, weight.target, offs, inward=not weight.turned)


#: The functions that replace operations on the parameter. They return None to use the original after all.
_REPLACEMENTS: dict[Any, Callable[..., Tensor | None]] = {
    Tensor.__getitem__: _select,
    Tensor.transpose: _transpose,
    torch.transpose: _transpose,
    F.grouped_mm: _multiply,
    torch._grouped_mm: _multiply,
}


def know_transformers() -> None:
    """Replace Transformers' fallback for `grouped_mm` too. Graphs without bfloat16 use it."""
    fallback = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    if fallback is not None:
        _REPLACEMENTS[fallback] = _multiply


@assume_constant_result  # Dynamo calls it, and does not trace it
@runs_as_written
def _show_grouped_products() -> None:
    """Let torch function modes see `torch._grouped_mm` under Dynamo, as in eager mode."""
    show_to_function_modes(torch._grouped_mm)


class Transposed(NamedTuple):
    """A result of transposing a parameter's matrices."""

    matrices: Tensor
    parameter: Tensor
    #: Whether an even number of transpositions has made it.
    inward: bool


class ReadByCompiler(TorchFunctionMode):
    """Replaces the same operations as stand-ins in a forward that torch.compile may compile.

    Dynamo cannot trace stand-ins, but traces this mode. The mode also applies to code that Dynamo skips,
    such as a loop with a graph break.
    """

    @runs_as_written
    def __init__(self) -> None:
        super().__init__()
        _show_grouped_products()
        self._transposed: list[Transposed] = []

    @runs_as_written
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replacement = _REPLACEMENTS.get(func)
        kwargs = kwargs or {}
        output = None
        if replacement is _select:
            output = self._select(*args)
        elif replacement is _multiply:
            output = self._multiply(*args, **kwargs)
        if output is None:
            output = func(*args, **kwargs)
            if replacement is _transpose:
                weight, inward = self._parameter_of(args[0])
                if weight is not None and weight.dim() == 3 and _turns(*args[1:], **kwargs):
                    self._transposed.append(Transposed(output, weight, not inward))
        return output

    def _parameter_of(self, tensor: Any) -> tuple[Tensor | None, bool]:
        """Return the parameter whose matrices these are, and whether they are not transposed."""
        if isinstance(tensor, torch.nn.Parameter):
            return tensor, True
        for transposed in self._transposed:
            if transposed.matrices is tensor:
                return transposed.parameter, transposed.inward
        return None, True

    def _select(self, weight: Any, index: Any) -> Tensor | None:
        if not isinstance(weight, torch.nn.Parameter) or weight.dim() != 3:
            return None
        if not is_compiling():
            target = _target_at_hand(weight)
            return None if target is None else _selected(weight, index, target)
        traced: Any = getattr(weight, TRACED, None)
        if not compiled.accumulates(traced, weight):
            return None
        if isinstance(index, Tensor):
            return compiled.selected(weight, index, 0, traced.ticket) if _names_expert(index) else None
        experts = weight.shape[0]
        if not isinstance(index, int) or isinstance(index, bool) or not -experts <= index < experts:
            return None
        return compiled.selected(weight, None, index, traced.ticket)

    def _multiply(self, rows: Any, right: Any, offs: Any = None, *others: Any, **named: Any) -> Tensor | None:
        if any(value is not None for value in (*others, *named.values())):  # a bias, another dtype
            return None
        weight, inward = self._parameter_of(right)
        return None if weight is None else grouped_product(rows, weight, offs, inward)


def grouped_product(rows: Any, weight: Tensor, offs: Any, inward: bool) -> Tensor | None:
    """Multiply by a parameter, and add the gradient to its sum; None if PyTorch must compute the product.

    Arguments: as in `apply`.
    """
    if is_compiling():
        traced: Any = getattr(weight, TRACED, None)
        if weight.dim() == 3 and compiled.accumulates(traced, weight):
            return compiled.grouped(rows, weight, offs, traced.ticket, inward)
        return None
    target = _target_at_hand(weight)
    return None if target is None else apply(rows, target, offs, inward=inward)


Number = float | Tensor
Run = Callable[[Tensor, Tensor, Tensor, Tensor, Number, Number], None]


class SelectedProduct(NamedTuple):
    """What adds grouped products of operands of this dtype, and the lane for which it was selected."""

    lane: Lane
    operand: torch.dtype
    run: Run


class GroupedSum(WeightSum):
    """The sum of a parameter (experts, out, in), to which grouped products are added."""

    path = "grouped"
    _selected: SelectedProduct | None = None

    def run(self, capture: Capture, operand: torch.dtype) -> Run:
        """Return the function that adds grouped products of operands of this dtype to the sum."""
        lane = self.slot.lane
        selected = self._selected  # read once, because another thread may replace it
        if selected is None or selected.lane is not lane or selected.operand is not operand:
            device, _, dtype = lane
            run = grouped.select(device, dtype, operand, capture.accumulators.backend).run
            selected = SelectedProduct(lane, operand, run)
            self._selected = selected
        return selected.run

    def select_again(self) -> None:
        """Forget which product was selected."""
        self._selected = None

    def add_products(self, node: Any, left: Tensor, right: Tensor, offs: Tensor) -> bool:
        """Try to add the products left[s:t]^T right[s:t] to the sum. Return whether the gradient needs no
        further work. node: as in `Capture.take_in_place`.
        """
        self.declare(self.path)
        capture = self._capture()
        if capture is None or (left.dtype, self.slot.accumulate_dtype) not in PAIRS:
            return False
        run = self.run(capture, left.dtype)
        return self.accumulate_in_place(
            node,
            lambda total, scale, beta: run(total, left, right, offs, scale, beta),
            (left, right),
            may_wait=True,
        )


class StackedSum(GroupedSum):
    """The sum of a stacked weight. Functions that multiply by it find it while it exists."""

    def __init__(self, slot: Slot, capture: Capture) -> None:
        super().__init__(slot, capture)
        _targets[id(slot.param)] = self
        if self.is_ordinary and (slot.param.dtype, slot.accumulate_dtype) in PAIRS:
            slot.param.__dict__[TRACED] = compiled.Traced(self)

    def remove(self) -> None:
        """Leave the parameter to PyTorch in graphs that are compiled later."""
        self.slot.param.__dict__.pop(TRACED, None)

    def add_part(self, node: Any, gradient: Tensor, index: int) -> bool:
        """Try to add the gradient of one expert. node and the result: as of `add_products`."""
        self.declare("grouped")

        def write(accumulator: Tensor, scale: Number, beta: Number) -> None:
            is_first = bool(beta == 0)
            scale_accumulate_(
                [accumulator[index]], [gradient], scale, overwrite=is_first, backend=self.backend
            )

        return self.accumulate_in_place(node, write, (gradient,), part=index)


def apply(rows: Tensor, target: StackedSum, offs: Any, *, inward: bool) -> Tensor | None:
    """Return the product with the parameter of `target`. Its backward adds the gradient to the sum.

    Returns None if PyTorch must compute the product, or raise. inward: the weight is (experts, in, out), not
    (experts, out, in). Output rows after the last expert's are uninitialised, as in torch's grouped_mm.
    """
    weight = target.slot.param
    capture = target._capture()
    if (
        capture is None
        or not target.accumulates
        or type(rows) not in ORDINARY_TYPES
        or type(offs) not in GRADIENT_TYPES
        or rows.dim() != 2
        or rows.dtype is not weight.dtype
        or (weight.dtype, target.slot.accumulate_dtype) not in PAIRS
    ):
        return None
    target.declare("grouped")
    target.run(capture, weight.dtype)  # select now: a self-test should not run inside the backward
    return _native.grouped(rows, weight, offs, target.ticket, inward)


#: The sums of wrappers that were created with `model=`, by the parameter's id.
_targets: weakref.WeakValueDictionary[int, StackedSum] = weakref.WeakValueDictionary()


def _target_at_hand(weight: Tensor) -> StackedSum | None:
    """Return the parameter's sum, or None if it has none or custom functions may not be in the graph."""
    target = _targets.get(id(weight))
    return target if target is not None and target.slot.param is weight and may_record() else None


#: Transformers' implementations that read one expert's weight at a time, or use a grouped product.
_KNOWN = (None, "eager", "grouped_mm")


class PatchedExperts(PatchedForward):
    """A module with parameters (experts, out, in) or (experts, in, out). slot: of the first of them."""

    compiled_by_itself = True

    def __init__(self, module: torch.nn.Module, slot: Slot, capture: Capture) -> None:
        super().__init__(module, slot, capture)
        self._targets: dict[str, StackedSum] = {}
        self._groups = is_of_transformers(module)
        if self._groups:
            know_transformers()

    def stand_for(self, name: str, target: StackedSum) -> None:
        """Use a stand-in for the parameter of this name too."""
        self._targets[name] = target
        if self._groups:
            way = _implementation(self.module)
            if way in _KNOWN:
                target.declare("grouped")
            else:
                target.slot.left_to = f"Transformers' {way} for experts copies or repacks weights"

    def leave(self, slots: Collection[Slot]) -> bool:
        for name, target in list(self._targets.items()):
            if target.slot in slots:
                del self._targets[name]
        return not self._targets

    @staticmethod
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        stock = type(module).forward
        # First, because a compiler makes a guard of every value that is read before.
        if is_compiling() or frame_compiler() is not None:
            with ReadByCompiler():
                return stock(module, *args, **kwargs)
        patched = module.__dict__.get(PATCHED)
        if patched is None or stock is not patched.stock or not patched.may_record():
            return stock(module, *args, **kwargs)
        return patched.run(module, args, kwargs)

    def run(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run the forward of the module's class with stand-ins in place of the parameters."""
        if self._groups and _implementation(module) not in _KNOWN:
            return self.stock(module, *args, **kwargs)
        attributes = module.__dict__
        stand_ins = {
            name: stand_in(target.slot.param, target, self._groups)
            for name, target in self._targets.items()
            if target.accumulates and reads_parameter(module, name, target.slot.param)
        }
        attributes.update(stand_ins)
        self._entries = self._entries | stand_ins  # copies of the module leave these out
        try:
            output = self.stock(module, *args, **kwargs)
        finally:
            self._entries = {name: entry for name, entry in self._entries.items() if name not in stand_ins}
            for name, weight in stand_ins.items():
                if attributes.get(name) is weight:
                    del attributes[name]
        if not self._groups:
            self._forget_unread(stand_ins)
        return output

    def _forget_unread(self, names: Collection[str]) -> None:
        """Stop using stand-ins for parameters that were not read expert by expert."""
        for name in names:
            target = self._targets.get(name)
            if target is not None and "grouped" not in target.slot.paths:
                del self._targets[name]
        if not self._targets:
            self.remove()


def may_read_experts(module: torch.nn.Module, parameter: torch.Tensor) -> bool:
    """Whether a module's own parameter may be a stack of experts' weights."""
    stacked = parameter.dim() == 3 and len(parameter) > 1
    return stacked and not type(module).__module__.startswith("torch.")


def is_of_transformers(module: torch.nn.Module) -> bool:
    """Whether the forward of the module's class gets its implementation from Transformers.

    The decorator `use_experts_implementation` of Transformers replaces a class's forward with one that asks
    `ExpertsInterface`.
    """
    moe = sys.modules.get("transformers.integrations.moe")
    interface = getattr(moe, "ExpertsInterface", None)
    forward = type(module).forward
    if interface is None or not inspect.isfunction(forward):
        return False
    variables = inspect.getclosurevars(forward)
    read = (*variables.nonlocals.values(), *variables.globals.values())
    return any(isinstance(value, interface) for value in read)


def _implementation(module: Any) -> Any:
    return getattr(module.config, "_experts_implementation", None)
