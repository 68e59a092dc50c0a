"""Checks the arguments of sinks, in eager mode and where a compiler traces a backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..kernels.checks import ORDINARY_TYPES


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


def check_product(weight: Tensor, left: Tensor, right: Tensor, dims: int) -> None:
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


def check_offs(weight: Tensor, offs: Tensor) -> None:
    _check_operand("offs", offs, weight, is_integer=True)
    if offs.dtype != torch.int32:
        raise TypeError(f"offs has dtype {offs.dtype}; allowed: torch.int32")
    if offs.shape != weight.shape[:1]:
        raise ValueError(f"offs has shape {tuple(offs.shape)}; allowed: ({weight.shape[0]},)")


def check_ends(offs: Tensor, tokens: int) -> None:
    """Check the values of `offs` on a CPU. On a GPU the host would wait for them."""
    start = 0
    for index, end in enumerate(offs.tolist() if offs.is_cpu else ()):
        if not start <= end <= tokens:
            raise ValueError(
                f"offs[{index}] is {end}; allowed: {start} to {tokens}, from the end before it to the number "
                "of rows"
            )
        start = end


def check_rows(weight: Tensor, indices: Tensor, rows: Tensor) -> None:
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


def check_indices(indices: Tensor, count: int) -> None:
    """Check the values of indices on a CPU. On a GPU the host would wait for them."""
    if not (indices.is_cpu and indices.numel()):
        return
    least, most = (int(value) for value in torch.aminmax(indices))
    if least < 0 or most >= count:
        raise IndexError(f"indices has values from {least} to {most}; allowed: 0 to {count - 1}")


def check_gradient(weight: Tensor, gradient: Tensor) -> None:
    _check_operand("gradient", gradient, weight)
    if gradient.shape != weight.shape:
        raise ValueError(
            f"gradient has shape {tuple(gradient.shape)}; allowed: the parameter's, {tuple(weight.shape)}"
        )
