"""FSDP2 on two ranks with `model=` and deferred reduction: sums of unsharded gradients, in place."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_setting import hybrid, whole, world
from memory import allocated_by
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fusedacc
from fusedacc.distributed import fsdp

K, WIDTH, RANKS = 4, 160, 2
LOW = torch.bfloat16


class Block(nn.Module):
    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def inside(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inside, x, use_reentrant=False) if self.checkpoints else self.inside(x)


class Net(nn.Module):
    """Rows of an embedding, which the head shares if `tied`, and two blocks."""

    def __init__(self, checkpoints: bool = False, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(300, WIDTH)
        self.blocks = nn.ModuleList(Block(checkpoints) for _ in range(2))
        self.head = nn.Linear(WIDTH, 300, bias=False)
        if tied:
            self.head.weight = self.rows.weight

    def forward(self, tokens: Tensor, num_blocks: int = 2) -> Tensor:
        x = self.rows(tokens)
        for block in self.blocks[:num_blocks]:
            x = block(x)
        return self.head(x)


def loss_of(model: nn.Module, index: int, rank: int | None = None, num_blocks: int = 2) -> Tensor:
    """The mean loss of a rank's micro-batch of that number; None: of this rank's."""
    rank = dist.get_rank() if rank is None else rank
    tokens = torch.randint(300, (8,), generator=torch.Generator().manual_seed(10 * index + rank))
    return model(tokens, num_blocks).float().pow(2).mean()


def sharded(
    dtype: torch.dtype = torch.float32, made: dict | None = None, mesh: Any = None, **options: Any
) -> Any:
    model = Net(**(made or {})).to(dtype)
    for block in model.blocks:
        fully_shard(block, mesh=mesh or world(), **options)
    return fully_shard(model, mesh=mesh or world(), **options)


def wrap(model: nn.Module, steps: int | None, **options: Any) -> fusedacc.AccumulatingOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    return fusedacc.AccumulatingOptimizer(inner, steps, model=model, **options)


def exact(
    model: nn.Module, compute: torch.dtype, made: dict, indices: range, scale: float
) -> dict[str, Tensor]:
    """By name: sums over micro-batches of the ranks' mean gradient, computed in that dtype, in float64."""
    copied = Net(**made)
    names = [name for name, _ in copied.named_parameters()]
    full = {name: whole(param).detach().to(compute) for name, param in model.named_parameters()}
    copied = copied.to(compute)
    with torch.no_grad():
        for name, param in copied.named_parameters():
            param.copy_(full[name])
    found = {name: torch.zeros(full[name].shape, dtype=torch.float64) for name in names}
    for index in indices:
        for rank in range(RANKS):
            copied.zero_grad()
            loss_of(copied, index, rank).backward()
            for name, param in copied.named_parameters():
                if param.grad is not None:
                    found[name] += param.grad.double() * (scale / RANKS)
    return found


