"""What an operator call looks at, by whose operator it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from . import operators, our_rules
from .operands import Call, Operand, name_of, tensors_in
from .our_rules import of_ours
from .torch_rules import of_torch


def is_metadata(func: OpOverload) -> bool:
    """Whether the call looks at no data and makes no view."""
    namespace, _, name = name_of(func).partition("::")
    if namespace in ("prim", "profiler"):
        return True
    return name in operators.METADATA if namespace == "aten" else name_of(func) in our_rules.METADATA


def is_view(func: OpOverload) -> bool:
    """Whether the call returns views, or changes one, by its schema. Not asked of composite operators."""
    return func.is_view or torch.Tag.inplace_view in func.tags


def operands_of(
    func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> list[Operand] | None:
    """What a call has read and written; None for an operator without a rule, or tensors without strides."""
    if not all(map(_is_countable, tensors_in(args, kwargs, result))):
        return None
    namespace, _, name = name_of(func).partition("::")
    rule = {"aten": of_torch, "fusedacc": of_ours}.get(namespace)
    return None if rule is None else rule(Call(func, args, kwargs, result), name)


def _is_countable(tensor: Tensor) -> bool:
    """Whether it has strides, and sizes that are numbers."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return not any(isinstance(size, torch.SymInt) for size in (*tensor.shape, *tensor.stride()))
