"""The loops on several ranks of suites/data_parallel.py. An instance is one rank."""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .loops import F32, HookSums, Loop, LoopVariant, MicroBatch, MixedAdd, Task, Wrapped


class StockDDP(Loop):
    """DistributedDataParallel, which synchronizes only in the last micro-batch of a window."""

    views = False

    def build(self, task: Task) -> nn.Module:
        return DistributedDataParallel(task.model(), gradient_as_bucket_view=self.views)

    def micro_batch(self, micro_batch: MicroBatch, is_last: bool) -> Tensor:
        with contextlib.nullcontext() if is_last else self.model.no_sync():
            return super().micro_batch(micro_batch, is_last)


class ViewsDDP(StockDDP):
    views = True


class SumsByHand(MixedAdd):
    """bfloat16 parameters with float32 sums in one block of memory.

    A hook adds each gradient by a mixed `add_`, and one `all_reduce` after the last backward adds the ranks'.
    """

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
    def build(self, task: Task) -> nn.Module:
        return DistributedDataParallel(task.model())

    def options(self) -> dict[str, Any]:
        return {**super().options(), "data_parallel": self.model}


class InsideDDP(WrappedDDP):
    """fusedacc with `model=`."""

    def options(self) -> dict[str, Any]:
        return {**super().options(), "model": self.model.module}


PLAIN, MODEL = LoopVariant("fusedacc", WrappedDDP), LoopVariant("fusedacc, model=", InsideDDP)
STOCK = LoopVariant("stock DDP, no_sync", StockDDP, competes=True)
VIEWS = LoopVariant("stock DDP, no_sync, gradient_as_bucket_view", ViewsDDP, competes=True)
BY_HAND = LoopVariant("stock, float32 sums by hand", SumsByHand, competes=True)
#: By dtype of the parameters.
VARIANTS = {"float32": (STOCK, VIEWS, PLAIN, MODEL), "bfloat16": (BY_HAND, PLAIN, MODEL)}
