"""FSDP2 on two replicas of two shards: `accumulate(model, defer="all_reduce")` and the other values."""

import contextlib
import copy
import math
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_setting import hybrid, in_place, plainly, sharded, whole, wrap
from loops import Failure, fail
from memory import kept_by
from pipelines_setting import parts, run_schedule, scheduled
from ranks import on_each_rank, on_ranks
from ranks_setting import refused
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import fusedacc
from fusedacc.distributed.fsdp_objects import groups_of

RANKS, K = 4, 3
LOW = torch.bfloat16
#: Of the square model: its layers, and the bytes of a rank's shards.
WIDTH, LAYERS = 64, 4
SHARDS = LAYERS * WIDTH * WIDTH * 4 // 2
ALLOWED = "mesh of two dimensions"


def batch(index: int, rank: int | None = None) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * index + rank))


def loss_of(model: nn.Module, index: int, rank: int | None = None, *arguments: Any) -> Tensor:
    """Return the mean loss of a micro-batch, for a given rank or (None) for this rank."""
    dtype = next(model.parameters()).dtype
    return model(batch(index, rank).to(dtype), *arguments).float().pow(2).mean()


def two_by_two(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return sharded(dtype, hybrid(2, 2), **options)


def stock_gradients(model: nn.Module, indices: Sequence[int]) -> list[Tensor]:
    """Return the mean of plain FSDP2's gradients of these micro-batches, in float64."""
    copied = two_by_two()
    copied.load_state_dict(model.state_dict())
    totals = [torch.zeros(p.shape, dtype=torch.float64) for p in copied.parameters()]
    for index in indices:
        loss_of(copied, index).backward()
        for total, p in zip(totals, copied.parameters(), strict=True):
            total += whole(p.grad).double() / len(indices)
            p.grad = None
    return totals


def assert_gradients(model: nn.Module, wanted: Sequence[Tensor], what: object = "") -> None:
    for (name, p), total in zip(model.named_parameters(), wanted, strict=True):
        torch.testing.assert_close(whole(p.grad).double(), total, rtol=2e-6, atol=1e-8, msg=f"{name} {what}")


def flat_sums(model: nn.Module) -> list[Tensor | None]:
    """Return the sums of shards that FSDP2 has not all-reduced."""
    states = [module._get_fsdp_state() for module in (model, model[0], model[2])]
    return [group._partial_reduce_output for state in states for group in groups_of(state)]


#: What each micro-batch of a window defers.
WINDOWS = (
    ("all_reduce",) * K,
    ("none",) * K,
    ("all", "all_reduce", "all"),
    ("all_reduce", "all", "all_reduce"),
    ("all_reduce", "none", "all"),
    ("none", "all_reduce", "all_reduce"),
)


def each_defer() -> None:
    """Every value, and changes in the middle of a window, against plain FSDP2; with the norm that clips."""
    for defers in WINDOWS:
        model = two_by_two()
        optimizer = wrap(model, K, max_grad_norm=1e-2)
        for window in range(2):
            indices = range(K * window, K * (window + 1))
            wanted = stock_gradients(model, indices)
            norm = math.sqrt(sum(total.square().sum().item() for total in wanted))
            for index, defer in zip(indices, defers, strict=True):
                is_last = index == indices[-1]
                with optimizer.accumulate(model, defer=defer):
                    loss_of(model, index).backward()
                assert all((p.grad is None) is not is_last for p in model.parameters())
                if is_last:
                    assert_gradients(model, wanted, defers)
                    assert flat_sums(model) == [None] * len(flat_sums(model))
                optimizer.step(), optimizer.zero_grad()
            assert abs(optimizer.grad_norm.item() / norm - 1) < 1e-6, defers
        assert optimizer.num_updates == 2
        optimizer.close()
        groups = [
            group for module in (model, model[0], model[2]) for group in groups_of(module._get_fsdp_state())
        ]
        assert not any("post_backward" in group.__dict__ for group in groups)


def what_ends_early() -> None:
    """flush() with and without a micro-batch that no step() has ended, discard() and an exception."""
    for defers in (("all_reduce",) * 2, ("all", "all_reduce"), ("all_reduce", "all")):
        for ends in (True, False):
            model = two_by_two()
            optimizer = wrap(model, 5)
            seen: list[list[Tensor]] = []
            optimizer.optimizer.register_step_pre_hook(
                lambda *_, model=model, seen=seen: seen.append(
                    [whole(p.grad).double() for p in model.parameters()]
                )
            )
            for act in ("discard", "interrupt", "close the window"):
                wanted = stock_gradients(model, (0, 1))
                for index, defer in enumerate(defers):
                    with optimizer.accumulate(model, defer=defer):
                        loss_of(model, index if act == "close the window" else 7).backward()
                    refused(RuntimeError, "set_requires_gradient_sync(True)", optimizer.state_dict)
                    optimizer.state_dict(include_partial=False)
                    if ends or index == 0:
                        optimizer.step()
                if act == "interrupt":
                    # The last layers are reduced before the hook of an activation fails.
                    handle = model[1].register_forward_hook(
                        lambda _, __, output: output.register_hook(fail) and None
                    )
                    with contextlib.suppress(Failure), optimizer.accumulate(model, defer="all_reduce"):
                        loss_of(model, 8).backward()
                    handle.remove()
                    refused(RuntimeError, "discard()", optimizer.flush)
                if act != "close the window":
                    optimizer.discard()
                    assert flat_sums(model) == [None] * len(flat_sums(model))
            optimizer.flush()
            assert (optimizer.num_updates, optimizer.micro_step) == (1, 0)
            assert flat_sums(model) == [None] * len(flat_sums(model))
            for total, found in zip(wanted, *seen, strict=True):
                torch.testing.assert_close(found, total, rtol=2e-6, atol=1e-8)


@pytest.mark.parametrize("run", [plainly, in_place])
@pytest.mark.parametrize("check", [each_defer, what_ends_early])
def test_windows(run, check):
    on_ranks(RANKS, run, check)


@on_each_rank(RANKS)
def test_weights_over_all_ranks() -> None:
    """reduction="normalized", for losses that are sums."""
    model = two_by_two()
    optimizer = wrap(model, K, reduction="normalized")
    copied = two_by_two()
    weights = [[1.0 + (index + rank) % 3 for rank in range(RANKS)] for index in range(K)]
    for index in range(K):
        weight = weights[index][dist.get_rank()]
        with optimizer.accumulate(model, weight, defer="all_reduce"):
            (loss_of(model, index) * weight).backward()
        (loss_of(copied, index) * weight * RANKS / sum(map(sum, weights))).backward()
        if index < K - 1:
            optimizer.step()
    assert_gradients(model, [whole(p.grad).double() for p in copied.parameters()])


@on_each_rank(RANKS)
def test_by_hand_in_both_loops() -> None:
    """set_requires_all_reduce(False) in the user's own loop."""
    for steps in (K, None):
        model = two_by_two()
        optimizer = wrap(model, steps)
        wanted = stock_gradients(model, range(K))
        for index in range(K):
            model.set_requires_all_reduce(index == K - 1)
            (loss_of(model, index) / (1 if steps else K)).backward()
            if steps and index < K - 1:
                optimizer.step()
        assert_gradients(model, wanted)
        optimizer.step()
        assert optimizer.num_updates == 1


class Branches(nn.Module):
    """Layers of one shape, of which each micro-batch uses some; no micro-batch uses the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(4))
        self.apart = nn.Linear(4, 4)

    def forward(self, x: Tensor, used: Sequence[int], apart: bool) -> Tensor:
        x = sum(self.layers[index](x) for index in used)
        return self.apart(x) if apart else x


@on_each_rank(RANKS)
def test_parameters_without_a_gradient_in_some_micro_batches() -> None:
    """Plain FSDP2 adds such gradients to those of another parameter, or raises."""
    uses = (((0,), True), ((1,), False), ((2, 0), True)), (((0, 1), True), ((0, 2), True), ((1,), False))
    for flushes in (False, True):
        for used in uses:
            models = []
            for _ in range(2):
                net = Branches()
                fully_shard(net.apart, mesh=hybrid(2, 2))
                models.append(fully_shard(net, mesh=hybrid(2, 2)))
            model, copied = models
            optimizer = wrap(model, K + flushes, lambda net: torch.optim.SGD(net.parameters(), lr=1.0))
            for index, (layers, apart) in enumerate(used):
                with optimizer.accumulate(model, defer="all_reduce"):
                    loss_of(model, index, None, layers, apart).backward()
                (loss_of(copied, index, None, layers, apart) / K).backward()
                if index < K - 1:
                    optimizer.step()
            if not flushes:
                assert model.layers[3].weight.grad is None
            optimizer.flush()
            for (name, p), q in zip(model.named_parameters(), copied.parameters(), strict=True):
                wanted = whole(q) if q.grad is None else whole(q) - whole(q.grad)
                torch.testing.assert_close(
                    whole(p), wanted, rtol=1e-6, atol=1e-7, msg=f"{name} {used} {flushes}"
                )


@pytest.mark.parametrize("defer", ["all_reduce", "none", "all"])
@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="this torch has no such option"
)
@on_each_rank(RANKS)
def test_parameters_that_only_some_ranks_use(defer: str) -> None:
    """Each rank uses another layer of the same shape in each micro-batch."""
    model = Branches()
    reference = copy.deepcopy(model).double()
    for module in (model.apart, model):
        fully_shard(module, mesh=hybrid(2, 2))
    model.set_reduce_scatter_unused_params(True)
    optimizer = wrap(model, K)
    for index in range(K):
        with optimizer.accumulate(model, defer=defer):
            loss_of(model, index, None, [(dist.get_rank() + index) % RANKS], True).backward()
        for rank in range(RANKS):
            used = [(rank + index) % RANKS]
            (loss_of(reference, index, rank, used, True) / (K * RANKS)).backward()
        if index < K - 1:
            optimizer.step()
    assert_gradients(model, [p.grad for p in reference.parameters()])


@on_each_rank(RANKS)
def test_the_sums_are_float32() -> None:
    """With a wire of bfloat16, plain FSDP2's error grows with the number of micro-batches."""
    many = 128
    policy = MixedPrecisionPolicy(reduce_dtype=LOW)
    model, plain = (two_by_two(mp_policy=policy) for _ in range(2))
    optimizer = wrap(model, many)
    wanted = stock_gradients(model, range(many))
    for index in range(many):
        with optimizer.accumulate(model, defer="all_reduce"):
            loss_of(model, index).backward()
        plain.set_requires_all_reduce(index == many - 1)
        (loss_of(plain, index) / many).backward()
        if index < many - 1:
            assert {each.dtype for each in flat_sums(model) if each is not None} == {torch.float32}
            optimizer.step()
    errors = [
        sum(
            (whole(p.grad).double() - total).square().sum()
            for p, total in zip(net.parameters(), wanted, strict=True)
        )
        for net in (model, plain)
    ]
    norm = sum(total.square().sum() for total in wanted)
    ours, plains = ((error / norm).sqrt().item() for error in errors)
    assert ours < 3e-3 < plains / 1.5, (ours, plains)


def square() -> Any:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    for layer in layers:
        fully_shard(layer, mesh=hybrid(2, 2))
    return fully_shard(nn.Sequential(*layers), mesh=hybrid(2, 2))


class Reductions(TorchDispatchMode):
    """Adds up the bytes of shards that this rank passes to reduce-scatters and to all-reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.reduce_scattered = self.all_reduced = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "reduce_scatter" in operator.__name__:
            self.reduce_scattered += args[0].nbytes  # the output
        elif "allreduce" in operator.__name__:
            self.all_reduced += sum(tensor.nbytes for tensor in args[0])
        return operator(*args, **(kwargs or {}))


def train_square(model: Any, optimizer: fusedacc.AccumulatingOptimizer, defer: str) -> None:
    with optimizer.accumulate(model, defer=defer):
        model(torch.ones(2, WIDTH)).pow(2).mean().backward()
    optimizer.step(), optimizer.zero_grad()


@pytest.mark.parametrize(
    ("defer", "reduce_scatters", "all_reduces"), [("all", 1, 1), ("all_reduce", K, 1), ("none", K, K)]
)
@on_each_rank(RANKS)
def test_what_a_window_sends(defer: str, reduce_scatters: int, all_reduces: int) -> None:
    """Count in shards: all-reduces over the replicas are of shards only."""
    model = square()
    optimizer = wrap(model, K)
    for _ in range(2):
        with Reductions() as sent:
            for _ in range(K):
                train_square(model, optimizer, defer)
        assert (sent.reduce_scattered, sent.all_reduced) == (reduce_scatters * SHARDS, all_reduces * SHARDS)


@pytest.mark.parametrize(("defer", "kept"), [("all_reduce", SHARDS), ("all", 2 * SHARDS)])
@on_each_rank(RANKS)
def test_memory(defer: str, kept: int) -> None:
    """The first micro-batch of a window leaves sums of shards, and with "all" sums of whole parameters."""
    model = square()
    optimizer = wrap(model, K)

    def run() -> None:
        train_square(model, optimizer, defer)
        dist.barrier()
        time.sleep(0.05)  # gloo's threads free what they have sent

    found = []
    for _ in range(5):
        found.append(kept_by(run))
        for _ in range(K - 1):
            run()
    assert min(found) == pytest.approx(kept, rel=0.02), (found, kept)
    assert optimizer.accumulator_bytes == 0
    assert f"sums of shards are kept: {SHARDS:,} bytes on this rank" in optimizer.explain()


@on_each_rank(RANKS)
def test_refused() -> None:
    model = two_by_two()
    optimizer = wrap(model, K)

    def enter(optimizer: Any, *arguments: Any, **options: Any) -> Any:
        def run() -> None:
            with optimizer.accumulate(*arguments, **options):
                raise AssertionError("not refused")

        return run

    for defer in ("some", None, True):
        refused(
            ValueError,
            f"defer={defer!r}; allowed: 'all', 'all_reduce', 'none'",
            enter(optimizer, model, defer=defer),
        )
    for other in (None, nn.Linear(2, 2)):
        refused(ValueError, ALLOWED, enter(optimizer, other, defer="all_reduce"))
    flat = sharded()
    refused(
        ValueError,
        "its mesh has one dimension, of 4 ranks; allowed: a module",
        enter(wrap(flat, K), flat, defer="all_reduce"),
    )
    mixed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(mixed[1])
    fully_shard(mixed, mesh=hybrid(2, 2))
    refused(ValueError, "module '1' of the model", enter(wrap(mixed, K), mixed, defer="all_reduce"))
    refused(ValueError, "needs a counted loop", enter(wrap(two_by_two(), None), model, defer="all_reduce"))

    net = nn.Linear(2, 2)
    parallel = DistributedDataParallel(net)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    unattached = fusedacc.AccumulatingOptimizer(inner, K)
    refused(
        ValueError,
        "defer='none' does not support DistributedDataParallel",
        enter(unattached, parallel, defer="none"),
    )
    assert parallel.require_backward_grad_sync, "it was attached"
    refused(ValueError, ALLOWED, enter(unattached, parallel, defer="all_reduce"))
    unattached.close()
    for given in (parallel, dist.group.WORLD):
        attached = fusedacc.AccumulatingOptimizer(inner, K, data_parallel=given)
        refused(ValueError, "defer='none' does not support", enter(attached, net, defer="none"))
        refused(ValueError, "defer='none' does not support", enter(attached, defer="none"))
        with attached.accumulate(parallel, defer="all"):
            pass
        attached.close()
        with attached.accumulate(defer="none"):
            pass

    # Nothing has changed: the window trains as if nothing had been refused.
    assert not optimizer.has_partial_window
    for index in range(K):
        with optimizer.accumulate(model, defer="all_reduce"):
            loss_of(model, index).backward()
        optimizer.step()
    assert optimizer.num_updates == 1


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("attaches", [True, False])
def test_pipelines_are_refused(attaches):
    net = parts(1)
    fully_shard(net[0], mesh=hybrid(1, 1))
    schedule = scheduled("ScheduleGPipe", net)
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), K)
    if attaches:
        optimizer.attach(schedule)
    refused_for = pytest.raises(ValueError, match="pipeline schedules, and a ScheduleGPipe trains")
    with refused_for, optimizer.accumulate(net[0], defer="all_reduce"):
        run_schedule(schedule, 0)
    assert not optimizer.has_partial_window
    for index in range(K):
        with optimizer.accumulate(net[0], defer="none" if index else "all"):
            run_schedule(schedule, index)
        optimizer.step()
    assert optimizer.num_updates == 1


@pytest.mark.parametrize("steps", [K, None])
def test_without_ranks(steps):
    """A plain model has nothing to synchronize."""
    net = nn.Linear(2, 2)
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), steps)
    for defer in ("all", "none"):
        for model in (net, None):
            with optimizer.accumulate(model, defer=defer):
                net(torch.ones(1, 2)).sum().backward()
    refused_for = pytest.raises(ValueError, match=ALLOWED if steps else "needs a counted loop")
    with refused_for, optimizer.accumulate(net, defer="all_reduce"):
        pass
