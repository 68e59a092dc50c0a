# mypy: disable-error-code="no-untyped-def"
"""The softmax of slices of a language model's logits: the twin of `csrc/common/softmax.h`.

Gradients have the bits of the native passes. A row's sums are added in another order.
"""

# No `from __future__ import annotations`: Triton reads the annotations.
import triton
import triton.language as tl
from torch import Tensor

from .. import launch_events
from ..torch_state import on_device
from .kernels import WARPS, narrow, widen

#: Classes that a program takes in one step: 8 for each thread.
_STEP = 1024
_LEAST = tl.constexpr(-87.0)
_MOST = tl.constexpr(88.0)
_SHIFT = tl.constexpr(12582912.0)


@triton.jit
def exponential(x):
    """e^x in float32, as csrc/common/softmax.h computes it."""
    inside = tl.where(x < _LEAST, _LEAST, x)
    inside = tl.where(inside > _MOST, _MOST, inside)
    shifted = tl.fma(inside, 1.44269504, _SHIFT)
    whole = shifted - _SHIFT
    r = tl.fma(whole, -0.693359375, inside)
    r = tl.fma(whole, 2.12194440e-4, r)
    p = tl.fma(r, 1.9875691500e-4, 1.3981999507e-3)
    p = tl.fma(p, r, 8.3334519073e-3)
    p = tl.fma(p, r, 4.1665795894e-2)
    p = tl.fma(p, r, 1.6666665459e-1)
    p = tl.fma(p, r, 5.0000001201e-1)
    p = tl.fma(p, r * r, r) + 1.0
    power = ((shifted.to(tl.uint32, bitcast=True) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < _LEAST, 0.0, p * power)


@triton.jit(do_not_specialize=["first", "tokens"])
def softmax_statistics(
    numbers,
    logits,
    target,
    class_weights,
    first,
    tokens,
    classes,
    weighs: tl.constexpr,
    step: tl.constexpr,
    smooths: tl.constexpr,
):
    """One token's row of `logits` joins its statistics, `numbers`; as csrc/common/softmax.h has them."""
    token = tl.program_id(0).to(tl.int64)
    own = numbers + token
    row = logits + token * classes
    columns = tl.arange(0, step)
    largest = tl.full((step,), -float("inf"), tl.float32)
    weighted = tl.zeros((step,), tl.float32)
    for start in range(0, classes, step):
        inside = start + columns < classes
        values = widen(tl.load(row + start + columns, mask=inside, other=-float("inf")), tl.float32)
        largest = tl.maximum(largest, values)
        if smooths:
            if weighs:
                values *= tl.load(class_weights + start + columns, mask=inside, other=1.0)
            weighted += tl.where(inside, values, 0.0)
    top = tl.load(own)
    most = tl.maximum(top, tl.max(largest, 0))
    base = tl.where(most == -float("inf"), 0.0, most)  # e^-inf is 0 then, and a nan stays one
    total = tl.zeros((step,), tl.float32)
    for start in range(0, classes, step):
        inside = start + columns < classes
        values = widen(tl.load(row + start + columns, mask=inside, other=-float("inf")), tl.float32)
        total += exponential(values - base)
    place = tl.load(target + token) - first
    if (place >= 0) & (place < classes):
        tl.store(own + 2 * tokens.to(tl.int64), widen(tl.load(row + place), tl.float32))
    if smooths:
        at = own + 3 * tokens.to(tl.int64)
        tl.store(at, tl.load(at) + tl.sum(weighted, 0))
    tl.store(own + tokens, tl.load(own + tokens) * exponential(top - base) + tl.sum(total, 0))
    tl.store(own, most)


@triton.jit(do_not_specialize=["first", "tokens"])
def softmax_gradient(
    logits, numbers, target, class_weights, first, tokens, classes, weighs: tl.constexpr, step: tl.constexpr
):
    """Part of one token's row of `logits` becomes its gradient, by the factors `numbers`."""
    token = tl.program_id(0).to(tl.int64)
    own = numbers + token
    many = tokens.to(tl.int64)
    columns = tl.program_id(1) * step + tl.arange(0, step)
    inside = columns < classes
    at = logits + token * classes + columns
    values = widen(tl.load(at, mask=inside, other=0.0), tl.float32)
    spread = tl.load(own + 3 * many)
    if weighs:
        spread *= tl.load(class_weights + columns, mask=inside, other=0.0)
    gradient = tl.fma(exponential(values - tl.load(own)), tl.load(own + many), -spread)
    is_target = columns == tl.load(target + token) - first
    gradient = tl.where(is_target, gradient - tl.load(own + 2 * many), gradient)
    tl.store(at, narrow(gradient, logits.dtype.element_ty), mask=inside)


def statistics(
    numbers: Tensor, logits: Tensor, target: Tensor, first: int, class_weights: Tensor | None
) -> None:
    """As the operator `softmax_statistics_`."""
    tokens, classes = logits.shape
    if tokens == 0:
        return
    weighs = class_weights is not None
    with on_device(logits.device):
        softmax_statistics[(tokens, 1)](
            numbers,
            logits,
            target,
            class_weights if weighs else numbers,
            first,
            tokens,
            classes,
            weighs=weighs,
            step=_STEP,
            smooths=len(numbers) == 4,
            num_warps=WARPS,
        )
    if launch_events.watching:
        launch_events.launched("triton::softmax_statistics", numbers, logits, target, class_weights)


def gradient(
    logits: Tensor, numbers: Tensor, target: Tensor, first: int, class_weights: Tensor | None
) -> None:
    """As the operator `softmax_gradient_`."""
    tokens, classes = logits.shape
    if tokens == 0:
        return
    weighs = class_weights is not None
    with on_device(logits.device):
        softmax_gradient[(tokens, triton.cdiv(classes, _STEP))](
            logits,
            numbers,
            target,
            class_weights if weighs else numbers,
            first,
            tokens,
            classes,
            weighs=weighs,
            step=_STEP,
            num_warps=WARPS,
        )
    if launch_events.watching:
        launch_events.launched("triton::softmax_gradient", logits, numbers, target, class_weights)
