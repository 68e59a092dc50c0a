"""A process group that `data_parallel=` does not name: which gradients code outside the wrapper reduces."""

import contextlib
import functools
import os
from unittest import mock

import pages
import pytest
import torch
import torch.distributed as dist
from loops import wrap
from one_rank import process_group
from ranks import on_each_rank
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import fusedacc
from fusedacc.autograd.reasons import HOOK_AFTER_NODE, REASONS
from fusedacc.kernels import native_module

K, WINDOWS, RANKS = 3, 3, 2


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 200), nn.Tanh(), nn.Linear(200, 150), nn.Tanh(), nn.Linear(150, 1)).to(
        dtype
    )


def loss_of(model: nn.Module, index: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * index + rank)
    x = torch.randn(4, 6, generator=generator)
    return model(x.to(next(model.parameters()).dtype)).float().pow(2).mean()


def exact(model: nn.Module, indices: range) -> list[Tensor]:
    """Return the ranks' mean of the summed gradients, in float64, for a copy with these parameters."""
    copied = network(torch.float64)
    copied.load_state_dict(model.state_dict())
    for index in indices:
        for rank in range(RANKS):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * index + rank))
            x = x.to(next(model.parameters()).dtype).double()
            (copied(x).pow(2).mean() / RANKS).backward()
    return [param.grad for param in copied.parameters()]


@pytest.mark.parametrize(
    ("steps", "dtype", "in_place"),
    [
        (None, torch.float32, True),
        (None, torch.bfloat16, False),
        (None, torch.bfloat16, True),
        (K, torch.float32, True),
    ],
)
@on_each_rank(RANKS)
def test_a_loop_that_reduces_by_hand(steps: int | None, dtype: torch.dtype, in_place: bool) -> None:
    """If the loop reduces p.grad once per window, the sums are float32 and equal on all ranks."""
    model = network(dtype)
    optimizer = wrap(model, steps, reduction="sum", **({"model": model} if in_place else {}))
    for window in range(WINDOWS):
        indices = range(window * K, window * K + K)
        wanted = exact(model, indices)
        for index in indices:
            loss_of(model, index, dist.get_rank()).backward()
            if steps is not None and index != indices[-1]:
                optimizer.step(), optimizer.zero_grad()
        for param, gradient in zip(model.parameters(), wanted, strict=True):
            dist.all_reduce(param.grad)
            param.grad /= RANKS
            error = (param.grad.double() - gradient).norm() / gradient.norm()
            assert error < (1e-6 if dtype is torch.float32 else 1.5e-2), error
        assert all(param.grad.dtype is torch.float32 for param in model.parameters()) or steps is not None
        optimizer.step(), optimizer.zero_grad()
    assert optimizer.num_updates == WINDOWS
    assert ("gemm" in optimizer.explain()) is in_place


@pytest.mark.parametrize("made_late", [False, True])
def test_a_reducer_is_found_whenever_it_is_made(made_late, tmp_path):
    """Create the reducer before the wrapper or after a window. Without it, the wrapper adds again."""
    model = network()
    with process_group("gloo", tmp_path):
        parallel = None if made_late else DistributedDataParallel(model)
        optimizer = wrap(model, None)
        assert (REASONS[HOOK_AFTER_NODE].words in optimizer.explain()) is not made_late
        if made_late:
            loss_of(model, 0, 0).backward()
            optimizer.step(), optimizer.zero_grad()
            parallel = DistributedDataParallel(model)
        loss_of(parallel, 1, 0).backward()
        assert REASONS[HOOK_AFTER_NODE].words in optimizer.explain()
        del parallel
        optimizer.zero_grad()
        loss_of(model, 2, 0).backward()
        assert REASONS[HOOK_AFTER_NODE].words not in optimizer.explain()


@pytest.mark.parametrize("native", ["0", ""])
@pytest.mark.parametrize("steps", [None, K])
@on_each_rank(RANKS)
def test_other_parameters_are_captured(steps: int | None, native: str) -> None:
    """A DistributedDataParallel reduces the gradients of the first layers only."""
    with mock.patch.dict(os.environ, FUSEDACC_ENGINE=native):
        model = network()
        parallel = nn.Sequential(DistributedDataParallel(model[:4]), model[4])
        optimizer = wrap(model, steps, reduction="sum", model=model)
    for window in range(WINDOWS):
        wanted = exact(model, range(window * K, window * K + K))
        alone = network(torch.float64)
        alone.load_state_dict(model.state_dict())
        for index in range(window * K, window * K + K):
            loss_of(parallel, index, dist.get_rank()).backward()
            loss_of(alone, index, dist.get_rank()).backward()
            if steps is not None and index % K != K - 1:
                optimizer.step(), optimizer.zero_grad()
        of_last = [param.grad for param in alone[4].parameters()]
        for param, gradient in zip(model.parameters(), wanted[:-2] + of_last, strict=True):
            assert (param.grad.double() - gradient).norm() / gradient.norm() < 1e-6
        optimizer.step(), optimizer.zero_grad()
        with torch.no_grad():
            dist.broadcast(model[4].weight, 0), dist.broadcast(model[4].bias, 0)
    lines = optimizer.explain().splitlines()
    num_stock = sum(" stock " in line for line in lines)
    assert num_stock == (4 if native_module.loaded() is not None and native != "0" else 6)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1_reduces_its_parameters(use_orig_params, tmp_path):
    alone = network()
    stock = torch.optim.SGD(alone.parameters(), lr=0.1)
    with process_group("gloo", tmp_path):
        parallel = FullyShardedDataParallel(
            network(), device_id=torch.device("cpu"), use_orig_params=use_orig_params
        )
        optimizer = wrap(parallel, K)
        for index in range(K * WINDOWS):
            loss_of(parallel, index, 0).backward()
            optimizer.step(), optimizer.zero_grad()
            (loss_of(alone, index, 0) / K).backward()
            if index % K == K - 1:
                stock.step(), stock.zero_grad()
        assert optimizer.num_updates == WINDOWS
        with FullyShardedDataParallel.summon_full_params(parallel):
            flat = torch.cat([param.detach().flatten() for param in parallel.parameters()])
    torch.testing.assert_close(flat, torch.cat([param.detach().flatten() for param in alone.parameters()]))


