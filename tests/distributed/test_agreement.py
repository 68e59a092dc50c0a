"""What ranks start from, and that reductions which do not belong together are noticed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from ranks_setting import assert_ranks_equal
from torch import nn

import fusedacc


def made_apart() -> list[torch.Tensor]:
    """The parameters that a rank made, and those that it has when the wrapper is made."""
    torch.manual_seed(dist.get_rank())
    net = nn.Linear(4, 3)
    before = net.weight.detach().clone()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    fusedacc.AccumulatingOptimizer(inner, 2, data_parallel=dist.group.WORLD).close()
    assert_ranks_equal(net)
    return [before, net.weight.detach()]


def test_every_rank_gets_the_parameters_of_the_first():
    (first, of_first), (second, of_second) = on_ranks(2, made_apart)
    assert not torch.equal(first, second)
    assert torch.equal(first, of_first)
    assert torch.equal(first, of_second)


def out_of_step() -> None:
    """Rank 1 has made one reduction more, and what it sends now is not what rank 0 waits for."""
    net = nn.Linear(4, 3)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = fusedacc.AccumulatingOptimizer(inner, 1, data_parallel=dist.group.WORLD)
    optimizer._accumulation.ranks.parallel.reducer._number += dist.get_rank()
    with pytest.raises(RuntimeError, match="not at the same reduction"):
        net(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"discard\(\)"):
        optimizer.step()
    optimizer.close()


def test_reductions_that_do_not_belong_together_are_an_error_on_every_rank():
    on_ranks(2, out_of_step)
