"""Chooses whether `model=` replaces a small Linear, whose host overhead may exceed what it saves."""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping

import torch
from torch.optim import Optimizer

from ..accumulators import default_accumulate_dtype
from ..kernels import matmul, tuning
from ..kernels.choices import Choice

#: The most weights of each size class. Larger layers are always replaced.
CLASSES = (32 * 32, 64 * 64, 128 * 128)
INSIDE, STOCK = "inside", "stock"
#: `AccumulatingOptimizer`. It is passed as an argument, because its file imports this one.
Wrap = Callable[..., Optimizer]
#: Layers and tokens of a trial, and the micro-batches of a window that never ends.
_LAYERS, _TOKENS, _ENDLESS = 6, 4, 2**20


def question_of(weight: torch.Tensor, wrap: Wrap) -> Choice | None:
    """Return the choice for a Linear with this weight; None if it is large or not on a CPU."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    most = next((size for size in CLASSES if weight.numel() <= size), None)
    return None if most is None else _choice(most, weight.dtype, wrap)


@functools.cache
def _choice(most: int, dtype: torch.dtype, wrap: Wrap) -> Choice:
    # No CPU feature predicts the result. Without a trial, `model=` replaces the layer.
    def trial() -> dict[str, Callable[[], object]]:
        return {way: _training(wrap, round(most**0.5), dtype, way == INSIDE) for way in (INSIDE, STOCK)}

    name = f"model= for a Linear of up to {most} weights of {str(dtype)[6:]}"
    return Choice(name, (INSIDE, STOCK), INSIDE, trial)


def questions(wrap: Wrap) -> list[Choice]:
    return [_choice(most, dtype, wrap) for most in CLASSES for dtype in (torch.float32, torch.bfloat16)]


def why_left(wrap: Wrap, weight: torch.Tensor, kept: MutableMapping[str, str]) -> str | None:
    """Return why a Linear with this weight is left to PyTorch, or None if it is replaced; `kept` as for
    `tuning.choose`.
    """
    choice = question_of(weight, wrap)
    if choice is None:
        return None
    product = matmul.choice_of(default_accumulate_dtype(weight), weight.dtype, 0)
    if product is not None:
        tuning.choose(product)  # the trial below uses this product
    decision = tuning.choose(choice, kept)
    if decision.candidate == INSIDE:
        return None
    return f"left to PyTorch, because fusedacc's overhead exceeds the saving for so few weights; {decision}"


def _training(wrap: Wrap, width: int, dtype: torch.dtype, inside: bool) -> Callable[[], object]:
    """Return a function that runs one micro-batch of a few layers in a window that never ends."""
    layers = (torch.nn.Linear(width, width, device="meta", dtype=dtype) for _ in range(_LAYERS))
    model = torch.nn.Sequential(*layers).to_empty(device="cpu")  # draws no random numbers
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 1 / width)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = wrap(inner, _ENDLESS, model=model if inside else None)
    x = torch.ones(_TOKENS, width, device="cpu", dtype=dtype)
    gradient = torch.ones_like(x)

    def micro_batch() -> None:
        with torch.enable_grad():
            model(x).backward(gradient)
            optimizer.step()

    return micro_batch
