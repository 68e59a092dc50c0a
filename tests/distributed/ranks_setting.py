"""A model, data, an optimizer and assertions for tests on several ranks."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
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


@contextlib.contextmanager
def lacking(module: ModuleType, *names: str) -> Iterator[None]:
    """Hide attributes from a module of the package, as if this version of torch lacked them."""

    def has(value: object, name: str) -> bool:
        return name not in names and hasattr(value, name)

    def get(value: object, name: str, *default: object) -> object:
        return default[0] if name in names else getattr(value, name, *default)

    with (
        mock.patch.object(module, "hasattr", has, create=True),
        mock.patch.object(module, "getattr", get, create=True),
    ):
        yield


class Net(nn.Module):
    """A block that runs once or twice, possibly under a checkpoint. The layer `extra` runs on request."""

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
    """Return the mean loss of a rank's micro-batch."""
    generator = torch.Generator().manual_seed(100 * index + (dist.get_rank() if rank is None else rank))
    return model(torch.randn(6, 40, generator=generator), uses_extra).float().pow(2).mean()


def inner_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def wrap(net: nn.Module, steps: int | None, /, **options: Any) -> fusedacc.AccumulatingOptimizer:
    return fusedacc.AccumulatingOptimizer(inner_of(net), steps, **options)


def given(net: nn.Module, kind: str, **options: bool) -> tuple[nn.Module, object]:
    """Return the module that the loop calls, and the wrapper's `data_parallel` argument.

    Args:
        kind: "group", or "ddp"; "ddp that may change" finds unused parameters.
    """
    if kind == "group":
        return net, dist.group.WORLD
    parallel = DistributedDataParallel(net, **{"find_unused_parameters": kind != "ddp"} | options)
    return parallel, parallel


def small_loss(net: nn.Module, index: int, rank: int | None = None) -> Tensor:
    """Return the same loss as `loss_of`, for a `loops.network`."""
    return loops.loss_of(net, 10 * index + (dist.get_rank() if rank is None else rank))


def train(called: nn.Module, optimizer: torch.optim.Optimizer, indices: Iterable[int]) -> None:
    """Train a `loops.network` on these micro-batches, with a step after each."""
    for index in indices:
        small_loss(called, index).backward()
        optimizer.step(), optimizer.zero_grad()


def one_process(steps: int, indices: Iterable[int], ranks: Sequence[int] = (0, 1)) -> nn.Module:
    """Train a `loops.network` with plain PyTorch, on `steps` micro-batches of each rank per window."""
    net = loops.network()
    optimizer = inner_of(net)
    for number, index in enumerate(indices):
        for rank in ranks:
            (small_loss(net, index, rank) / (steps * len(ranks))).backward()
        if (number + 1) % steps == 0:
            optimizer.step(), optimizer.zero_grad()
    return net


def train_both(
    called: nn.Module,
    optimizer: fusedacc.AccumulatingOptimizer,
    wanted: nn.Module,
    steps: int,
    loss: Callable[[nn.Module, int, int], Tensor],
    windows: int = 3,
) -> None:
    """Train on this rank's micro-batches, and `wanted` with plain PyTorch on those of all ranks."""
    stock, ranks = inner_of(wanted), dist.get_world_size()
    for window in range(windows):
        for index in range(window * steps, (window + 1) * steps):
            with optimizer.accumulate(called):
                loss(called, index, dist.get_rank()).backward()
            optimizer.step(), optimizer.zero_grad()
            for rank in range(ranks):
                (loss(wanted, index, rank) / (steps * ranks)).backward()
        stock.step(), stock.zero_grad()


def small_buckets(first: int = 2000) -> contextlib.AbstractContextManager:
    """Make buckets small, so that a small model has several."""
    return mock.patch.multiple(reducer, FIRST_BYTES=first, BUCKET_BYTES=2 * first)


def assert_close(actual: Tensor, wanted: Tensor, most: float, what: object) -> None:
    """Check that tensors agree to within `most` times the largest element of all."""
    actual, wanted = actual.double(), wanted.double()
    apart = (actual - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)
    assert apart <= most, (what, apart.item())


def assert_nets_close(net: nn.Module, wanted: nn.Module, most: float = 1e-5, what: object = "") -> None:
    """Check that each parameter agrees to within `most` times its largest element."""
    for (name, p), q in zip(net.named_parameters(), wanted.parameters(), strict=True):
        assert_close(p, q, most, (what, name))


def assert_ranks_equal(net: nn.Module, what: object = "", buffers: bool = False) -> None:
    """Check that parameters, and on request buffers, are bitwise equal on all ranks."""
    for name, p in [*net.named_parameters(), *(net.named_buffers() if buffers else ())]:
        found = [torch.empty_like(p) for _ in range(dist.get_world_size())]
        dist.all_gather(found, p.detach())
        assert all(torch.equal(each, p) for each in found), (what, name)


def error_of(kind: type[BaseException], act: Callable[[], object]) -> str:
    """Return the message of the error of type `kind` that the function raises."""
    try:
        act()
    except kind as error:  # keep no traceback, because it would keep models alive
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")


def refused(kind: type[BaseException], words: str, act: Callable[[], object]) -> None:
    """Check that the function raises an error of type `kind` with this message."""
    said = error_of(kind, act)
    assert words in said, said
