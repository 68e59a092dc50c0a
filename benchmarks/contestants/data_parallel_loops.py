"""The loops on several ranks that suites/data_parallel.py compares: one rank of each."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .loops import F32, HookSums, Loop, MicroBatch, MixedAdd, Task, Wrapped


class StockDDP(Loop):
    """DistributedDataParallel, which synchronizes in the window's last micro-batch alone."""

    def __init__(self, task: Task, **options: Any) -> None:
        self.ddp_options = options
        super().__init__(task)

    def build(self, task: Task) -> nn.Module:
        return DistributedDataParallel(task.model(), **self.ddp_options)

    def micro_batch(self, micro_batch: MicroBatch, is_last: bool) -> Tensor:
        with contextlib.nullcontext() if is_last else self.model.no_sync():
            return super().micro_batch(micro_batch, is_last)


class SumsByHand(MixedAdd):
    """bfloat16 parameters, float32 sums in one piece of memory: a hook adds each gradient by a mixed `add_`,
    and one `all_reduce` after the last backward adds up the ranks'."""

    def prepare(self) -> None:
        sizes = [parameter.numel() for parameter in self.parameters]
        self.memory = torch.empty(sum(sizes), dtype=F32)
        parts = zip(self.memory.split(sizes), self.parameters, strict=True)
        self.accumulators = [part.view_as(parameter) for part, parameter in parts]
        for parameter in self.parameters:
            dist.broadcast(parameter.detach(), 0)
        self.hook_sums = HookSums(self.parameters, self.accumulators)

    def micro_batch(self, micro_batch: MicroBatch, is_last: bool) -> Tensor:
        loss = self.task.loss(self.model, *micro_batch)
        (loss / (self.task.steps * dist.get_world_size())).backward()
        return loss

    def cast(self) -> None:
        dist.all_reduce(self.memory)
        super().cast()


class WrappedDDP(Wrapped):
    """fusedacc. `inside`: Linear and Embedding layers add to the sums inside their backward."""

    def __init__(self, task: Task, inside: bool = False) -> None:
        self.inside = inside
        super().__init__(task)

    def build(self, task: Task) -> nn.Module:
        return DistributedDataParallel(task.model())

    def options(self) -> dict[str, Any]:
        model = self.model.module if self.inside else None
        return {**super().options(), "model": model, "data_parallel": self.model}


@dataclasses.dataclass(frozen=True)
class RankVariant:
    """`kind`: a loop's class; `options`: its own. `competes`: fusedacc's time is held against it."""

    name: str
    kind: type[Loop]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    competes: bool = False

    def make(self, task: Task) -> Loop:
        return self.kind(task, **self.options)


PLAIN = RankVariant("fusedacc", WrappedDDP)
MODEL = RankVariant("fusedacc, model=", WrappedDDP, {"inside": True})
STOCK = RankVariant("stock DDP, no_sync", StockDDP, competes=True)
VIEWS = RankVariant(
    "stock DDP, no_sync, gradient_as_bucket_view", StockDDP, {"gradient_as_bucket_view": True}, True
)
BY_HAND = RankVariant("stock, float32 sums by hand", SumsByHand, competes=True)
#: By dtype of the parameters.
VARIANTS = {"float32": (STOCK, VIEWS, PLAIN, MODEL), "bfloat16": (BY_HAND, PLAIN, MODEL)}
