"""The training loops that the demo compares: with plain PyTorch, with fusedacc, and with `model=`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fusedacc

from .model import CONTEXT, MICRO_BATCH_SIZE, Transformer

DTYPES = ("float32", "bfloat16", "autocast")
Batches = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Config:
    """The settings of a loop: `steps` micro-batches per update, of sequences of `context` bytes or words.

    dtype: the parameters' dtype, or "autocast" for float32 parameters and bfloat16 products. The accumulated
    gradients are always float32. seed: for the parameters and the micro-batches.
    """

    dtype: str
    device: torch.device
    steps: int = 8
    backend: str = "auto"
    seed: int = 0
    width: int = 256
    layers: int = 3
    heads: int = 4
    context: int = CONTEXT
    micro_batch_size: int = MICRO_BATCH_SIZE
    vocabulary: int = 256

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        dtype = torch.bfloat16 if self.dtype == "bfloat16" else torch.float32
        with self.device:
            model = Transformer(self.width, self.layers, self.heads, self.context, self.vocabulary)
            return model.to(dtype)

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == "autocast"):
            logits = model(inputs)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class MixedSum:
    """Accumulates the gradients of one bfloat16 parameter in float32, in a post-accumulate-grad hook."""

    def __init__(self, parameter: Tensor) -> None:
        self.sum, self.is_empty = torch.empty_like(parameter, dtype=torch.float32), True
        parameter.register_post_accumulate_grad_hook(self.add)

    @torch.no_grad()
    def add(self, parameter: Tensor) -> None:
        if self.is_empty:  # avoids a pass that sets the sum to zero
            self.sum.copy_(parameter.grad)
        else:
            self.sum.add_(parameter.grad)
        self.is_empty, parameter.grad = False, None

    def take(self) -> Tensor:
        """Return the sum in bfloat16. The next gradient starts a new sum."""
        self.is_empty = True
        return self.sum.to(torch.bfloat16)


class StockLoop:
    """The best loop with plain PyTorch.

    It uses the fused AdamW and accumulates gradients in `.grad`. For bfloat16 parameters a hook accumulates
    them in float32. The update casts that sum to bfloat16, because PyTorch's optimizers do not accept float32
    gradients for bfloat16 parameters.
    """

    name = "stock"

    def __init__(self, config: Config) -> None:
        self.config, self.model = config, config.model()
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3, fused=True)
        mixed = self.parameters if config.dtype == "bfloat16" else []
        self.sums = [(parameter, MixedSum(parameter)) for parameter in mixed]

    def update(self, batches: Batches) -> float:
        """One update from `config.steps` micro-batches; returns the mean loss."""
        total = 0.0
        for inputs, targets in batches:
            loss = self.config.loss(self.model, inputs, targets)
            (loss / len(batches)).backward()
            total += loss.item()
        for parameter, gradients in self.sums:
            parameter.grad = gradients.take()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total / len(batches)


class WrappedLoop:
    """The same training with fusedacc: do not divide the loss, and call `step()` after every backward."""

    name = "fusedacc"

    def __init__(self, config: Config) -> None:
        self.config, self.model = config, config.model()
        self.parameters = list(self.model.parameters())
        self.optimizer = fusedacc.AccumulatingOptimizer(
            torch.optim.AdamW(self.parameters, lr=1e-3, fused=True),
            gradient_accumulation_steps=config.steps,
            backend=config.backend,
            **self.options(),
        )

    def options(self) -> dict[str, Any]:
        """Return additional options for the wrapper."""
        return {}

    def update(self, batches: Batches) -> float:
        """One update from `config.steps` micro-batches; returns the mean loss."""
        total = 0.0
        for inputs, targets in batches:
            loss = self.config.loss(self.model, inputs, targets)
            loss.backward()
            total += loss.item()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return total / len(batches)


class ModelLoop(WrappedLoop):
    """The same training with `model=`.

    The backward of Linear and Embedding layers adds directly to the accumulated gradients, and allocates no
    gradients. This saves one rounding per product, so the losses agree up to rounding.
    """

    name = "fusedacc, model="

    def options(self) -> dict[str, Any]:
        return {"model": self.model}


LOOPS = (StockLoop, WrappedLoop, ModelLoop)
