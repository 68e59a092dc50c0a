"""FLOPs of products into sums, for `torch.utils.flop_counter.FlopCounterMode`.

torch counts operators with a formula in its registry. It has none for our operators, for `addmm_` and for the
grouped product of a mixture's experts. Up to torch 2.13 its formula for `addmm` raises if the sum has a wider
dtype than the operands.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from . import torch_private
from .import_hooks import when_imported

_REGISTRY = "torch.utils.flop_counter"

Shape = Sequence[int]


def left_times_right(left: Shape, right: Shape, *others: Any, **more: Any) -> int:
    """One product, or those of groups of rows; each row of `left` is in one group."""
    return 2 * prod(left) * right[-1]


def into_sum(accumulator: Shape, left: Shape, right: Shape, *others: Any, **more: Any) -> int:
    """A product added to a sum, or to what a ticket refers to."""
    return left_times_right(left, right)


def _linear(input: Shape, weight: Shape, *others: Any, **more: Any) -> int:
    return 2 * prod(input) * weight[0]


def _grouped_mm(left: Shape, right: Shape, *others: Any, **more: Any) -> int:
    """If only the left side has three dimensions, the matrices share the columns of `right`."""
    return left_times_right(left if len(right) == 3 else left[-2:], right)


#: Formulas of operators; tensors are given as shapes.
_FORMULAS: dict[str, Callable[..., int]] = {
    "fusedacc::gemm_accumulate_": into_sum,
    "fusedacc::grouped_accumulate_": into_sum,
    "fusedacc::launched_product": left_times_right,
    "aten::addmm": into_sum,
    "aten::addmm_": into_sum,
    "aten::_grouped_mm": _grouped_mm,
    "mkldnn::_linear_pointwise": _linear,
}

_library = torch.library.Library("fusedacc", "FRAGMENT")
_library.define("launched_product(Tensor left, Tensor right) -> ()")
_library.impl("launched_product", lambda left, right: None, "CompositeExplicitAutograd")


def show_launch(left: Tensor, right: Tensor) -> None:
    """Show torch's modes a product left^T right that was launched outside torch's dispatcher."""
    if torch_private.num_dispatch_modes():
        torch.ops.fusedacc.launched_product.default(left.detach(), right.detach())


def add_formula(name: str, formula: Callable[..., int]) -> None:
    """Add the formula of another operator."""
    _FORMULAS[name] = formula
    if _REGISTRY in sys.modules:
        register()


def register() -> None:
    """Register the formulas that torch lacks. A counter reads them when it is created."""
    try:
        home = importlib.import_module(_REGISTRY)
        register_flop_formula = home.register_flop_formula
    except (ImportError, AttributeError):  # torch has moved it; do not count these operators
        return
    _forget_narrow_addmm(getattr(home, "flop_registry", {}))
    with contextlib.suppress(ImportError, AttributeError, AssertionError):  # not needed in this torch
        _see_through_effects(home._FlopCounterMode)
    for name, formula in _FORMULAS.items():
        namespace, operator = name.split("::")
        packet = getattr(getattr(torch.ops, namespace), operator, None)
        if packet is not None:
            with contextlib.suppress(RuntimeError):  # torch has a formula
                register_flop_formula(packet)(formula)


def _see_through_effects(mode: type) -> None:
    """Let torch's counter count operators with effects, as in compiled graphs; it would raise."""
    effects = torch_private.effects()

    def counted(counter: Any, *arguments: Any, **named: Any) -> Any:
        with counter:
            return effects.with_effects_dense(*arguments, **named)

    effects.with_effects.py_impl(mode)(counted)


def register_in_time() -> None:
    """Register now if the module with torch's registry is imported, else as soon as it is.

    Importing it here would import Triton.
    """
    when_imported(_REGISTRY, register)


def _forget_narrow_addmm(registry: dict[Any, Callable[..., int]]) -> None:
    """Remove torch's formula of addmm if it raises with `out_dtype`."""
    packet = torch.ops.aten.addmm
    one = (1, 1)
    formula = registry.get(packet)
    if formula is not None and getattr(formula, "__module__", "") == _REGISTRY:
        try:
            formula(one, one, one, torch.float32, out_val=one)
        except TypeError:
            del registry[packet]
