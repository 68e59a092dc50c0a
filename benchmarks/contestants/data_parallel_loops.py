"""The ways to train on several ranks that suites/data_parallel.py compares: one rank of each."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import fusedacc
from examples.demo.loops import Batches, Config

F32, BF16 = torch.float32, torch.bfloat16


class StockDDP:
    """DistributedDataParallel, which synchronises in the window's last micro-batch alone.

    Args:
        options: DistributedDataParallel's.
    """

    def __init__(self, config: Config, **options: Any) -> None:
        self.config, self.model = config, config.model()
        self.parallel = DistributedDataParallel(self.model, **options)
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def update(self, batches: Batches) -> float:
        """One update; returns this rank's mean loss."""
        total = 0.0
        for index, (inputs, targets) in enumerate(batches, 1):
            with contextlib.nullcontext() if index == len(batches) else self.parallel.no_sync():
                loss = self.config.loss(self.parallel, inputs, targets)
                (loss / len(batches)).backward()
            total += loss.item()
        self.inner.step()
        self.inner.zero_grad()
        return total / len(batches)


class SumsByHand:
    """bfloat16 parameters, float32 sums in one piece of memory: a hook adds each gradient by a mixed `add_`,
    and one `all_reduce` after the last backward adds up the ranks'."""

    def __init__(self, config: Config) -> None:
        self.config, self.model = config, config.model()
        self.parameters = list(self.model.parameters())
        self.inner = torch.optim.AdamW(self.parameters, lr=1e-3, fused=True)
        sizes = [parameter.numel() for parameter in self.parameters]
        self.memory = torch.empty(sum(sizes), dtype=F32)
        self.sums = dict(zip(self.parameters, self.memory.split(sizes), strict=True))
        self.begun: set[Tensor] = set()
        for parameter in self.parameters:
            dist.broadcast(parameter.detach(), 0)
            parameter.register_post_accumulate_grad_hook(self._add)

    @torch.no_grad()
    def _add(self, parameter: Tensor) -> None:
        total = self.sums[parameter].view_as(parameter)
        if parameter in self.begun:
            total.add_(parameter.grad)
        else:  # spares a pass that zeroes the sums
            total.copy_(parameter.grad)
            self.begun.add(parameter)
        parameter.grad = None

    def update(self, batches: Batches) -> float:
        """One update; returns this rank's mean loss."""
        total, divisor = 0.0, len(batches) * dist.get_world_size()
        for inputs, targets in batches:
            loss = self.config.loss(self.model, inputs, targets)
            (loss / divisor).backward()
            total += loss.item()
        dist.all_reduce(self.memory)
        for parameter, each in self.sums.items():
            parameter.grad = each.view_as(parameter).to(BF16)
        self.inner.step()
        self.inner.zero_grad()
        self.begun.clear()
        return total / len(batches)


class Wrapped:
    """fusedacc: the loss is not divided, and `step()` is called after every backward.

    Args:
        inside: whether Linear and Embedding layers add to the sums inside their backward.
    """

    def __init__(self, config: Config, inside: bool = False) -> None:
        self.config, self.model = config, config.model()
        self.parallel = DistributedDataParallel(self.model)
        self.optimizer = fusedacc.AccumulatingOptimizer(
            torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True),
            gradient_accumulation_steps=config.steps,
            backend=config.backend,
            model=self.model if inside else None,
            data_parallel=self.parallel,
        )

    def update(self, batches: Batches) -> float:
        """One update; returns this rank's mean loss."""
        total = 0.0
        for inputs, targets in batches:
            loss = self.config.loss(self.parallel, inputs, targets)
            loss.backward()
            total += loss.item()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return total / len(batches)


@dataclasses.dataclass(frozen=True)
class Way:
    """`make`: a loop's class; `options`: its own. `competes`: fusedacc's time is held against it."""

    name: str
    make: Callable[..., StockDDP | SumsByHand | Wrapped]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    competes: bool = False


PLAIN, MODEL = Way("fusedacc", Wrapped), Way("fusedacc, model=", Wrapped, {"inside": True})
STOCK = Way("stock DDP, no_sync", StockDDP, competes=True)
VIEWS = Way("stock DDP, no_sync, gradient_as_bucket_view", StockDDP, {"gradient_as_bucket_view": True}, True)
BY_HAND = Way("stock, float32 sums by hand", SumsByHand, competes=True)
#: By dtype of the parameters.
WAYS = {"float32": (STOCK, VIEWS, PLAIN, MODEL), "bfloat16": (BY_HAND, PLAIN, MODEL)}
