"""Compiled models on two ranks: gradients that compiled backwards add are reduced like eager ones."""

from unittest import mock

import memory
import torch
from fsdp_setting import whole
from ranks import on_each_rank
from ranks_setting import train_both, wrap
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fusedacc

WIDTH, K = 8, 2


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
    with mock.patch("fusedacc.nn.compiled.SMALL", 0):
        return wrap(model, K, model=model, **options)


def assert_trains_as_one_process(call: nn.Module, model: nn.Module, optimizer, steps: int = K) -> None:
    twin = blocks()
    train_both(call, optimizer, twin, steps, loss_of, windows=2)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(whole(ours), theirs)


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


@on_each_rank(2)
def test_fsdp2_adds_in_place_while_synchronisation_is_deferred() -> None:
    """Each block is compiled, or the whole model. A deferred backward allocates no gradient of a weight."""
    for in_blocks in (True, False):
        torch.compiler.reset()
        model = blocks()
        for block in model:
            fully_shard(block, reshard_after_forward=False)
            if in_blocks:
                block.compile(backend="aot_eager")
        fully_shard(model, reshard_after_forward=False)
        call = model if in_blocks else torch.compile(model, backend="aot_eager")
        with mock.patch("fusedacc.nn.compiled.SMALL", 0):
            optimizer = wrap(model, 3, model=model)
            assert_trains_as_one_process(call, model, optimizer, 3)
            for index in range(2):  # the first micro-batch of a window allocates the sums
                with optimizer.accumulate(model):
                    loss = loss_of(call, index, 0)
                    largest = memory.largest_allocation(loss.backward)
                optimizer.step()
        assert largest < WIDTH * 2 * WIDTH * 4
