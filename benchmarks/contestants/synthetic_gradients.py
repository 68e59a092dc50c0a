"""Gradients for a model's parameters without a forward pass, and the memory that ways of a window share.

Every parameter hangs on a node whose backward makes its gradient by one write (`torch.full` in the dtype that
the weight-gradient product would write): exactly the bytes of that product's output. The nodes form a chain,
so the backward delivers gradients one after the other, last parameter first. On CUDA a node serves a group of
consecutive parameters of up to 32 MiB, so that it is not Python that is timed. A gradient's value depends on
the parameter and the micro-batch, so sums can be checked. Division of the loss by the number of micro-batches
reaches the values through the host (`Source.scale`), which saves a wait for the device.

Settings: "float32": weights and gradients in float32. "autocast": float32 weights, whose bfloat16 casts get
the gradients, so that autograd casts these back. "bfloat16": bfloat16 weights, gradients and Adam states,
float32 sums, cast at the update.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

F32, BF16 = torch.float32, torch.bfloat16
SETTINGS = ("float32", "autocast", "bfloat16")
#: The column `dtypes` of a setting.
DTYPES = {
    "float32": "float32 into float32",
    "autocast": "autocast bfloat16 into float32",
    "bfloat16": "bfloat16 into float32",
}
GROUP_BYTES = 32 * 2**20


class Source:
    """Gradients for parameters: `loss()` is a scalar whose backward hands every parameter one.

    `scale` multiplies the gradients, `drop` makes them and hands over nothing.
    """

    def __init__(self, parameters: list[nn.Parameter], dtype: torch.dtype, group_bytes: int) -> None:
        self.dtype = dtype
        self.cast = parameters[0].dtype != dtype
        self.scale, self.drop, self.micro_batches = 1.0, False, 0
        self.phase: Callable[[str], contextlib.AbstractContextManager] | None = None
        self.start = torch.zeros((), device=parameters[0].device)
        self.groups: list[dict[int, nn.Parameter]] = []
        filled = math.inf
        for index, parameter in enumerate(parameters):
            size = parameter.numel() * dtype.itemsize
            if filled + size > group_bytes:
                self.groups.append({})
                filled = 0
            self.groups[-1][index] = parameter
            filled += size

    def loss(self) -> Tensor:
        self.micro_batches += 1
        chain = self.start
        for group in self.groups:
            used = [parameter.to(self.dtype) for parameter in group.values()] if self.cast else group.values()
            chain = _Node.apply(chain, self, group, *used)
        return chain

    def gradients(self, group: dict[int, nn.Parameter]) -> list[Tensor]:
        if self.phase is None:
            return [self.gradient(index, parameter) for index, parameter in group.items()]
        with self.phase("weight gradients"):
            return [self.gradient(index, parameter) for index, parameter in group.items()]

    def value(self, index: int) -> float:
        """Of every element of a parameter's gradient in this micro-batch."""
        # 1/128 times at most 19: exact in bfloat16, and never 0.
        return ((3 * index + 5 * self.micro_batches) % 17 - 7.5) / 64 * self.scale

    def gradient(self, index: int, parameter: nn.Parameter) -> Tensor:
        return torch.full(parameter.shape, self.value(index), dtype=self.dtype, device=parameter.device)


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chain: Tensor, source: Source, group: dict, *parameters: Tensor) -> Tensor:
        ctx.source, ctx.group = source, group
        return chain.view_as(chain)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.source.gradients(ctx.group)
        return grad, None, None, *([None] * len(gradients) if ctx.source.drop else gradients)


class Memory:
    """Weights, Adam's two states and float32 sums, made once, that several ways use in turn.

    What the sums hold at the beginning of a window is another way's.
    """

    def __init__(self, shapes: list[tuple[int, ...]], setting: str, device: torch.device | str) -> None:
        if setting not in SETTINGS:
            raise ValueError(f"unknown setting {setting!r}; allowed: {', '.join(SETTINGS)}")
        self.setting = setting
        dtype = BF16 if setting == "bfloat16" else F32
        # Weights of different values, so that weight decay is not the same everywhere.
        self.weights = [
            torch.full(shape, 0.01 * (index % 7 - 3), dtype=dtype, device=device)
            for index, shape in enumerate(shapes)
        ]
        self._moments: list[tuple[Tensor, Tensor]] = []
        self._sums: list[Tensor] = []

    def moments(self) -> list[tuple[Tensor, Tensor]]:
        if not self._moments:
            self._moments = [(torch.zeros_like(w), torch.zeros_like(w)) for w in self.weights]
        return self._moments

    def sums(self) -> list[Tensor]:
        if not self._sums:
            self._sums = [torch.zeros_like(w, dtype=F32) for w in self.weights]
        return self._sums
