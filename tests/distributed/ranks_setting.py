"""A model, data and an optimizer for tests of several ranks, and what is asserted of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fusedacc.distributed import reducer

LOW = torch.bfloat16


class Net(nn.Module):
    """A block that is run once or twice, which a checkpoint may run again; `extra` where it is asked for."""

    def __init__(self, how: str = "", dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.up, self.twice, self.down = nn.Linear(40, 30), nn.Linear(30, 30), nn.Linear(30, 2)
        self.norm = nn.BatchNorm1d(30)
        self.extra, self.never = nn.Linear(30, 30), nn.Linear(3, 3)
        self.to(dtype)

    def block(self, x: Tensor) -> Tensor:
        return torch.tanh(self.twice(torch.tanh(self.twice(x))))

    def forward(self, x: Tensor, uses_extra: bool = False) -> Tensor:
        x = self.norm(self.up(x.to(self.up.weight.dtype)))
        x = checkpoint(self.block, x, use_reentrant=self.how == "reentrant") if self.how else self.block(x)
        return self.down(x + self.extra(x) if uses_extra else x)


def loss_of(model: nn.Module, index: int, rank: int | None = None, uses_extra: bool = False) -> Tensor:
    """The mean loss of a rank's micro-batch of that number."""
    generator = torch.Generator().manual_seed(100 * index + (dist.get_rank() if rank is None else rank))
    return model(torch.randn(6, 40, generator=generator), uses_extra).float().pow(2).mean()


def inner_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def small_buckets() -> contextlib.AbstractContextManager:
    """So that a small model has several."""
    return mock.patch.multiple(reducer, FIRST_BYTES=2000, BUCKET_BYTES=4000)


def assert_close(actual: Tensor, wanted: Tensor, most: float, what: object) -> None:
    """To within `most` of the largest of them."""
    actual, wanted = actual.double(), wanted.double()
    apart = (actual - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)
    assert apart <= most, (what, apart.item())


def assert_ranks_equal(net: nn.Module, what: object = "", buffers: bool = False) -> None:
    """To the bit; their buffers too, where that is asked for."""
    for name, p in [*net.named_parameters(), *(net.named_buffers() if buffers else ())]:
        found = [torch.empty_like(p) for _ in range(dist.get_world_size())]
        dist.all_gather(found, p.detach())
        assert all(torch.equal(each, p) for each in found), (what, name)


def error_of(kind: type[BaseException], act: Callable[[], object]) -> str:
    """What the error says that this raises, of that kind."""
    try:
        act()
    except kind as error:  # and no traceback is kept, which would keep models
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")


def refused(kind: type[BaseException], words: str, act: Callable[[], object]) -> None:
    """It raises an error of that kind that says so."""
    said = error_of(kind, act)
    assert words in said, said
