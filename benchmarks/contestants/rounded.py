"""Sums of bfloat16 parameters' gradients: in float32, or in bfloat16, to nearest or stochastically."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from examples.demo.measure import batches
from examples.demo.model import micro_batch
from fusedacc.functional import scale_accumulate_

from .loops import BF16, F32, Demo, Loop, LoopVariant, Wrapped

FLOAT32, NEAREST, STOCHASTIC = "float32 sums", "bfloat16 sums, to nearest", "bfloat16 sums, stochastic"
STOCK = "stock, bfloat16 sums"
DTYPES = {FLOAT32: F32, NEAREST: BF16, STOCHASTIC: BF16}
#: Bytes at the end of the text that are not trained on, and how many windows of them the loss is a mean of.
UNSEEN, WINDOWS = 400_000, 512
#: Micro-batches from this number on are in no training.
APART = 10**9


class ToNearest(Wrapped):
    """The wrapper with sums of half the size."""

    def options(self) -> dict[str, Any]:
        return {**super().options(), "accumulate_dtype": BF16}


class Stochastic(ToNearest):
    """The same with stochastic rounding."""

    def options(self) -> dict[str, Any]:
        return {**super().options(), "rounding": "stochastic", "seed": self.task.seed}


VARIANTS = tuple(map(LoopVariant, DTYPES, (Wrapped, ToNearest, Stochastic)))
#: With stock's loop for bfloat16 parameters and sums.
WITH_STOCK = (*VARIANTS, LoopVariant(STOCK, Loop))


def train(variant: LoopVariant, config: Demo, text: Tensor, updates: int) -> Iterator[float]:
    """Yield the loss of each update and, last, that on unseen text."""
    loop = variant.make(config)
    for update in range(updates):
        yield loop.update(batches(text[:-UNSEEN], config, update)).item()
    yield unseen_loss(loop.model, config, text)


@torch.no_grad()
def unseen_loss(model: nn.Module, config: Demo, text: Tensor, size: int = 32) -> float:
    """Return the mean over windows that are the same for every model."""
    losses = []
    for index in range(WINDOWS // size):
        given = micro_batch(text[-UNSEEN:], APART + index, config.device, size, config.context)
        losses.append(config.loss(model, *given).item())
    return sum(losses) / len(losses)


def trained(config: Demo, text: Tensor, updates: int) -> nn.Module:
    """Return a model after so many updates with float32 sums."""
    loop = VARIANTS[0].make(config)
    for update in range(updates):
        loop.update(batches(text[:-UNSEEN], config, update))
    loop.optimizer.close()
    return loop.model


def sums_of(
    model: nn.Module, config: Demo, text: Tensor, counts: Sequence[int]
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Add up the same gradients in each way. Yield each sum as a float64 vector after these micro-batches."""
    parameters = list(model.parameters())
    sums = {name: [torch.zeros_like(each, dtype=d) for each in parameters] for name, d in DTYPES.items()}
    size = (config.micro_batch_size, config.context)
    for index in range(max(counts)):
        given = micro_batch(text[:-UNSEEN], APART + index, config.device, *size)
        gradients = torch.autograd.grad(config.loss(model, *given), parameters)
        for name, own in sums.items():
            how: dict[str, Any] = {"overwrite": index == 0}
            if name == STOCHASTIC:
                how |= {"rounding": "stochastic", "seed": config.seed, "offset": index}
            scale_accumulate_(own, gradients, 1.0, **how)
        if index + 1 in counts:
            found = {name: torch.cat([e.flatten().double() for e in own]) for name, own in sums.items()}
            yield index + 1, found


def additions(count: int, step: float, times: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield so many elements of 1.0 after each addition of `step`, to nearest and stochastically."""
    sums = {name: [torch.ones(count, dtype=BF16)] for name in (NEAREST, STOCHASTIC)}
    added = [torch.full((count,), step, dtype=BF16)]
    for number in range(times):
        scale_accumulate_(sums[NEAREST], added)
        scale_accumulate_(sums[STOCHASTIC], added, rounding="stochastic", seed=seed, offset=number)
        yield {name: own[0] for name, own in sums.items()}
