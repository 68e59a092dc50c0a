"""Bytes moved per parameter and micro-batch, by part, computed from what each loop reads and writes.

This is arithmetic on dtypes, not a measurement. Each pass reads and writes every element; caches do not
count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..kernels.dtypes import is_deferrable

LOOPS = {
    "stock": "autograd adds into .grad, after a cast where the dtypes differ (grad_dtype, autocast)",
    "by_hand": "acc += grad.to(acc.dtype) * scale",
    "mixed_add": "acc.add_(grad, alpha=scale) in a hook, one call per parameter",
    "fusedacc": "one pass: read the gradient, read and write the sum",
    "gemm": "the weight-gradient product reads and writes the sum; the gradient is never written",
}


@dataclass(frozen=True)
class Part:
    """One pass over the parameter: bytes read and written per element; averages may be fractions."""

    name: str
    read: float
    write: float

    @property
    def bytes(self) -> float:
        """Bytes read and written per element."""
        return self.read + self.write


def total(parts: Sequence[Part]) -> float:
    """Return the bytes per element of all parts."""
    return sum(part.bytes for part in parts)


def bytes_per_micro_batch(
    param_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    accumulate_dtype: torch.dtype,
    *,
    loop: str = "fusedacc",
    scale_is_one: bool = False,
    first: bool = False,
    visible: bool = False,
    scale: float | None = None,
    rounding: str = "nearest",
) -> tuple[Part, ...]:
    """Return what one micro-batch reads and writes per element of one parameter.

    The write of the weight gradient by the backward counts too.

    Args:
        param_dtype: dtype of the parameter, in which its gradient reaches autograd's accumulation.
        grad_dtype: dtype in which the backward's matrix product writes the gradient. Under autocast it
            differs from `param_dtype`, and autograd casts the gradient.
        accumulate_dtype: dtype of the sum.
        loop: one of `LOOPS`.
        scale_is_one: whether the pass multiplies by 1. Stock loops scale the loss, which moves no bytes; the
            wrapper's "mean" with a fixed k scales by 1/k.
        first: whether this is the window's first micro-batch, which has no sum to read.
        visible: whether p.grad is the sum between micro-batches (a manual loop). The wrapper must then scale
            a first gradient that becomes the sum at once; otherwise the next addition scales it, unless a
            16-bit sum would round differently.
        scale: the factor of the pass, if it is known. A multiplication of bfloat16 by a power of two rounds
            nothing.
        rounding: "nearest" or "stochastic". The scaling of a stochastically rounded sum is always left to the
            next addition.

    Raises:
        ValueError: `loop` is unknown.
    """
    if loop not in LOOPS:
        raise ValueError(f"loop must be one of {', '.join(LOOPS)}; got {loop!r}")
    grad = grad_dtype.itemsize
    param = param_dtype.itemsize
    acc = accumulate_dtype.itemsize
    if loop == "gemm":
        return (Part("weight-gradient product", 0 if first else acc, acc),)
    same_dtype = param_dtype == accumulate_dtype
    deferrable = rounding == "stochastic" or is_deferrable(
        1 / 3 if scale is None else scale, accumulate_dtype
    )
    deferred = deferrable and not visible
    parts = [Part("weight-gradient write", 0, grad)]
    if grad_dtype != param_dtype:
        parts.append(Part("cast", grad, param))

    if loop == "fusedacc":
        if not first:
            parts.append(Part("add", param + acc, acc))
        elif not same_dtype:
            parts.append(Part("first write", param, acc))
        elif not scale_is_one and not deferred:
            parts.append(Part("first scale", acc, acc))
    elif loop == "mixed_add":
        if first:
            parts.append(Part("zero", 0, acc))
        parts.append(Part("add", param + acc, acc))
    else:
        if not same_dtype:
            parts.append(Part("cast", param, acc))
        if loop == "by_hand" and not scale_is_one:
            parts.append(Part("scale", acc, acc))
        if not first:
            parts.append(Part("add", acc + acc, acc))
    return tuple(parts)


def bytes_per_window(
    param_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    accumulate_dtype: torch.dtype,
    steps: int,
    *,
    loop: str = "fusedacc",
    scale_is_one: bool = False,
    rounding: str = "nearest",
) -> tuple[Part, ...]:
    """Return `bytes_per_micro_batch` averaged over a window of `steps` micro-batches.

    Parts with the same name are merged.

    Raises:
        ValueError: `steps` is below 1, or `loop` is unknown.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1; got {steps}")
    merged: dict[str, Part] = {}
    for first, times in ((True, 1), (False, steps - 1)):
        parts = bytes_per_micro_batch(
            param_dtype,
            grad_dtype,
            accumulate_dtype,
            loop=loop,
            scale_is_one=scale_is_one,
            first=first,
            scale=1 / steps,
            rounding=rounding,
        )
        for part in parts:
            share = times / steps
            old = merged.get(part.name, Part(part.name, 0, 0))
            merged[part.name] = Part(part.name, old.read + share * part.read, old.write + share * part.write)
    return tuple(part for part in merged.values() if part.bytes)