def trained(micro_batches: int, window: int) -> Tensor:
    """Return all weights after SGD in float64, in windows of this many micro-batches of each rank."""
    alone = network(torch.float64)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for index in range(micro_batches):
        for rank in range(RANKS):
            (loss_of(alone, index, rank) / window / RANKS).backward()
        if index % window == window - 1:
            optimizer.step(), optimizer.zero_grad()
    return torch.cat([param.detach().flatten() for param in alone.parameters()]).float()


def whole(parallel: FullyShardedDataParallel) -> Tensor:
    """Return all weights of a sharded model."""
    with FullyShardedDataParallel.summon_full_params(parallel):
        return torch.cat([param.detach().flatten() for param in parallel.parameters()])


class Losses(nn.Module):
    """Takes the index of a micro-batch, and returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, index: int) -> Tensor:
        return loss_of(self.model, index, dist.get_rank())


shard = functools.partial(FullyShardedDataParallel, device_id=torch.device("cpu"))


@pytest.mark.parametrize("within_context", [False, True])
@on_each_rank(RANKS)
def test_shards_of_fsdp1_get_the_mean_over_ranks(within_context: bool) -> None:
    """`accumulate(model)` does not enter FSDP1's `no_sync()`."""
    parallel = shard(network(), use_orig_params=True)
    optimizer = wrap(parallel, K)
    for index in range(K * WINDOWS):
        with optimizer.accumulate(parallel) if within_context else contextlib.nullcontext():
            loss_of(parallel, index, dist.get_rank()).backward()
        optimizer.step(), optimizer.zero_grad()
    assert optimizer.num_updates == WINDOWS
    torch.testing.assert_close(whole(parallel), trained(K * WINDOWS, K))


@on_each_rank(RANKS)
def test_the_code_for_fsdp1_in_the_documentation() -> None:
    """Its manual loop enters FSDP1's `no_sync()`, in windows of four micro-batches.

    SGD takes the place of AdamW, whose first update takes only the sign of a gradient.
    """
    given = {
        "torch": mock.Mock(optim=mock.Mock(AdamW=functools.partial(torch.optim.SGD, lr=0.1))),
        "contextlib": contextlib,
        "fusedacc": fusedacc,
        "FullyShardedDataParallel": shard,
        "network": Losses(network()),
        "loader": [(index, None) for index in range(8)],
        "criterion": lambda loss, _: loss,
    }
    found = pages.run("../with-what-you-use", only="FullyShardedDataParallel(network", **given)
    assert found["optimizer"].num_updates == 2
    torch.testing.assert_close(whole(found["model"]), trained(8, 4))


@pytest.mark.parametrize("native", ["0", ""])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("reduction", ["weighted", "normalized"])
def test_weights_in_a_manual_loop(reduction, view, native, tmp_path, monkeypatch):
    """The sum is not overwritten by a DistributedDataParallel whose bucket is p.grad."""
    monkeypatch.setenv("FUSEDACC_ENGINE", native)
    model = nn.Linear(3, 1, bias=False).double()
    micro_batches = ((2.0, 1.0), (3.0, 10.0), (1.0, 100.0))
    with process_group("gloo", tmp_path):
        parallel = DistributedDataParallel(model, gradient_as_bucket_view=view)
        optimizer = wrap(model, None, lr=1.0, reduction=reduction)
        for _ in range(3):
            before = model.weight.detach().clone()
            for weight, value in micro_batches:
                with optimizer.accumulate(weight=weight):
                    parallel(torch.full((1, 3), value).double()).sum().backward()
            optimizer.step(), optimizer.zero_grad()
            terms = [weight * value if reduction == "weighted" else value for weight, value in micro_batches]
            torch.testing.assert_close(
                before - model.weight.detach(), torch.full((1, 3), sum(terms) / 6).double()
            )


@pytest.mark.parametrize("native", ["0", ""])
def test_a_stochastic_sum_in_a_manual_loop(native, tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDACC_ENGINE", native)
    model = nn.Linear(3, 1, bias=False).bfloat16()
    with process_group("gloo", tmp_path):
        parallel = DistributedDataParallel(model)
        optimizer = wrap(model, None, accumulate_dtype=torch.bfloat16, rounding="stochastic", seed=1)
        for value in range(1, 5):
            parallel(torch.full((1, 3), float(value)).bfloat16()).sum().backward()
        assert model.weight.grad.tolist() == [[10.0] * 3]
        optimizer.close()


@pytest.mark.parametrize("native", ["0", ""])
def test_sparse_gradients_are_put_aside(native, tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDACC_ENGINE", native)
    model = nn.Embedding(5, 3, sparse=True)
    with process_group("gloo", tmp_path):
        optimizer = wrap(model, None, lr=1.0)
        before = model.weight.detach().clone()
        model(torch.tensor([1, 2])).sum().backward()
        with optimizer.ignore():
            model(torch.tensor([1, 3])).sum().backward()
        optimizer.step()
        assert (before - model.weight.detach())[:, 0].tolist() == pytest.approx([0, 1, 1, 0, 0])
