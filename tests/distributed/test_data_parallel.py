"""A DistributedDataParallel or a process group whose sums the wrapper reduces: as one process, and as stock."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
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


def small_buckets() -> contextlib.AbstractContextManager:
    """So that a small model has several."""
    return mock.patch.multiple(reducer, FIRST_BYTES=2000, BUCKET_BYTES=8000)


def assert_close(actual: Tensor, wanted: Tensor, most: float, what: object) -> None:
    """To within `most` of the largest of them."""
    actual, wanted = actual.double(), wanted.double()
    apart = (actual - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)
    assert apart <= most, (what, apart.item())


def assert_ranks_equal(net: nn.Module) -> None:
    """To the bit."""
    for name, p in net.named_parameters():
        found = [torch.empty_like(p) for _ in range(dist.get_world_size())]
        dist.all_gather(found, p.detach())
        assert all(torch.equal(each, p) for each in found), name


# Against one process, whose sums are in float64


def one_process(steps: int, updates: int, dtype: torch.dtype) -> tuple[nn.Module, list[list[Tensor]]]:
    """What one process makes of all ranks' data, and the gradients of each update."""
    net = Net(dtype=dtype)
    net.norm.eval()
    inner, seen = inner_of(net), []
    parameters = [p for name, p in net.named_parameters() if not name.startswith(("extra", "never"))]
    for update in range(updates):
        sums = [torch.zeros(p.shape, dtype=torch.float64) for p in parameters]
        for index in range(update * steps, (update + 1) * steps):
            for rank in range(dist.get_world_size()):
                found = torch.autograd.grad(loss_of(net, index, rank), parameters)
                for total, gradient in zip(sums, found, strict=True):
                    total += gradient.double() / (steps * dist.get_world_size())
        for p, total in zip(parameters, sums, strict=True):
            p.grad = total.to(p.dtype)
        inner.step(), inner.zero_grad()
        seen.append(sums)
    return net, seen


