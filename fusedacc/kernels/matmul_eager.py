"""Products into sums in plain torch, on any device: the eager backend of `matmul`."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from . import checks, selftest
from .constants import ProductMethod
from .dtypes import Number, computation_dtype, pair_name

#: Elements of a product that are computed at a time, if torch cannot add in place.
PART_ELEMENTS = 1 << 20


def accumulate_(accumulator: Tensor, left: Tensor, right: Tensor, scale: Number, beta: Number) -> None:
    """Multiply in place if torch can, else in parts."""
    if left.shape[0] == 0:
        multiply_by_beta(accumulator, beta)
        return
    wide = computation_dtype(accumulator.dtype)
    with torch.no_grad():
        if accumulator.dtype == wide and not isinstance(scale, Tensor) and not isinstance(beta, Tensor):
            if left.dtype == wide:
                accumulator.addmm_(left.t(), right, beta=beta, alpha=scale)
                return
            if _widens("addmm", accumulator, left):
                torch.addmm(
                    accumulator, left.t(), right, out_dtype=wide, beta=beta, alpha=scale, out=accumulator
                )
                return
        # Parts of the product in the computation's dtype; each is added, then dropped.
        widens = left.dtype != wide and _widens("mm", accumulator, left)
        if not widens:
            right = right.to(wide)
        step = max(1, PART_ELEMENTS // max(1, accumulator.shape[1]))
        for start in range(0, accumulator.shape[0], step):
            part = accumulator[start : start + step]
            columns = left[:, start : start + step].t()
            product = torch.empty(columns.shape[0], right.shape[1], dtype=wide, device=accumulator.device)
            # Autocast does not change calls with out=.
            if widens:
                torch.mm(columns, right, out_dtype=wide, out=product)
            else:
                torch.mm(columns.to(wide), right, out=product)
            _add(part, product, scale, beta)
            part.copy_(product)


def native_method(device: torch.device, accumulator: torch.dtype, operand: torch.dtype) -> ProductMethod:
    """Return which of torch's calls native code may make on a GPU instead of `accumulate_`."""
    wide = computation_dtype(accumulator)
    if device.type != "cuda" or accumulator != wide:
        return ProductMethod.PYTHON
    if operand == wide:
        return ProductMethod.BLAS
    widens = operand.itemsize == 2 and _widens_on("addmm", device, operand) and passes(device, operand)
    return ProductMethod.WIDENING_BLAS if widens else ProductMethod.PYTHON


def _add(part: Tensor, product: Tensor, scale: Number, beta: Number) -> None:
    """product <- beta * part + scale * product."""
    product.mul_(scale.to(product.dtype) if isinstance(scale, Tensor) else scale)
    if isinstance(beta, Tensor):
        old = part.to(product.dtype) * beta
        product.add_(old.masked_fill_(beta == 0, 0))
    elif beta != 0:
        product.add_(part, alpha=beta)


def multiply_by_beta(accumulator: Tensor, beta: Number) -> None:
    """accumulator <- beta * accumulator, or zeros if beta is 0: what remains to do without tokens."""
    with torch.no_grad():
        if isinstance(beta, Tensor):
            accumulator.mul_(beta).masked_fill_(beta == 0, 0)
        elif beta == 0:
            accumulator.zero_()
        elif beta != 1:
            accumulator.mul_(beta)


def _widens(name: str, accumulator: Tensor, operand: Tensor) -> bool:
    """Return whether torch has `name` from 16-bit operands into float32 on the accumulator's device."""
    if not checks.is_plain(accumulator) or accumulator.device.type != "cuda" or operand.itemsize != 2:
        return False
    return _widens_on(name, accumulator.device, operand.dtype) and passes(accumulator.device, operand.dtype)


#: Name under which torch's products of 16-bit operands into a float32 sum fail a self-test.
WIDENING = "torch's product into a float32 sum"


def passes(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the self-test of 16-bit operands into a float32 sum has passed, or is deferred.

    If it fails, the operands are cast to float32.
    """
    return selftest.now_or_deferred(_passes, _has_not_failed, device, dtype)


def _has_not_failed(device: torch.device, dtype: torch.dtype) -> bool:
    return selftest.failure(WIDENING, device) is None


@selftest.remembered
def _passes(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type not in selftest.DEVICE_TYPES or dtype.itemsize != 2:
        return True
    check = functools.partial(selftest.checks().product, accumulate_, device, dtype, torch.float32)
    passed = selftest.problem_of(WIDENING, pair_name(dtype, torch.float32), device, check) is None
    selftest.warn_once(WIDENING, device, "A product of operands that are cast to float32")
    return passed


@functools.cache
def _widens_on(name: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Found by trying: some releases have the overload but refuse a float32 sum."""
    one = torch.ones(1, 1, dtype=dtype, device=device)
    total = torch.zeros(1, 1, device=device)
    try:
        if name == "addmm":
            torch.addmm(total, one, one, out_dtype=torch.float32, out=total)
        else:
            torch.mm(one, one, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return True
