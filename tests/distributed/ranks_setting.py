"""A model, data and an optimizer for tests of several ranks, and what is asserted of them."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import loops
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fusedacc
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


def wrap(net: nn.Module, steps: int | None, /, **options: Any) -> fusedacc.AccumulatingOptimizer:
    return fusedacc.AccumulatingOptimizer(inner_of(net), steps, **options)


def given(net: nn.Module, kind: str, **options: bool) -> tuple[nn.Module, object]:
    """Return what the loop calls, and what the wrapper is given as `data_parallel`.

    Args:
        kind: "group", or "ddp"; "ddp that may change" finds unused parameters.
    """
    if kind == "group":
        return net, dist.group.WORLD
    parallel = DistributedDataParallel(net, **{"find_unused_parameters": kind != "ddp"} | options)
    return parallel, parallel


def small_loss(net: nn.Module, index: int, rank: int | None = None) -> Tensor:
    """As `loss_of`, of a `loops.network`."""
    return loops.loss_of(net, 10 * index + (dist.get_rank() if rank is None else rank))


def train(called: nn.Module, optimizer: torch.optim.Optimizer, indices: Iterable[int]) -> None:
    """Train a `loops.network` on these micro-batches, with a step after each."""
    for index in indices:
        small_loss(called, index).backward()
        optimizer.step(), optimizer.zero_grad()


def one_process(steps: int, indices: Iterable[int], ranks: Sequence[int] = (0, 1)) -> nn.Module:
    """Train a `loops.network` by stock, in windows of `steps` micro-batches of each of these ranks."""
    net = loops.network()
    optimizer = inner_of(net)
    for number, index in enumerate(indices):
        for rank in ranks:
            (small_loss(net, index, rank) / (steps * len(ranks))).backward()
        if (number + 1) % steps == 0:
            optimizer.step(), optimizer.zero_grad()
    return net


def small_buckets(first: int = 2000) -> contextlib.AbstractContextManager:
    """So that a small model has several."""
    return mock.patch.multiple(reducer, FIRST_BYTES=first, BUCKET_BYTES=2 * first)


def assert_close(actual: Tensor, wanted: Tensor, most: float, what: object) -> None:
    """To within `most` of the largest of them."""
    actual, wanted = actual.double(), wanted.double()
    apart = (actual - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)
    assert apart <= most, (what, apart.item())


def assert_nets_close(net: nn.Module, wanted: nn.Module, most: float = 1e-5, what: object = "") -> None:
    """Each parameter to within `most` of its largest element."""
    for (name, p), q in zip(net.named_parameters(), wanted.parameters(), strict=True):
        assert_close(p, q, most, (what, name))


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
