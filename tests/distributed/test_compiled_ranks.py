"""Compiled models on two ranks: gradients that compiled backwards add are reduced like eager ones."""

from unittest import mock

import torch
from ranks import on_each_rank
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fusedacc
from fusedacc.optimizer import parameters

WIDTH, K, UPDATES = 8, 2, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def loss_of(model: nn.Module, index: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2 * index + rank)
    return model(torch.randn(3, WIDTH, generator=generator)).square().mean()


def wrapped(model: nn.Module, **options) -> fusedacc.AccumulatingOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with (
        mock.patch.object(parameters, "why_left", return_value=""),
        mock.patch("fusedacc.nn.compiled.SMALL", 0),
    ):
        return fusedacc.AccumulatingOptimizer(inner, K, model=model, **options)


def assert_trains_as_one_process(call: nn.Module, model: nn.Module, optimizer) -> None:
    twin, rank = blocks(), torch.distributed.get_rank()
    stock = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for index in range(K * UPDATES):
        loss_of(call, index, rank).backward()
        optimizer.step(), optimizer.zero_grad()
        for each in (0, 1):
            (loss_of(twin, index, each) / (2 * K)).backward()
        if index % K == K - 1:
            stock.step(), stock.zero_grad()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        whole = ours.full_tensor() if isinstance(ours, DTensor) else ours
        torch.testing.assert_close(whole, theirs)


@on_each_rank(2)
def test_ddp() -> None:
    torch.compiler.reset()
    model = blocks()
    ddp = DistributedDataParallel(model)
    optimizer = wrapped(model, data_parallel=ddp)
    assert_trains_as_one_process(torch.compile(ddp, backend="aot_eager"), model, optimizer)
    assert [slot.compiled for slot in optimizer._slots] == [True, False] * 4


@on_each_rank(2)
def test_fsdp2_takes_pytorchs_gradients() -> None:
    torch.compiler.reset()
    model = blocks()
    for block in model:
        fully_shard(block)
        block.compile(backend="aot_eager")
    optimizer = wrapped(fully_shard(model))
    assert_trains_as_one_process(model, model, optimizer)
    assert not any(slot.compiled for slot in optimizer._slots)
    assert "fsdp2" in optimizer.explain()
