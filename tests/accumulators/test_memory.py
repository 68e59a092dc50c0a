"""How long memory of accumulators is kept. Memory that the user still sees is not overwritten."""

import weakref

import pytest
import torch
from loops import LOW, micro_batch, network, wrap
from one_rank import process_group
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import fusedacc

KEPT = {
    "itself": lambda gradient: gradient,
    "detach": lambda gradient: gradient.detach(),
    "row": lambda gradient: gradient[0],
    "flat": lambda gradient: gradient.view(-1),
    "data": lambda gradient: gradient.data,
    "numpy": lambda gradient: torch.from_numpy(gradient.numpy()),
    "storage": lambda gradient: gradient.untyped_storage(),
}


def content(kept):
    """Return a copy of a tensor, or of the bytes of a storage, of which some may have no value."""
    tensor = kept if isinstance(kept, torch.Tensor) else torch.tensor([], dtype=torch.uint8).set_(kept)
    return tensor.clone()


@pytest.mark.parametrize("model_given", [False, True], ids=["", "model="])
@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("kept", KEPT)
def test_a_view_of_an_old_gradient_is_not_overwritten(kept, steps, model_given):
    if kept == "numpy":
        pytest.importorskip("numpy")
    model = network(LOW)
    optimizer = wrap(model, steps, lr=0.0, model=model if model_given else None)
    for window in range(3):
        for seed in range(steps or 1):
            micro_batch(model, optimizer, 10 * window + seed)
        views = [KEPT[kept](p.grad) for p in model.parameters()]
        values = [content(view) for view in views]
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        optimizer.zero_grad()
        if window == 0:
            first, first_values = views, values
    assert all(map(torch.equal, map(content, first), first_values))


@pytest.mark.parametrize("kept", ["row", "flat", "storage"])
def test_a_view_of_an_old_reduced_gradient_is_not_overwritten(kept, tmp_path):
    """With data_parallel= the sums are parts of one piece of memory, which every window uses."""
    with process_group("gloo", tmp_path):
        ddp = nn.parallel.DistributedDataParallel(network())
        inner = torch.optim.SGD(ddp.parameters(), lr=0.0)
        optimizer = fusedacc.AccumulatingOptimizer(inner, 2, data_parallel=ddp)
        found = []
        for seed in range(6):
            with optimizer.accumulate(ddp):
                ddp(
                    torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
                ).square().mean().backward()
            if seed % 2:
                views = [KEPT[kept](p.grad) for p in ddp.parameters()]
                found.append((views, [content(view) for view in views]))
            optimizer.step()
            optimizer.zero_grad()
        for views, values in found:
            assert all(map(torch.equal, map(content, views), values))
        optimizer.close()


@pytest.mark.parametrize("steps", [None, 4])
def test_zero_grad_frees_the_accumulators(uncollected, cpu_backend, steps):
    model = network()
    optimizer = wrap(model, steps, backend=cpu_backend)
    for _ in range(2):
        for seed in range(4):
            micro_batch(model, optimizer, seed)
        tensors = [weakref.ref(p.grad) for p in model.parameters()]
        memory = [StorageWeakRef(p.grad.untyped_storage()) for p in model.parameters()]
        optimizer.zero_grad()
        assert [reference() for reference in tensors] == [None] * 4
        assert all(reference.expired() for reference in memory)
        assert optimizer.accumulator_bytes == 0


class Produce(torch.autograd.Function):
    """Gives a parameter a new gradient that cannot become its accumulator, and counts the live ones."""

    @staticmethod
    def forward(ctx, x, param, alive, most):
        ctx.like, ctx.alive, ctx.most = param, alive, most
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        ctx.most.append(sum(not reference.expired() for reference in ctx.alive))
        made = torch.ones(ctx.like.shape[::-1], dtype=ctx.like.dtype)
        ctx.alive.append(StorageWeakRef(made.untyped_storage()))
        return gradient, made.t(), None, None


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
def test_at_most_two_large_gradients_are_alive_at_once(dtype, steps):
    params = [nn.Parameter(torch.zeros(1024, 512, dtype=dtype)) for _ in range(10)]
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(params, lr=0.0), steps)
    for _ in range(2):
        alive, most = [], []
        x = torch.zeros((), requires_grad=True)
        for p in params:
            x = Produce.apply(x, p, alive, most)
        x.backward()
        assert max(most) <= 2
        assert all(reference.expired() for reference in alive)
        optimizer.step()
    assert all((p.grad == (1 if steps else 2)).all() for p in params)
