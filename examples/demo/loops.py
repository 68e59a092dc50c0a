"""The stock accumulation loop and the wrapped ones, side by side: this is all that differs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fusedacc

from .model import CONTEXT, MICRO_BATCH_SIZE, ByteTransformer

DTYPES = ("float32", "bfloat16", "autocast")
Batches = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Config:
    """`dtype`: of the parameters (the sum is float32 in every case), or "autocast": float32 parameters and
    bfloat16 products. `device`: where to train. `steps`: micro-batches per update, each of
    `micro_batch_size` sequences of `context` bytes. `width`, `layers`, `heads`: of the model."""

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

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        dtype = torch.bfloat16 if self.dtype == "bfloat16" else torch.float32
        with self.device:
            return ByteTransformer(self.width, self.layers, self.heads, self.context).to(dtype)

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        autocast = torch.autocast(self.device.type, torch.bfloat16)
        with autocast if self.dtype == "autocast" else contextlib.nullcontext():
            logits = model(inputs)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class StockLoop:
    """Plain PyTorch. With bfloat16 parameters the sum is kept in float32 by `grad_dtype` and cast at the
    update, because no torch optimizer takes float32 gradients with bfloat16 parameters."""

    name = "stock"

    def __init__(self, config: Config) -> None:
        self.config, self.model = config, config.model()
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3)
        self.mixed = config.dtype == "bfloat16"
        self._sum_in(torch.float32)

    def update(self, batches: Batches) -> float:
        """One update from `config.steps` micro-batches; returns the mean loss."""
        total = 0.0
        for inputs, targets in batches:
            loss = self.config.loss(self.model, inputs, targets)
            (loss / len(batches)).backward()
            total += loss.item()
        self._sum_in(torch.bfloat16)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._sum_in(torch.float32)
        return total / len(batches)

    def _sum_in(self, dtype: torch.dtype) -> None:
        """Casts `.grad` of bfloat16 parameters, and makes autograd keep it in `dtype` from here on."""
        for parameter in self.parameters if self.mixed else ():
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = dtype
            parameter.grad = None if gradient is None else gradient.to(dtype)


class WrappedLoop:
    """The same training with `fusedacc`: the loss is not divided, `step()` is called after every backward."""

    name = "fusedacc"

    def __init__(self, config: Config) -> None:
        self.config, self.model = config, config.model()
        self.parameters = list(self.model.parameters())
        self.optimizer = fusedacc.AccumulatingOptimizer(
            torch.optim.AdamW(self.parameters, lr=1e-3),
            gradient_accumulation_steps=config.steps,
            backend=config.backend,
            **self.options(),
        )

    def options(self) -> dict[str, Any]:
        """More options of the wrapper."""
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
    """The same, and Linear and Embedding layers add to the sums inside their backward: their gradients never
    exist. A product that is added to its sum is rounded once less, so losses agree up to rounding."""

    name = "fusedacc, model="

    def options(self) -> dict[str, Any]:
        return {"model": self.model}


LOOPS = (StockLoop, WrappedLoop, ModelLoop)
