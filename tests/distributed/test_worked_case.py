"""Three workers x micro-batch 3 x 2 steps = 18 samples, whose update divides by 18; and 3 x 1 x 2 = 6."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from ranks_setting import given
from torch import Tensor, nn

import fusedacc
from fusedacc.accumulators.reduction import WEIGHING

RANKS, STEPS, FEATURES = 3, 2, 50
EPS = torch.finfo(torch.float32).eps


class Weights(nn.Module):
    """The gradient of a sample's loss is the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def samples_of(per_step: int) -> tuple[int, Tensor]:
    """How many samples a window has, and those of two windows.

    They have one sign: no sum is smaller than its terms, which 1/3 has rounded.
    """
    count = RANKS * per_step * STEPS
    assert count == {3: 18, 1: 6}[per_step]
    generator = torch.Generator().manual_seed(count)
    return count, torch.randint(100, (2, STEPS, RANKS, per_step, FEATURES), generator=generator).float()


def counted(per_step: int, kind: str, reduction: str) -> None:
    samples, data = samples_of(per_step)
    model = Weights()
    net, parallel = given(model, kind)
    inner = torch.optim.SGD(model.parameters(), lr=1 / samples if reduction == "sum" else 1.0)
    optimizer = fusedacc.AccumulatingOptimizer(inner, STEPS, reduction=reduction, data_parallel=parallel)
    wanted = torch.zeros(FEATURES)
    for window in data:
        for of_ranks in window:
            losses = net(of_ranks[dist.get_rank()])
            # Over ranks "sum" is the mean of their sums, as with DistributedDataParallel.
            loss = losses.mean() if reduction in ("mean", "weighted") else losses.sum()
            loss = RANKS * loss if reduction == "sum" else loss
            with optimizer.accumulate(weight=per_step if reduction in WEIGHING else None):
                loss.backward()
            optimizer.step()
        total = window.sum((0, 1, 2))
        if reduction == "sum":
            assert torch.equal(model.weight.grad, total)
            wanted.sub_(total, alpha=1 / samples)
            assert torch.equal(model.weight, wanted)
        else:
            torch.testing.assert_close(model.weight.grad, total / samples, rtol=3 * EPS, atol=0)
    assert optimizer.num_updates == 2
    optimizer.close()


def manual(per_step: int) -> None:
    """An existing loop divides when all is added: samples of either sign, bit for bit."""
    samples, data = samples_of(per_step)
    model = Weights()
    net, parallel = given(model, "ddp")
    inner = torch.optim.SGD(model.parameters(), lr=1 / samples)
    optimizer = fusedacc.AccumulatingOptimizer(inner, data_parallel=parallel)
    first, last = data[0] - 50
    with net.no_sync():
        (RANKS * net(first[dist.get_rank()]).sum()).backward()
    (RANKS * net(last[dist.get_rank()]).sum()).backward()
    total = (first + last).sum((0, 1))
    assert torch.equal(model.weight.grad, total)
    optimizer.step()
    assert torch.equal(model.weight, torch.zeros(FEATURES).sub(total, alpha=1 / samples))
    optimizer.close()


@pytest.mark.parametrize("per_step", [3, 1])
@pytest.mark.parametrize("kind", ["ddp", "group"])
@pytest.mark.parametrize("reduction", ["sum", "mean", "weighted", "normalized"])
def test_every_sample_of_three_workers_counts_once(reduction, kind, per_step):
    on_ranks(RANKS, counted, per_step, kind, reduction)


@pytest.mark.parametrize("per_step", [3, 1])
def test_every_sample_of_a_manual_loop_counts_once(per_step):
    on_ranks(RANKS, manual, per_step)
