"""Whether a small Linear gains by `model=`: where its product takes microseconds, the host decides."""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping

import torch
from torch.optim import Optimizer

from ..accumulators import default_accumulate_dtype
from ..kernels import matmul, tuning
from ..kernels.choices import Choice

#: The most weights of each class; larger layers gain, and are not asked about.
CLASSES = (32 * 32, 64 * 64, 128 * 128)
INSIDE, STOCK = "inside", "stock"
#: Makes a wrapper of an optimizer; it is handed in, since the wrapper's file imports this one.
Wrap = Callable[..., Optimizer]
#: Layers in a row and tokens of a trial, and micro-batches of a window that does not end.
_LAYERS, _TOKENS, _ENDLESS = 6, 4, 2**20


def question_of(weight: torch.Tensor, wrap: Wrap) -> Choice | None:
    """The choice whether a Linear of this weight is replaced; None: it is large, or on no CPU."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    most = next((size for size in CLASSES if weight.numel() <= size), None)
    return None if most is None else _choice(most, weight.dtype, wrap)


@functools.cache
def _choice(most: int, dtype: torch.dtype, wrap: Wrap) -> Choice:
    # A processor's features do not tell: without a trial, `model=` replaces the layer.
    def trial() -> dict[str, Callable[[], object]]:
        return {way: _training(wrap, round(most**0.5), dtype, way == INSIDE) for way in (INSIDE, STOCK)}

    name = f"model= for a Linear of up to {most} weights of {str(dtype)[6:]}"
    return Choice(name, (INSIDE, STOCK), INSIDE, trial)


def questions(wrap: Wrap) -> list[Choice]:
    return [_choice(most, dtype, wrap) for most in CLASSES for dtype in (torch.float32, torch.bfloat16)]


def why_left(wrap: Wrap, weight: torch.Tensor, kept: MutableMapping[str, str]) -> str | None:
    """Why a Linear of this weight is better left to stock's node; None where it is replaced.

    `wrap`: `AccumulatingOptimizer`, which a trial trains with. `kept`: as for `tuning.choose`.
    """
    choice = question_of(weight, wrap)
    if choice is None:
        return None
    product = matmul.choice_of(default_accumulate_dtype(weight), weight.dtype, 0)
    if product is not None:
        tuning.choose(product)  # what the trial multiplies by
    decision = tuning.choose(choice, kept)
    if decision.candidate == INSIDE:
        return None
    return f"so small that a node of ours costs more than it saves; {decision}"


def _training(wrap: Wrap, width: int, dtype: torch.dtype, inside: bool) -> Callable[[], object]:
    """One micro-batch of a row of layers, in a window that does not end."""
    layers = (torch.nn.Linear(width, width, device="meta", dtype=dtype) for _ in range(_LAYERS))
    model = torch.nn.Sequential(*layers).to_empty(device="cpu")  # without a word to the generator
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