def against_one_process(kind: str, steps: int, dtype: torch.dtype, in_module: bool) -> None:
    net = Net(dtype=dtype)
    net.norm.eval()
    parallel = DistributedDataParallel(net) if kind == "ddp" else net
    ranks = parallel if kind == "ddp" else dist.group.WORLD
    options = {"model": net} if in_module else {}
    wanted, finals = one_process(steps, 3, dtype)
    with small_buckets():
        optimizer = fusedacc.AccumulatingOptimizer(inner_of(net), steps, data_parallel=ranks, **options)
        for index in range(3 * steps):
            loss_of(parallel, index).backward()
            present = [
                p.grad for name, p in net.named_parameters() if not name.startswith(("extra", "never"))
            ]
            if (index + 1) % steps:
                assert not any(gradient is not None for gradient in present)
            else:
                for gradient, final in zip(present, finals[index // steps], strict=True):
                    # After the first update parameters of 16 bits may be rounded another way, and a module's
                    # product is not rounded to 16 bits before it is added.
                    low = dtype is LOW and (in_module or index >= steps)
                    assert_close(gradient, final, 5e-2 if low else 5e-7, index)
            assert net.never.weight.grad is None
            optimizer.step(), optimizer.zero_grad()
        optimizer.close()
    for (name, p), q in zip(net.named_parameters(), wanted.parameters(), strict=True):
        assert_close(p, q, 2e-6 if dtype is torch.float32 else 2e-2, name)
    assert_ranks_equal(net)


@pytest.mark.parametrize("kind", ["ddp", "group"])
@pytest.mark.parametrize("dtype", [torch.float32, LOW], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("in_module", [False, True], ids=["", "model="])
def test_equal_to_one_process(kind, dtype, in_module):
    for steps in (1, 2, 3):
        on_ranks(2, against_one_process, kind, steps, dtype, in_module)
    if not in_module:
        on_ranks(3, against_one_process, kind, 2, dtype, in_module)


# Against stock


def manual_loop(wrapped: bool) -> list[Tensor]:
    """Every p.grad on the way, and the parameters."""
    net = Net()
    parallel = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = inner_of(net)
    if wrapped:
        optimizer = fusedacc.AccumulatingOptimizer(optimizer, data_parallel=parallel)
    seen = []
    for index in range(6):
        last = index % 3 == 2
        with contextlib.nullcontext() if last else parallel.no_sync():
            (loss_of(parallel, index, uses_extra=index == 4) / 3).backward()
        seen += [torch.zeros(0) if p.grad is None else p.grad.clone() for p in net.parameters()]
        if last:
            optimizer.step(), optimizer.zero_grad()
    return seen + [p.detach().clone() for p in net.parameters()]


def equal_to_stocks_manual_loop() -> None:
    with small_buckets():
        for number, (ours, theirs) in enumerate(zip(manual_loop(True), manual_loop(False), strict=True)):
            if dist.get_world_size() == 2:
                assert torch.equal(ours, theirs), number
            elif len(ours):  # three are added in another order where buckets are cut in other places
                assert_close(ours, theirs, 3e-7, number)


@pytest.mark.parametrize("count", [2, 3])
def test_a_manual_loop_has_the_bits_of_stock(count):
    on_ranks(count, equal_to_stocks_manual_loop)


NEVER, FIRST_RANK, NOW_AND_THEN = range(3)


def uses_extra(when: int, index: int) -> bool:
    return (when == FIRST_RANK and dist.get_rank() == 0) or (when == NOW_AND_THEN and index % 3 == 2)


def stock(steps: int, when: int, several: int) -> nn.Module:
    net = Net()
    parallel = DistributedDataParallel(net, find_unused_parameters=True)
    inner = inner_of(net)
    for index in range(3 * steps):
        last = (index + 1) % steps == 0
        for backward in range(several):
            synchronises = last and backward == several - 1
            with contextlib.nullcontext() if synchronises else parallel.no_sync():
                number = index * several + backward
                (loss_of(parallel, number, uses_extra=uses_extra(when, index)) / steps).backward()
        if last:
            inner.step(), inner.zero_grad()
    parallel._sync_buffers()  # which it would do in the next forward
    return net


def against_stock(how: str, options: dict, when: int, several: int, by_hand: bool, in_module: bool) -> None:
    for steps in (1, 2, 3):
        net = Net(how)
        parallel = DistributedDataParallel(net, **options)
        with small_buckets():
            given = {"model": parallel} if in_module else {}
            optimizer = fusedacc.AccumulatingOptimizer(inner_of(net), steps, data_parallel=parallel, **given)
            for index in range(3 * steps):
                for backward in range(several):
                    with parallel.no_sync() if by_hand and index % 2 else contextlib.nullcontext():
                        number = index * several + backward
                        loss_of(parallel, number, uses_extra=uses_extra(when, index)).backward()
                optimizer.step(), optimizer.zero_grad()
            assert optimizer.num_updates == 3
            optimizer.close()
        wanted = stock(steps, when, several)
        for (name, p), q in zip(net.named_parameters(), wanted.named_parameters(), strict=True):
            assert_close(p, q[1], 2e-6, (steps, name))
        for (name, p), q in zip(net.named_buffers(), wanted.buffers(), strict=True):
            # With several forwards in a micro-batch, stock's buffers are broadcast before another of them.
            assert several > 1 or torch.allclose(p.float(), q.float(), rtol=1e-5), (steps, name)
        assert_ranks_equal(net)
        assert parallel.require_backward_grad_sync
        assert "no_sync" not in parallel.__dict__


UNUSED = {"find_unused_parameters": True}
CASES = {
    "all parameters used": ("", {}, NEVER, 1, False, False),
    "find_unused_parameters": ("", UNUSED, NEVER, 1, False, False),
    "gradient_as_bucket_view": ("", {"gradient_as_bucket_view": True}, NEVER, 1, False, False),
    "static_graph": ("", {"static_graph": True}, NEVER, 1, False, False),
    "no_sync by hand": ("", {}, NEVER, 1, True, False),
    "model=": ("", {}, NEVER, 1, False, True),
    "used on one rank": ("", UNUSED, FIRST_RANK, 1, False, False),
    "used now and then": ("", UNUSED, NOW_AND_THEN, 1, False, True),
    "checkpointed": ("as usual", {}, NEVER, 1, False, False),
    "checkpointed, re-entrant": ("reentrant", {}, NEVER, 1, False, True),
    "two backwards": ("", {}, NEVER, 2, False, False),
}


@pytest.mark.parametrize("case", CASES)
def test_equal_to_stock(case):
    on_ranks(2, against_stock, *CASES[case])


# Windows of unequal length


def epochs(kind: str, counts: list[int], reduction: str) -> None:
    rank, weighs = dist.get_rank(), reduction in ("weighted", "normalized")

    def weight(of_rank: int, index: int) -> float:
        return float(index + 10 * of_rank) if weighs else 1.0  # the first of the first rank weighs nothing

    net, twin = Net(), Net()
    net.norm.eval(), twin.norm.eval()
    parallel = DistributedDataParallel(net) if kind == "ddp" else net
    ranks = parallel if kind == "ddp" else dist.group.WORLD
    optimizer = fusedacc.AccumulatingOptimizer(inner_of(net), 4, reduction=reduction, data_parallel=ranks)
    inner = inner_of(twin)
    parameters = list(twin.parameters())
    for epoch in range(3):
        for index in range(counts[rank]):
            given = weight(rank, index)
            with optimizer.accumulate(weight=given if weighs else None):
                loss = loss_of(parallel, 10 * epoch + index)
                (loss * given if reduction == "normalized" else loss).backward()
            optimizer.step(), optimizer.zero_grad()
        optimizer.flush(), optimizer.zero_grad()

        for begin in range(0, max(counts), 4):
            total, weights = [torch.zeros_like(p) for p in parameters], 0.0
            for of_rank, count in enumerate(counts):
                for index in range(begin, min(begin + 4, count)):
                    loss = loss_of(twin, 10 * epoch + index, of_rank)
                    found = torch.autograd.grad(loss, parameters, allow_unused=True)
                    for each, gradient in zip(total, found, strict=True):
                        each += 0 if gradient is None else weight(of_rank, index) * gradient
                    weights += weight(of_rank, index)
            for p, each in zip(parameters, total, strict=True):
                p.grad = each / (len(counts) if reduction == "sum" else weights)
            inner.step(), inner.zero_grad()
    for (name, p), q in zip(net.named_parameters(), twin.parameters(), strict=True):
        assert_close(p, q, 2e-6, (counts, reduction, name))
    assert_ranks_equal(net)
    optimizer.close()


@pytest.mark.parametrize("reduction", ["mean", "sum", "weighted", "normalized"])
@pytest.mark.parametrize("kind", ["ddp", "group"])
def test_windows_of_unequal_length(kind, reduction):
    for counts in ([4, 3], [3, 4], [4, 0], [8, 3], [0, 0], [2, 2]):
        on_ranks(2, epochs, kind, counts, reduction)
