"""FLOPs of the products that modules add to their sums, for `torch.utils.flop_counter.FlopCounterMode`.

torch counts the operators for which its registry has a formula. It has none for our operators, none for
`addmm_`, which adds a product to a sum in place, and none for the grouped product of a mixture's experts. Its
formula for `addmm` raises where the sum has a wider dtype than the operands, up to torch 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from math import prod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_REGISTRY = "torch.utils.flop_counter"

Shape = Sequence[int]


def left_times_right(left: Shape, right: Shape, *others: Any, **more: Any) -> int:
    """One product, or those of groups of rows: each row of `left` is in one group."""
    return 2 * prod(left) * right[-1]


def into_sum(accumulator: Shape, left: Shape, right: Shape, *others: Any, **more: Any) -> int:
    """A product added to a sum, or to what a ticket leads to."""
    return left_times_right(left, right)


def _grouped_mm(left: Shape, right: Shape, *others: Any, **more: Any) -> int:
    """With three dimensions on the left only, the columns of `right` are shared out among the matrices."""
    return left_times_right(left if len(right) == 3 else left[-2:], right)


#: Formulas by the names of operators: of their arguments, in which shapes stand for tensors.
_FORMULAS: dict[str, Callable[..., int]] = {
    "fusedacc::gemm_accumulate_": into_sum,
    "fusedacc::grouped_accumulate_": into_sum,
    "fusedacc::launched_product": left_times_right,
    "aten::addmm": into_sum,
    "aten::addmm_": into_sum,
    "aten::_grouped_mm": _grouped_mm,
}

_library = torch.library.Library("fusedacc", "FRAGMENT")
_library.define("launched_product(Tensor left, Tensor right) -> ()")
_library.impl("launched_product", lambda left, right: None, "CompositeExplicitAutograd")


def show_launch(left: Tensor, right: Tensor) -> None:
    """Let torch's modes see left^T right, which a launch outside of torch's dispatcher has multiplied."""
    if torch._C._len_torch_dispatch_stack():
        torch.ops.fusedacc.launched_product.default(left.detach(), right.detach())


def add_formula(name: str, formula: Callable[..., int]) -> None:
    """Give torch this formula of an operator as well."""
    _FORMULAS[name] = formula
    if _REGISTRY in sys.modules:
        register()


def register() -> None:
    """Give torch the formulas of the operators that it cannot count. A counter takes them when it is made."""
    try:
        home = importlib.import_module(_REGISTRY)
        register_flop_formula = home.register_flop_formula
    except (ImportError, AttributeError):  # torch has moved it: then these operators are not counted
        return
    _forget_narrow_addmm(getattr(home, "flop_registry", {}))
    with contextlib.suppress(ImportError, AttributeError, AssertionError):  # none, or it sees through already
        _see_through_effects(home._FlopCounterMode)
    for name, formula in _FORMULAS.items():
        namespace, operator = name.split("::")
        packet = getattr(getattr(torch.ops, namespace), operator, None)
        if packet is not None:
            with contextlib.suppress(RuntimeError):  # it has one already
                register_flop_formula(packet)(formula)


def _see_through_effects(mode: type) -> None:
    """Have torch's counter count operators with effects, which compiled graphs have. It would raise."""
    effects = importlib.import_module("torch._higher_order_ops.effects")

    def counted(counter: Any, *arguments: Any, **named: Any) -> Any:
        with counter:
            return effects.with_effects_dense(*arguments, **named)

    effects.with_effects.py_impl(mode)(counted)


def register_in_time() -> None:
    """Register now if the module that has torch's registry is imported, else as soon as it is.

    To import it here would import Triton.
    """
    if _REGISTRY in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _Registering())


class _Registering(MetaPathFinder):
    """Finds the module that has torch's registry where torch is, and registers once the module has run."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == _REGISTRY else None
        if spec is not None and spec.loader is not None:
            run = functools.partial(self._run, spec.loader.exec_module)
            spec.loader.exec_module = run  # type: ignore[method-assign]  # the loader is this spec's alone
        return spec

    def _run(self, exec_module: Callable[[ModuleType], None], module: ModuleType) -> None:
        exec_module(module)
        with contextlib.suppress(ValueError):  # it has been taken out
            sys.meta_path.remove(self)
        register()


def _forget_narrow_addmm(registry: dict[Any, Callable[..., int]]) -> None:
    """Take torch's own formula for addmm out of its registry if it raises where `out_dtype` is given."""
    packet, one = torch.ops.aten.addmm, (1, 1)
    formula = registry.get(packet)
    if formula is not None and getattr(formula, "__module__", "") == _REGISTRY:
        try:
            formula(one, one, one, torch.float32, out_val=one)
        except TypeError:
            del registry[packet]
