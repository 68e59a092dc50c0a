"""A GradScaler over ranks with different numbers of micro-batches: one scale, and equal parameters."""

import math

import pytest
import torch
import torch.distributed as dist
from loops import network
from ranks import on_ranks
from ranks_setting import inner_of, small_loss, wrap
from torch import nn

import fusedacc

STEPS, SCALE = 2, 8.0


def loss_of(model: nn.Module, rank: int, index: int, overflow: tuple[int, int] | None) -> torch.Tensor:
    return small_loss(model, index, rank) * (math.inf if (rank, index) == overflow else 1.0)


def scaled(lengths: tuple[int, ...], overflow: tuple[int, int] | None) -> list:
    """Return the updates, the scaler's state after the epoch, and the parameters."""
    model, rank = network(), dist.get_rank()
    optimizer = wrap(model, STEPS, data_parallel=dist.group.WORLD)
    scaler = fusedacc.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)
    for index in range(lengths[rank]):
        scaler.scale(loss_of(model, rank, index, overflow)).backward()
        scaler.step(optimizer), scaler.update(), optimizer.zero_grad()
    scaler.flush(optimizer)
    scaler.update()
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    return [optimizer.num_updates, int(optimizer.num_skipped), scaler.state_dict(), parameters]


def stock(lengths: tuple[int, ...], overflow: tuple[int, int] | None) -> list:
    """Train one process on the data of all ranks, with torch's scaler."""
    model = network()
    optimizer = inner_of(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)
    updates = skipped = 0
    for begin in range(0, max(lengths), STEPS):
        windows = (range(begin, min(begin + STEPS, length)) for length in lengths)
        batches = [(rank, index) for rank, window in enumerate(windows) for index in window]
        for rank, index in batches:
            (scaler.scale(loss_of(model, rank, index, overflow)) / len(batches)).backward()
        scaler.step(optimizer), scaler.update(), optimizer.zero_grad()
        updates, skipped = updates + 1, skipped + (overflow in batches)
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    return [updates, skipped, scaler.state_dict(), parameters]


@pytest.mark.parametrize("overflow", [None, (0, 0), (0, 2), (1, 0)], ids=str)
@pytest.mark.parametrize("lengths", [(1, 0), (3, 2), (4, 1), (0, 5), (5, 0), (7, 1)], ids=str)
def test_one_scale_though_windows_are_of_unequal_length(lengths, overflow):
    first, second = on_ranks(2, scaled, lengths, overflow)
    assert first[:3] == second[:3]
    assert torch.equal(first[3], second[3])
    wanted = stock(lengths, overflow)
    for name in ("scale", "_growth_tracker"):
        assert first[2][name] == wanted[2][name], name
    assert first[:2] == wanted[:2]
    torch.testing.assert_close(first[3], wanted[3], rtol=1e-5, atol=1e-6)
