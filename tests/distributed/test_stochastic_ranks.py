"""Stochastically rounded sums on two ranks: equal bits after the reduction, different bits before."""

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp_setting import adam as fsdp_adam
from fsdp_setting import loss_of as fsdp_loss_of
from fsdp_setting import sharded, whole
from loops import assert_equal_weights
from ranks import on_each_rank, on_ranks
from ranks_setting import LOW, Net, assert_ranks_equal, given, inner_of, loss_of, small_buckets, wrap
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fusedacc
from fusedacc.accumulators.reduction import WEIGHING
from fusedacc.distributed import reducer

K = 3
STOCHASTIC: dict[str, Any] = {"accumulate_dtype": LOW, "rounding": "stochastic"}
LOOPS: dict[str, dict[str, Any]] = {
    "mean": {},
    "clipped": {"max_grad_norm": 0.05},
    "weighted": {"reduction": "weighted", "max_grad_norm": 0.05},
    "normalized": {"reduction": "normalized"},
    "float32": {"dtype": torch.float32, "reduction": "sum"},
    "masters": {"master_weights": True, "max_grad_norm": 0.05},
    "low wire": {"reduce_dtype": LOW, "max_grad_norm": 0.05},
    "wide wire": {"reduce_dtype": torch.float32},
    "manual": {"steps": None},
    "manual, mean": {"steps": None, "reduction": "mean", "max_grad_norm": 0.05},
    "model=": {"inside": True},
}


def made(kind: str, seed: int | None = 3, dtype: torch.dtype = LOW, inside: bool = False, **options: Any):
    net = Net(dtype=dtype)
    net.norm.float()  # gloo does not add these buffers in bfloat16
    called, parallel = given(net, kind, find_unused_parameters=True)
    steps = options.pop("steps", K)
    options |= {"model": net} if inside else {}
    return net, called, wrap(net, steps, data_parallel=parallel, seed=seed, **(STOCHASTIC | options))


def traits(kind: str, loop: str) -> dict[str, object]:
    return {"kind": kind} | {name: str(value) for name, value in LOOPS[loop].items()}


@pytest.mark.sweep(of=traits)
@pytest.mark.parametrize("kind", ["ddp", "group"])
@pytest.mark.parametrize("loop", LOOPS)
@on_each_rank(2)
def test_ranks_stay_equal(kind: str, loop: str) -> None:
    """Test full windows, a window with a parameter that only one rank uses, and one that ends early."""
    options = LOOPS[loop]
    with small_buckets():
        net, called, optimizer = made(kind, seed=3 + dist.get_rank(), **options)
        weighs, steps = options.get("reduction") in WEIGHING, options.get("steps", K)
        for index in range(2 * K + 1):
            rank = dist.get_rank()
            last = index % K == K - 1
            silence = called.no_sync() if steps is None and not last and kind == "ddp" else nullcontext()
            with silence, optimizer.accumulate(weight=1.0 + index + rank if weighs else None):
                loss_of(called, index, uses_extra=index == K + 1 and rank == 1).backward()
            if steps or last:
                optimizer.step(), optimizer.zero_grad()
                assert_ranks_equal(net, (options, index))
        if steps:
            if dist.get_rank() == 0:  # one rank has one more
                with optimizer.accumulate(weight=2.0 if weighs else None):
                    loss_of(net, 20).backward()
                optimizer.step(), optimizer.zero_grad()
            optimizer.flush()
            assert_ranks_equal(net, (options, "flush"))
        assert optimizer.num_updates == (3 if steps else 2)
        assert optimizer._accumulators.noise.seed == 3, "the first rank's"
        assert len(optimizer._accumulation.ranks.parallel.reducer.buckets()) > 1


ELEMENTS = 1 << 14
GRADIENTS = (1.0, 0.0031, 0.0007, 0.0011)


