"""With `main_grad=True` and `data_parallel=`, what modules add by themselves is reduced over the ranks."""

import pytest
import torch
import torch.distributed as dist
from main_grad_modules import PROTOCOLS, AddingLinear
from ranks import on_each_rank
from ranks_setting import assert_ranks_equal, error_of, given, small_buckets
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import fusedacc

RANKS = 2


class Net(nn.Module):
    """`up` and `down` add by themselves, and autograd adds the gradients of the others."""

    def __init__(self, protocol: str | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        kind = nn.Linear if protocol is None else AddingLinear
        options = {} if protocol is None else {"protocol": protocol}
        self.up, self.mid, self.down = kind(40, 30, **options), nn.Linear(30, 30), kind(30, 2, **options)
        self.never = nn.Linear(3, 3)
        self.double()

    def forward(self, x):
        return self.down(torch.tanh(self.mid(torch.tanh(self.up(x)))))


def loss_of(model: nn.Module, index: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * index + rank)
    return model(torch.randn(6, 40, generator=generator).double()).pow(2).mean()


def inner_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def weight_of(index: int, rank: int) -> float:
    return 1.0 + (index + rank) % 3


def one_process(steps: int, reduction: str, windows: list[int]) -> nn.Module:
    """Train one process on all ranks' micro-batches, as the reduction combines them."""
    net = Net(None)
    inner = inner_of(net)
    start = 0
    for size in windows:
        pairs = [(index, rank) for index in range(start, start + size) for rank in range(RANKS)]
        weights = [weight_of(*pair) for pair in pairs]
        divisor = {"mean": len(pairs), "sum": RANKS, "normalized": sum(weights)}[reduction]
        for pair in pairs:
            (loss_of(net, *pair) / divisor).backward()
        inner.step()
        inner.zero_grad()
        start += size
    return net


def check_reductions(kind: str, reduction: str, protocol: str, passes: int) -> None:
    net = Net(protocol)
    called, parallel = given(net, kind)
    with small_buckets():
        optimizer = fusedacc.AccumulatingOptimizer(
            inner_of(net), 3, reduction=reduction, data_parallel=parallel, main_grad=True
        )
    memory = [p.main_grad.data_ptr() for p in net.parameters()]
    for index in range(3 * 4 + 2):
        weight = weight_of(index, dist.get_rank()) if reduction == "normalized" else None
        with optimizer.accumulate(weight=weight):
            for _ in range(passes):
                (loss_of(called, index, dist.get_rank()) / passes).backward()
        if optimizer.will_update:
            assert net.up.weight.grad is net.up.weight.main_grad
        optimizer.step()
    optimizer.flush()
    assert optimizer.num_updates == 5
    wanted = one_process(3, reduction, [3, 3, 3, 3, 2])
    for p, q in zip(net.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
    assert [p.main_grad.data_ptr() for p in net.parameters()] == memory
    assert_ranks_equal(net)
    optimizer.close()
    assert not any(p.__dict__ for p in net.parameters())


@pytest.mark.parametrize("kind", ["group", "ddp that may change"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "normalized"])
@on_each_rank(RANKS)
def test_sums_of_modules_are_reduced(kind, reduction):
    check_reductions(kind, reduction, "megatron", passes=1)


@pytest.mark.parametrize("protocol", ["transformer_engine", "apex", "primus"])
@on_each_rank(RANKS)
def test_each_protocol_is_reduced(protocol):
    assert protocol in PROTOCOLS
    check_reductions("group", "mean", protocol, passes=1)


@on_each_rank(RANKS)
def test_several_backward_passes_in_each_micro_batch_are_reduced():
    check_reductions("group", "mean", "megatron", passes=2)


@on_each_rank(RANKS)
def test_a_manual_loop_reduces_what_modules_add():
    net = Net("megatron")
    called, parallel = given(net, "group")
    optimizer = fusedacc.AccumulatingOptimizer(inner_of(net), data_parallel=parallel, main_grad=True)
    plain = Net(None)
    inner = inner_of(plain)
    for update in range(3):
        for index in (2 * update, 2 * update + 1):
            loss_of(called, index, dist.get_rank()).backward()
            for rank in range(RANKS):
                (loss_of(plain, index, rank) / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
        inner.step()
        inner.zero_grad()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
    optimizer.close()


@on_each_rank(RANKS)
def test_sharded_parameters_are_refused():
    net = Net("megatron")
    fully_shard(net)
    message = error_of(ValueError, lambda: fusedacc.AccumulatingOptimizer(inner_of(net), 2, main_grad=True))
    assert "is a DTensor" in message


@on_each_rank(RANKS)
def test_a_pipeline_schedule_is_refused():
    net = Net("megatron")
    optimizer = fusedacc.AccumulatingOptimizer(inner_of(net), 2, main_grad=True)
    stage = PipelineStage(
        net,
        0,
        1,
        torch.device("cpu"),
        group=dist.new_group([dist.get_rank()], use_local_synchronization=True),
    )
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    assert "pipeline schedule" in error_of(ValueError, lambda: optimizer.attach(schedule))
    optimizer.close()


@on_each_rank(RANKS)
def test_a_reducer_outside_the_wrapper_raises():
    net = Net("megatron")
    del net.never
    called, _ = given(net, "ddp")
    optimizer = fusedacc.AccumulatingOptimizer(inner_of(net), 1, main_grad=True)
    message = error_of(RuntimeError, lambda: loss_of(called, 0, dist.get_rank()).backward())
    assert "allowed: data_parallel=" in message
    assert "discard" in error_of(RuntimeError, optimizer.step)
    optimizer.close()
