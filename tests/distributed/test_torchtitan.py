"""A trainer with torchtitan's structure, changed as docs/integrations/torchtitan.md describes."""

import copy
from typing import Any

import pages
import pytest
import torch
import torch.distributed as dist
from pipelines_setting import ALL_STAGES, CHUNKS, data, loss_of, mine_of, parts, scheduled
from ranks import mesh_of, on_ranks
from ranks_setting import assert_close
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


class OptimizersContainer:
    """One optimizer for each part of the model."""

    def __init__(self, model_parts: list[nn.Module]) -> None:
        self.model_parts = model_parts
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(part.parameters(), lr=1e-2) for part in model_parts
        ]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        pairs = zip(self.model_parts, self.optimizers, strict=True)
        found = [get_optimizer_state_dict(part, each, options=OPTIONS) for part, each in pairs]
        return {name: value for each in found for name, value in each.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part, optimizer in zip(self.model_parts, self.optimizers, strict=True):
            set_optimizer_state_dict(part, optimizer, optim_state_dict=state, options=OPTIONS)


class ParallelDims:
    def __init__(self, sharded: bool) -> None:
        self.pp_enabled = True
        self.mesh = mesh_of((2, 2) if sharded else (2,), ("pp", "dp")[: 1 + sharded])


class Trainer:
    """A pipeline with `gradient_accumulation_steps` passes per update.

    Args:
        kind: the kind of schedule.
        sharded: whether FSDP2 shards the stages.
        wrapped: whether to include the lines from the page.
    """

    gradient_accumulation_steps = 2
    max_norm = 0.05

    def __init__(self, kind: str, sharded: bool, wrapped: bool) -> None:
        self.parallel_dims = ParallelDims(sharded)
        self.pp_group = self.parallel_dims.mesh["pp"].get_group() if sharded else dist.group.WORLD
        self.replica = self.parallel_dims.mesh["dp"].get_local_rank() if sharded else 0
        net = parts(2 * ALL_STAGES[kind])
        self.mine = mine_of(kind, dist.get_rank(self.pp_group), 2)
        self.count = len(net)
        named = nn.ModuleList(net[i] for i in self.mine)
        for part in named if sharded else ():
            fully_shard(part, mesh=self.parallel_dims.mesh["dp"])
        self.model_parts = [nn.ModuleDict({f"stage{i}": net[i]}) for i in self.mine]
        self.pp_schedule = scheduled(
            kind, net, self.mine, group=self.pp_group, loss_fn=self.loss, scale_grads=False
        )
        self.optimizers = OptimizersContainer(self.model_parts)
        if wrapped:
            pages.run("torchtitan", self=self)
        self.lr_schedulers = [
            torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 / (1 + step))
            for each in self.optimizers.optimizers
        ]

    def loss(self, output: Tensor, wanted: Tensor) -> Tensor:
        return loss_of(output, wanted) / (CHUNKS * self.gradient_accumulation_steps)

    def forward_backward_step(self, index: int) -> Tensor:
        x, y = data(index, rank=self.replica)
        has_first, has_last = 0 in self.mine, self.count - 1 in self.mine
        targets, losses = (y, []) if has_last else (None, None)
        self.pp_schedule.step(*([x] if has_first else []), target=targets, losses=losses)
        return torch.stack(losses).sum() if has_last else torch.tensor(-1.0)

    def train_step(self, index: int) -> tuple[Tensor, Tensor]:
        self.optimizers.zero_grad()
        k = self.gradient_accumulation_steps
        losses = [self.forward_backward_step(index * k + number).detach() for number in range(k)]
        norm = self.clip()
        self.optimizers.step()
        for each in self.lr_schedulers:
            each.step()
        return torch.stack(losses).sum(), norm

    def clip(self) -> Tensor:
        params = [p for part in self.model_parts for p in part.parameters()]
        norm = nn.utils.get_total_norm([p.grad for p in params])
        square = (norm.full_tensor() if hasattr(norm, "full_tensor") else norm) ** 2
        dist.all_reduce(square, group=self.pp_group)
        nn.utils.clip_grads_with_norm_(params, self.max_norm, square.sqrt())
        return square.sqrt()


def compare(kind: str, sharded: bool) -> None:
    plain, ours = Trainer(kind, sharded, wrapped=False), Trainer(kind, sharded, wrapped=True)
    for index in range(3):
        wanted, found = plain.train_step(index), ours.train_step(index)
        for a, b in zip(found, wanted, strict=True):
            assert_close(a, b, 1e-5, (kind, index))
        if index == 1:
            state, theirs = ours.optimizers.state_dict(), plain.optimizers.state_dict()
            more = state.keys() - theirs.keys()
            assert theirs.keys() <= state.keys()
            assert all(name.endswith(".fusedacc_counters") for name in more)
            ours.optimizers.load_state_dict(copy.deepcopy(state))
    for mine, stock in zip(ours.model_parts, plain.model_parts, strict=True):
        for p, q in zip(mine.parameters(), stock.parameters(), strict=True):
            local, wanted = (each.to_local() if sharded else each for each in (p, q))
            assert (local - wanted).abs().max() <= 2e-5


@pytest.mark.parametrize("kind", ["Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"])
def test_a_trainer_of_torchtitans_structure(kind):
    on_ranks(2, compare, kind, False)


def test_a_trainer_of_torchtitans_structure_beside_fsdp():
    on_ranks(4, compare, "ScheduleInterleaved1F1B", True)