def vector(gradients: tuple[float, ...], options: dict[str, Any], before: bool = False) -> Tensor:
    """Return the gradient of a vector of equal elements after a window, or this rank's sum as it is sent."""
    weight = nn.Parameter(torch.zeros(ELEMENTS, dtype=LOW))
    how = STOCHASTIC | {"seed": 5, "reduction": "sum", "data_parallel": dist.group.WORLD} | options
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), len(gradients), **how)
    sent = []
    send = reducer.ReduceBucket.send

    def watched(bucket: reducer.ReduceBucket, *arguments: Any, **options: Any) -> None:
        sent.append(bucket.views[0].clone())
        send(bucket, *arguments, **options)
        sent.append(bucket._sent.tensor.dtype)

    with mock.patch.object(reducer.ReduceBucket, "send", watched):
        for gradient in gradients:
            weight.backward(torch.full_like(weight, gradient))
            optimizer.step()
    wanted = options.get("reduce_dtype") or torch.float32
    assert sent[1] is wanted, sent[1]
    found = sent[0] if before else weight.grad.clone()
    return found


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_mean_over_ranks_is_right_on_average(reduction, reduce_dtype):
    low = torch.tensor(GRADIENTS).to(LOW).tolist()
    wanted = sum(low) / (len(low) if reduction == "mean" else 1)
    first, second = on_ranks(2, vector, tuple(low), {"reduction": reduction, "reduce_dtype": reduce_dtype})
    assert torch.equal(first, second)
    values = first.double()
    error = values.std().item() / ELEMENTS**0.5
    assert error > 0
    assert abs(values.mean().item() - wanted) < 4.5 * error, (values.mean().item(), wanted)


def test_a_wire_of_bfloat16_has_rounded_sums_of_ranks():
    """Each rank's part is correct on average, and the collective rounds its sums to nearest."""
    low = torch.tensor(GRADIENTS).to(LOW).tolist()
    first, second = on_ranks(2, vector, tuple(low), {"reduce_dtype": LOW})
    assert torch.equal(first, second)
    assert abs(first.double().mean().item() - sum(low)) < 2.0**-8


def test_a_wire_of_float16_carries_it():
    for found in on_ranks(2, vector, (1.0, 0.5), {"reduce_dtype": torch.float16}):
        assert (found == 1.5).all()


def test_ranks_with_the_same_gradients_have_different_errors():
    (first, second), again = (on_ranks(2, vector, GRADIENTS, {}, True) for _ in range(2))
    assert 0.2 < (first != second).double().mean() < 0.8
    assert all(map(torch.equal, (first, second), again))


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["ddp", "group"])
@pytest.mark.parametrize("done", [2, 4, 7], ids=["mid-window", "between windows", "reduced"])
@pytest.mark.parametrize("name", ["mean", "clipped", "weighted"])
@on_each_rank(2)
def test_a_checkpoint_goes_on_bit_for_bit(name: str, done: int, kind: str) -> None:
    """Load each rank's file. `done` counts half micro-batches: an odd number is before the last step()."""
    options = LOOPS[name]

    def train(called, optimizer, halves) -> None:
        for half in halves:
            if half % 2 == 0:
                weight = 1.0 + half + dist.get_rank() if options.get("reduction") == "weighted" else None
                with optimizer.accumulate(weight=weight):
                    loss_of(called, half // 2).backward()
            else:
                optimizer.step(), optimizer.zero_grad()

    with small_buckets():
        net, called, optimizer = made(kind, steps=2, **options)
        train(called, optimizer, range(done))
        saved = [net.state_dict(), optimizer.state_dict()]
        saved = torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, saved)
        other, called_other, resumed = made(kind, seed=99, steps=2, **options)
        other.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        for each, its in ((called, optimizer), (called_other, resumed)):
            train(each, its, range(done, 12))
        assert_equal_weights(net, other)
        assert_ranks_equal(other)


