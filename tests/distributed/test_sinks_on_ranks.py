"""Sinks on two ranks: with `data_parallel=`, and under FSDP2 with deferred reduction."""

import pytest
import sink_functions
import torch
import torch.distributed as dist
from fsdp_setting import whole, world
from loops import Failure, fail
from ranks import on_each_rank
from ranks_setting import small_buckets
from sink_functions import Model, Product, Written, loss_of, twin_of
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fusedacc
from fusedacc.kernels import native_module

pytestmark = pytest.mark.skipif(not native_module.loaded(), reason="sinks need the native engine")


class Counted:
    """Records in a `with` block whether each call of `fusedacc.sink` returned a sink."""

    def __enter__(self) -> list[bool]:
        self.patch = pytest.MonkeyPatch()
        return sink_functions.count_sinks(self.patch)

    def __exit__(self, *_: object) -> None:
        self.patch.undo()


def seeds(index: int) -> list[int]:
    """Return the seeds of a micro-batch's data on both ranks."""
    return [2 * index, 2 * index + 1]


def assert_means(model: nn.Module, twin: nn.Module, tolerance: float) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None, name
        found = whole(ours.grad).double()
        error = (found - theirs.grad).abs().max() / theirs.grad.abs().max()
        assert error < tolerance, (name, error.item())


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("kind", ["ddp", "group"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_each_rank(2)
def test_data_parallel(dtype: torch.dtype, kind: str, steps: int) -> None:
    """In the third window, buckets are reduced during the backward pass."""
    model = Model().to(dtype)
    called = DistributedDataParallel(model) if kind == "ddp" else model
    told = called if kind == "ddp" else dist.group.WORLD
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with small_buckets(), Counted() as found:
        optimizer = fusedacc.AccumulatingOptimizer(inner, steps, data_parallel=told)
        for window in range(3):
            twin = twin_of(model)
            for index in range(window * steps, (window + 1) * steps):
                for seed in seeds(index):
                    (loss_of(twin, seed) / (2 * steps)).backward()
                loss_of(called, seeds(index)[dist.get_rank()]).backward()
                if (index + 1) % steps:
                    assert all(param.grad is None for param in model.parameters())
                    optimizer.step()
            assert_means(model, twin, 1e-5 if dtype is torch.float32 else 0.05)
            optimizer.step()
            optimizer.zero_grad()
        assert sum(found) == 8 * 3 * steps


@on_each_rank(2)
def test_a_reducer_that_the_wrapper_does_not_know_gets_the_gradients() -> None:
    model = Model()
    called = DistributedDataParallel(model)
    twin = twin_of(model)
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for seed in seeds(0):
        (loss_of(twin, seed) / 2).backward()
    with Counted() as found:
        loss_of(called, seeds(0)[dist.get_rank()]).backward()
        assert not any(found)
    assert_means(model, twin, 1e-5)
    optimizer.close()


class Layer(nn.Module):
    """A layer of functions with sinks, or of PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(16, 8) / 3)
        self.down = nn.Parameter(torch.randn(8, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is torch.float64:
            return x + torch.tanh(x @ self.up.t()) @ self.down.t()
        return x + Written.apply(torch.tanh(Product.apply(x, self.up)), self.down)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer(), nn.Linear(8, 3))


def squares(model: nn.Module, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return model(x).double().square().mean()


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("steps", [4, None])
@on_each_rank(2)
def test_fsdp2_with_deferred_reduction(steps: int | None, low: bool) -> None:
    count = 4
    model, twin = network(), network().double()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if low else MixedPrecisionPolicy()
    for layer in (model[0], model[1]):
        fully_shard(layer, mesh=world(), mp_policy=policy)
    fully_shard(model, mesh=world(), mp_policy=policy)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = fusedacc.AccumulatingOptimizer(inner, steps, reduction="sum", model=model)
    for _ in range(2):
        twin.load_state_dict({name: whole(value) for name, value in model.state_dict().items()})
        twin.zero_grad()
        for index in range(count):
            for seed in seeds(index):
                (squares(twin, seed, torch.float64) / 2).backward()
            with Counted() as found:
                is_last = index == count - 1
                if steps is None:
                    model.set_requires_gradient_sync(is_last)
                    squares(model, seeds(index)[dist.get_rank()]).backward()
                else:
                    with optimizer.accumulate(model):
                        squares(model, seeds(index)[dist.get_rank()]).backward()
                        if not is_last:
                            optimizer.step()
                assert len(found) == 4
                assert all(found)
        assert_means(model, twin, 0.03 if low else 1e-5)
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.explain().count(" sink ") == 4


@on_each_rank(2)
def test_fsdp2_without_model_has_no_sinks() -> None:
    model, twin = network(), network().double()
    fully_shard(model, mesh=world())
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), 2)
    for index in range(2):
        for seed in seeds(index):
            (squares(twin, seed, torch.float64) / 4).backward()
        with Counted() as found, optimizer.accumulate(model):
            squares(model, seeds(index)[dist.get_rank()]).backward()
            assert not any(found)
            if index == 0:
                optimizer.step()
    assert_means(model, twin, 1e-5)


class Failing(Written):
    """Catches an exception in `write`."""

    @staticmethod
    def backward(ctx, grad):
        try:
            with fusedacc.sink(ctx.saved_tensors[1]).write() as (accumulator, _scale, _beta):
                accumulator.fill_(7.0)
                fail()
        except Failure:
            return None, None


@on_each_rank(2)
def test_an_exception_in_write_taints_the_window_under_fsdp2() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Layer())
    fully_shard(model, mesh=world())
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = fusedacc.AccumulatingOptimizer(inner, 3, model=model)
    layer = model[0]
    layer.forward = lambda x: Failing.apply(torch.tanh(Product.apply(x, layer.up)), layer.down)
    with optimizer.accumulate(model):
        model(torch.randn(5, 8)).sum().backward()
        with pytest.raises(RuntimeError, match="interrupted a backward"):
            optimizer.step()
    optimizer.discard()
