"""When wrapped training has the same bits as PyTorch, as the README promises."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from loops import LOW, assert_equal_weights
from ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedacc


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(37, 29), nn.GELU(), nn.LayerNorm(29), nn.Linear(29, 13)).to(dtype)


def loss_of(model: nn.Module, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(9, 37, generator=generator), torch.randint(13, (9,), generator=generator)
    return nn.functional.cross_entropy(model(x.to(dtype)).float(), y)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    # Only the loop over single tensors takes float32 gradients of bfloat16 parameters.
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def set_grad_dtype(model: nn.Module, dtype: torch.dtype | None) -> None:
    for parameter in model.parameters():
        parameter.grad_dtype = dtype


def trained_plainly(steps: int, dtype: torch.dtype, float32_gradients: bool) -> nn.Module:
    """Train with PyTorch's loop and float32 sums. The update gets them in float32 or in `dtype`."""
    model = network(dtype)
    optimizer = sgd(model)
    for update in range(3):
        set_grad_dtype(model, torch.float32)
        for index in range(steps):
            (loss_of(model, update * steps + index, dtype) / steps).backward()
        if not float32_gradients:
            sums = [parameter.grad for parameter in model.parameters()]
            optimizer.zero_grad()
            set_grad_dtype(model, dtype)
            for parameter, total in zip(model.parameters(), sums, strict=True):
                parameter.grad = total.to(dtype)
        optimizer.step(), optimizer.zero_grad()
    return model


@pytest.mark.parametrize("when", ["never", "before", "after"])
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize(
    ("counted", "steps"), [(True, 1), (True, 2), (True, 8), (False, 1), (False, 3), (False, 8)]
)
def test_wrapped_training_has_the_bits_of_pytorch(counted, steps, dtype, when):
    """A counted loop does for powers of two, a manual loop always.

    `grad_dtype` chooses the update's dtype.
    """
    model = network(dtype)
    if when == "before":
        set_grad_dtype(model, torch.float32)
    optimizer = fusedacc.AccumulatingOptimizer(sgd(model), steps if counted else None)
    if when == "after":
        set_grad_dtype(model, torch.float32)
    for index in range(3 * steps):
        loss = loss_of(model, index, dtype)
        (loss if counted else loss / steps).backward()
        if counted or (index + 1) % steps == 0:
            optimizer.step(), optimizer.zero_grad()
    wanted = trained_plainly(steps, dtype, when != "never")
    assert_equal_weights(model, wanted)
    optimizer.close()
    expected_dtype = dtype if when == "never" else torch.float32
    assert all(parameter.grad_dtype == expected_dtype for parameter in model.parameters())


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("scale", [1.0, 4096.0])
def test_float16_has_the_bits_of_pytorch_without_subnormal_gradients(counted, scale):
    """The counted loop divides gradients, PyTorch's loop the loss. A scaled loss keeps gradients normal."""
    ours, plain = network(torch.float16), network(torch.float16)
    for model in (ours, plain):
        set_grad_dtype(model, torch.float32)
    optimizer = fusedacc.AccumulatingOptimizer(sgd(ours), 8 if counted else None)
    for index in range(8):
        (loss_of(plain, index, torch.float16) * scale / 8).backward()
        (loss_of(ours, index, torch.float16) * (scale if counted else scale / 8)).backward()
        if counted and index < 7:
            optimizer.step()
    pairs = zip(ours.parameters(), plain.parameters(), strict=True)
    same = all(torch.equal(mine.grad, theirs.grad) for mine, theirs in pairs)
    assert same == (scale > 1 or not counted)


def test_the_update_gets_a_grad_dtype_narrower_than_the_parameters():
    """The sums stay in float32."""
    model = network()
    optimizer = fusedacc.AccumulatingOptimizer(sgd(model), 2)
    set_grad_dtype(model, LOW)
    for index in range(2):
        loss_of(model, index).backward()
        optimizer.step()
    twin = network()
    found = [torch.autograd.grad(loss_of(twin, index), list(twin.parameters())) for index in range(2)]
    for parameter, *gradients in zip(model.parameters(), *found, strict=True):
        rounded = [gradient.to(LOW).float() for gradient in gradients]  # autograd rounds each one
        assert torch.equal(parameter.grad, (sum(rounded) / 2).to(LOW))


def ddp_bits() -> None:
    plain, model = network(), network()
    plain_ddp, ddp = DistributedDataParallel(plain), DistributedDataParallel(model)
    plain_optimizer = sgd(plain)
    optimizer = fusedacc.AccumulatingOptimizer(sgd(model), 4, data_parallel=ddp)
    for index in range(12):
        seed = 2 * index + dist.get_rank()
        last = (index + 1) % 4 == 0
        with contextlib.nullcontext() if last else plain_ddp.no_sync():
            (loss_of(plain_ddp, seed) / 4).backward()
        if last:
            plain_optimizer.step(), plain_optimizer.zero_grad()
        loss_of(ddp, seed).backward()
        optimizer.step(), optimizer.zero_grad()
    assert_equal_weights(model, plain)


def test_the_counted_loop_has_the_bits_of_ddp_on_two_ranks():
    on_ranks(2, ddp_bits)