@on_each_rank(2)
def test_a_window_that_is_reopened() -> None:
    """After one more backward, ranks add with different random bits. The next reduction makes them equal."""
    net, called, optimizer = made("group", steps=2, max_grad_norm=0.05)
    noise = optimizer._accumulators.noise
    for index in range(6):
        loss_of(called, index).backward()
        if index % 2:
            assert noise._since is not None
            loss_of(called, index + 50).backward()
        optimizer.step(), optimizer.zero_grad()
        assert noise._since is None
    assert optimizer.num_updates == 3
    assert_ranks_equal(net)


@on_each_rank(2)
def test_ranks_that_have_added_more() -> None:
    """Ranks may have different numbers of additions. After the reduction they continue with one number."""
    net, called, optimizer = made("group", steps=2, max_grad_norm=0.05, seed=1)
    for index in range(4):
        for _ in range(1 + 2 * dist.get_rank()):
            loss_of(called, index).backward()
            if index % 2:
                break
        optimizer.step(), optimizer.zero_grad()
        assert_ranks_equal(net, index)
    counts: list[Any] = [None, None]
    dist.all_gather_object(counts, optimizer._accumulators.noise._floor)
    assert counts[0] < counts[1]


@on_each_rank(2)
def test_each_rank_goes_on_with_its_own_number() -> None:
    """The distributed checkpoint gives one rank's counters to all ranks."""
    _, called, optimizer = made("group", steps=3, seed=1)
    for index in range(2):
        for _ in range(1 + 2 * dist.get_rank()):
            loss_of(called, index).backward()
        optimizer.step(), optimizer.zero_grad()
    saved, noise = optimizer.state_dict(), optimizer._accumulators.noise
    number = noise.next_addition
    own = saved["fusedacc"]
    saved["fusedacc"] = own | {"noise": own["noise"] | {"addition": 1000}}
    optimizer.load_state_dict(saved)
    assert noise.next_addition == number


@on_each_rank(2)
def test_ranks_have_different_seeds_until_they_part() -> None:
    _, _, optimizer = made("ddp", seed=4)
    noise = optimizer._accumulators.noise
    others: list[Any] = [None, None]
    dist.all_gather_object(others, noise.own_seed)
    assert len(set(others)) == 2
    optimizer._accumulation.ranks.parallel.close()
    assert noise.own_seed == 4


@on_each_rank(2)
def test_ranks_that_stock_averages_stay_equal_by_default() -> None:
    """Plain DDP averages every gradient by itself, and the ranks' torch seeds differ."""
    torch.manual_seed(0)
    net = nn.Linear(40, 30).to(LOW)
    parallel = DistributedDataParallel(net)
    torch.manual_seed(dist.get_rank())
    optimizer = fusedacc.AccumulatingOptimizer(inner_of(net), 3, **STOCHASTIC)
    for index in range(6):
        x = torch.randn(5, 40, generator=torch.Generator().manual_seed(10 * index + dist.get_rank()))
        parallel(x.to(LOW)).square().mean().backward()
        optimizer.step(), optimizer.zero_grad()
    assert optimizer.num_updates == 2
    assert_ranks_equal(net)


@pytest.mark.parametrize("steps", [2, None])
@on_each_rank(2)
def test_shards_of_fsdp2(steps: int | None) -> None:
    """With FSDP2, each rank's bits are the same in every run. Weights are close to those of float32 sums."""
    found = []
    for options in (STOCHASTIC | {"seed": 2}, STOCHASTIC | {"seed": 2}, {}):
        model = sharded(LOW)
        optimizer = fusedacc.AccumulatingOptimizer(fsdp_adam(model), steps, **options)
        for index in range(4):
            (fsdp_loss_of(model, index) / (1 if steps else 2)).backward()
            if steps or index % 2 == 1:
                optimizer.step(), optimizer.zero_grad()
        assert optimizer.num_updates == 2
        found.append([whole(p).detach() for p in model.parameters()])
    for first, again, near in zip(*found, strict=True):
        assert torch.equal(first, again)
        torch.testing.assert_close(first, near, rtol=0.02, atol=0.02)
