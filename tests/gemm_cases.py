"""Inputs, layouts and the float64 oracle for tests of products that are added to sums, on every device."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from cases import PAIRS, random_tensor
from torch import Tensor

from fusedacc.kernels import library
from fusedacc.kernels.dtypes import computation_dtype

#: (operand dtype, accumulator dtype) as in `checks.PAIRS`.
GEMM_PAIRS = PAIRS
#: (M, N, n): left [n, M], right [n, N] and accumulator [M, N].
SHAPES = [
    (5, 7, 3),
    (1, 4, 2),
    (4, 1, 2),
    (1, 1, 1),
    (3, 3, 1),
    (6, 5, 0),
    (0, 3, 2),
    (3, 0, 2),
    (70, 90, 33),
]
SUM_LAYOUTS = ("rows", "columns", "long rows", "long columns")
OPERAND_LAYOUTS = ("rows", "columns", "long rows", "gaps", "expanded tokens", "expanded features")
NAN = float("nan")
#: The unit roundoff of TF32 operands.
TF32_UNIT = 2.0**-10
#: The layouts that products on a CPU are tested with.
BACKENDS = [name for name in ("cpu", "eager") if name == "eager" or library.load_error() is None]


def ways(function: Callable, operators: Mapping[str, Callable]) -> list:
    """Return what to test: a function for each backend, and an operator for each of its ways."""
    found = {name: functools.partial(function, backend=name) for name in BACKENDS}
    if library.load_error() is None:
        found |= {f"operator {name}": way for name, way in operators.items()}
    return [pytest.param(way, id=name) for name, way in found.items()]


@contextlib.contextmanager
def float32_setting(name: str, value: bool | str) -> Iterator[None]:
    """Return PyTorch's setting for float32 products, from the older or the newer interface."""
    before = getattr(torch.backends.cuda.matmul, name)
    setattr(torch.backends.cuda.matmul, name, value)
    try:
        yield
    finally:
        setattr(torch.backends.cuda.matmul, name, before)


def lay_out_sum(values: Tensor, layout: str) -> Tensor:
    """Return a matrix equal to `values` in a layout that accumulators may have."""
    if "columns" in layout:
        return lay_out_sum(values.t(), layout.replace("columns", "rows")).t()
    room = values.new_zeros(values.shape[0], values.shape[1] + (3 if "long" in layout else 0))
    return room[:, : values.shape[1]].copy_(values)


def lay_out_operand(values: Tensor, layout: str) -> Tensor:
    """Return a matrix equal to `values` in the layout. An expanded one repeats its first row or column."""
    if layout == "gaps":
        return values.new_zeros(values.shape[0], 2 * values.shape[1])[:, ::2].copy_(values)
    if layout == "expanded tokens":
        return values[:1].clone().expand(values.shape)
    if layout == "expanded features":
        return values[:, :1].clone().expand(values.shape)
    return lay_out_sum(values, layout)


def matrices(pair, shape, generator, layouts=("rows", "rows", "rows"), device="cpu"):
    """Return the accumulator, the left and the right operand."""
    operand, accumulator = pair
    rows, columns, tokens = shape
    return (
        lay_out_sum(random_tensor((rows, columns), accumulator, generator, device=device), layouts[0]),
        lay_out_operand(random_tensor((tokens, rows), operand, generator, device=device), layouts[1]),
        lay_out_operand(random_tensor((tokens, columns), operand, generator, device=device), layouts[2]),
    )


def assert_is_product(
    result: Tensor,
    before: Tensor,
    left: Tensor,
    right: Tensor,
    scale: float | Tensor = 1.0,
    beta: float | Tensor = 1.0,
    *,
    unit: float | None = None,
) -> None:
    """Compare `result` with the float64 product, element by element.

    The tolerance is the sum of these errors:

      - half a unit of the computation's dtype (or `unit`, for TF32) for each of n products and additions, for
          the scale, for `beta`, and for each addition to the sum; BLAS may make n such additions;
      - half a unit of the accumulator's dtype, for the result.
    """
    scale, beta = float(scale), float(beta)
    wide = computation_dtype(before.dtype)
    a, b = left.double(), right.double()
    product = scale * (a.t() @ b)
    terms = abs(scale) * (a.abs().t() @ b.abs())
    old = beta * before.double() if beta != 0 else torch.zeros_like(before, dtype=torch.float64)
    exact = product + old
    half = (torch.finfo(wide).eps if unit is None else unit) / 2
    count = left.shape[0]
    allowed = (2 * count + 3) * half * terms + (count + 3) * half * (old.abs() + terms)
    eps = torch.finfo(before.dtype).eps
    smallest = torch.finfo(before.dtype).smallest_normal * eps
    allowed = allowed + eps / 2 * (exact.abs() + terms + allowed) + smallest
    error = (result.double() - exact).abs()
    worst = (error - allowed).max().item() if error.numel() else 0.0
    assert not error.isnan().any()
    assert worst <= 0.0, f"{left.dtype} into {before.dtype}: {worst} too far"