class Wire(TorchDispatchMode):
    """Counts reduce-scatters, and notes the dtypes that they send."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.dtypes = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "_reduce_scatter_base" in str(func):
            self.count += 1
            self.dtypes.add(args[1].dtype)
        return func(*args, **(kwargs or {}))


#: By name: the shards' dtype, FSDP2's policy, the dtypes of products and on the wire, the largest error.
POLICIES = {
    "float32": (torch.float32, {}, torch.float32, torch.float32, 1e-6),
    "bfloat16 products": (
        torch.float32,
        {"param_dtype": LOW, "reduce_dtype": torch.float32},
        LOW,
        torch.float32,
        5e-3,
    ),
    "bfloat16 products and wire": (torch.float32, {"param_dtype": LOW, "reduce_dtype": LOW}, LOW, LOW, 5e-3),
    "bfloat16 wire": (torch.float32, {"reduce_dtype": LOW}, torch.float32, LOW, 5e-3),
    "bfloat16 shards": (LOW, {}, LOW, LOW, 5e-3),
    "bfloat16 shards, float32 wire": (LOW, {"reduce_dtype": torch.float32}, LOW, torch.float32, 3e-3),
}
#: By name: options of `fully_shard` and of the network.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "resharded": ({}, {}),
    "kept": ({"reshard_after_forward": False}, {}),
    "checkpointed": ({}, {"checkpoints": True}),
    "tied": ({}, {"tied": True}),
    "prefetched": ({}, {}),
    "compiled": ({}, {}),
}


def a_window(policy: str, way: str, counted: bool) -> None:
    dtype, settings, compute, wire, largest = POLICIES[policy]
    options, made = WAYS[way]
    model = sharded(dtype, made, mp_policy=MixedPrecisionPolicy(**settings), **options)
    optimizer = wrap(model, K if counted else None)
    first, second = model.blocks
    if way == "prefetched":
        first.set_modules_to_forward_prefetch([second])
        second.set_modules_to_backward_prefetch([first])
    elif way == "compiled":
        for block in model.blocks:
            block.compile(backend="aot_eager")
    for window in range(2):
        indices = range(window * K, window * K + K)
        wanted = exact(model, compute, made, indices, 1 / K if counted else 1.0)
        with Wire() as sent:
            for index in indices:
                model.set_reshard_after_backward(way != "kept" or index == indices[-1])
                if counted:
                    with optimizer.accumulate(model):
                        loss_of(model, index).backward()
                else:
                    model.set_requires_gradient_sync(index == indices[-1])
                    loss_of(model, index).backward()
                if index != indices[-1]:
                    assert way == "kept" or all(param.grad is None for param in model.parameters())
                    if counted:
                        optimizer.step(), optimizer.zero_grad()
        assert (sent.count, sent.dtypes) == (3, {wire})
        for name, param in model.named_parameters():
            error = (whole(param.grad).double() - wanted[name]).norm() / wanted[name].norm()
            assert error < largest, (name, error)
        optimizer.step(), optimizer.zero_grad()
    rows = {line.split()[0]: line for line in optimizer.explain().splitlines() if line.strip()}
    assert "embedding" in rows["rows.weight"]
    assert all("gemm" in rows[f"blocks.{block}.up.weight"] for block in (0, 1)), optimizer.explain()
    assert "unsharded, reduced by FSDP2; sums in float32" in optimizer.explain()
    optimizer.close()


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_window_is_summed_in_float32_and_reduced_once(policy, counted):
    on_ranks(RANKS, a_window, policy, "resharded", counted)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "resharded"])
def test_it_holds_for_every_way_to_shard_and_to_compute(way):
    on_ranks(RANKS, a_window, "bfloat16 products", way, True)


def the_hybrid_kind(replicas: int, shards: int) -> None:
    model = sharded(mesh=hybrid(replicas, shards))
    optimizer = wrap(model, K)
    wanted = exact(model, torch.float32, {}, range(K), 1 / K)
    for index in range(K):
        with optimizer.accumulate(model):
            loss_of(model, index).backward()
        if index < K - 1:
            optimizer.step(), optimizer.zero_grad()
    for name, param in model.named_parameters():
        torch.testing.assert_close(whole(param.grad).double(), wanted[name], rtol=1e-5, atol=1e-7)
    assert "unsharded, reduced by FSDP2" in optimizer.explain()
    optimizer.close()


@pytest.mark.parametrize(("replicas", "shards"), [(2, 1), (1, 2)])
def test_replicas_of_shards(replicas, shards):
    on_ranks(RANKS, the_hybrid_kind, replicas, shards)


def first_used_in_the_last() -> None:
    """A block whose gradients come in the last micro-batch of the second and third window alone."""
    model = sharded()
    optimizer = wrap(model, 2)
    names = [name for name, _ in model.named_parameters() if name.startswith("blocks.1")]
    for index in (8, 9):
        with optimizer.accumulate(model):
            loss_of(model, index).backward()
        optimizer.step(), optimizer.zero_grad()
    for window in range(2):
        wanted = exact(model, torch.float32, {}, range(2 * window + 1, 2 * window + 2), 0.5)
        for index in (2 * window, 2 * window + 1):
            with optimizer.accumulate(model):
                loss_of(model, index, num_blocks=1 + index % 2).backward()
            if index % 2 == 0:
                optimizer.step(), optimizer.zero_grad()
        params = dict(model.named_parameters())
        for name in names:
            gradient = whole(params[name].grad).double()
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-5, atol=1e-7)
        optimizer.step(), optimizer.zero_grad()
    optimizer.close()


def test_what_is_first_used_in_the_last_micro_batch():
    on_ranks(RANKS, first_used_in_the_last)


class _Failure(Exception):
    pass


def _fail(_gradient: Tensor) -> None:
    raise _Failure


def what_changes_in_a_window() -> None:
    """An exception and discard(), a frozen layer and its thaw, ignore(), flush(), close()."""
    model = sharded()
    optimizer = wrap(model, K)
    for block in model.blocks:
        block.up.requires_grad_(False)

    def run(index: int) -> None:
        with optimizer.accumulate(model):
            loss_of(model, index).backward()

    run(7), optimizer.step()
    with contextlib.suppress(_Failure), optimizer.accumulate(model):
        loss = loss_of(model, 8)
        loss.register_hook(_fail)
        loss.backward()
    model.reset_iter_state()
    optimizer.discard()
    for block in model.blocks:
        block.up.requires_grad_(True)
    wanted = exact(model, torch.float32, {}, range(3), 1 / 3)
    seen: dict[str, Tensor] = {}
    handle = optimizer.optimizer.register_step_pre_hook(
        lambda *_: seen.update((name, whole(param.grad)) for name, param in model.named_parameters())
    )
    for index in range(3):
        with contextlib.suppress(RuntimeError), optimizer.ignore():
            model.set_requires_gradient_sync(True)
            if index == 0:
                loss_of(model, 9).backward()
        run(index)
        optimizer.step(), optimizer.zero_grad()
    optimizer.flush()
    handle.remove()
    for name, gradient in seen.items():
        torch.testing.assert_close(gradient.double(), wanted[name], rtol=1e-5, atol=1e-7)
    assert len(seen) == len(wanted)
    run(4)
    optimizer.close()
    assert not any("post_backward" in group.__dict__ for group in groups_of(model))
    model.set_requires_gradient_sync(True)
    model.zero_grad()
    wanted = exact(model, torch.float32, {}, range(5, 6), 1.0)
    loss_of(model, 5).backward()  # the part of a window has gone with the wrapper
    for name, param in model.named_parameters():
        torch.testing.assert_close(whole(param.grad).double(), wanted[name], rtol=1e-5, atol=1e-7)


def groups_of(model: nn.Module) -> list[Any]:
    states = [model._get_fsdp_state(), *(block._get_fsdp_state() for block in model.blocks)]
    return [group for state in states for group in fsdp._groups_of(state)]


def test_a_window_that_is_disturbed():
    on_ranks(RANKS, what_changes_in_a_window)


def memory_of_a_window() -> None:
    """Micro-batches after the first allocate no gradient of a weight's size."""
    model = sharded(reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    optimizer = wrap(model, K)
    weight = model.blocks[0].up.weight.numel() * 4

    def run(index: int) -> None:
        with optimizer.accumulate(model):
            loss_of(model, index).backward()

    run(0), optimizer.step(), run(1), optimizer.step()
    held = [allocated_by(lambda: run(2))]
    assert held[0] < 4 * weight, (held, weight)  # PyTorch allocates each of six weights' gradients
    optimizer.step(), run(3), optimizer.step()
    groups = groups_of(model)
    assert all(each._unsharded_param.grad is None for group in groups for each in group.fsdp_params)
    optimizer.close()


def test_memory():
    on_ranks(RANKS, memory_of_a_window)


def without_deferral() -> None:
    """Where every micro-batch synchronises, nothing changes."""
    model = sharded()
    optimizer = wrap(model, None)
    loss_of(model, 0).backward()
    assert not any("post_backward" in group.__dict__ for group in groups_of(model))
    assert "model= adds in place only while set_requires_gradient_sync(False)" in optimizer.explain()
    optimizer.close()


def together() -> None:
    """What is left to FSDP2, and why."""
    model = Net()
    fully_shard(list(model.blocks), mesh=world())
    fully_shard(model, mesh=world())
    optimizer = wrap(model, 2)
    wanted = exact(model, torch.float32, {}, range(2), 0.5)
    for index in range(2):
        with optimizer.accumulate(model):
            loss_of(model, index).backward()
        if index == 0:
            optimizer.step(), optimizer.zero_grad()
    for name, param in model.named_parameters():
        torch.testing.assert_close(whole(param.grad).double(), wanted[name], rtol=1e-5, atol=1e-7)
    assert "fully_shard was given several modules together" in optimizer.explain()
    optimizer.close()


@pytest.mark.parametrize("check", [without_deferral, together])
def test_what_is_left_to_fsdp2(check):
    on_ranks(RANKS, check)
