"""Tensor parallelism with `model=`: each rank adds its part of a weight gradient to its own shard."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_setting import whole
from loops import wrap
from memory import has_amx, peak_of
from ranks import mesh_of, on_each_rank, on_ranks
from ranks_setting import lacking
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fusedacc
from fusedacc.kernels import local_parts
from fusedacc.nn.linear import PARTIAL

K, WIDTH, TOKENS, UPDATES = 3, 128, 8, 2
WEIGHTS = {"up.weight", "down.weight"}


class Net(nn.Module):
    """A block of two Linear layers between a norm and a head."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias)
        self.head = nn.Linear(WIDTH, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.down(torch.tanh(self.up(self.norm(x)))))


#: By name: how the modules are parallelized, and whether a rank's input is its part of the sequence.
PLANS: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({"up": ColwiseParallel(), "down": RowwiseParallel()}, False),
    "sequence": (
        {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
        True,
    ),
}


def loss_of(model: nn.Module, index: int, replica: int = 0, part: tuple[int, int] = (0, 1)) -> Tensor:
    """Return the loss of a micro-batch for one of several parts of its sequence."""
    x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(10 * index + replica))
    own = x.chunk(part[1], 1)[part[0]]
    return model(own.to(next(model.parameters()).dtype)).float().pow(2).mean()


def parallel(
    plan: str, mesh: Any, dtype: torch.dtype, bias: bool = True
) -> tuple[nn.Module, tuple[int, int]]:
    """Return the model, and which part of a sequence this rank's input is."""
    styles, in_parts = PLANS[plan]
    model = parallelize_module(Net(bias).to(dtype), mesh, styles)
    return model, (mesh.get_local_rank(), mesh.size()) if in_parts else (0, 1)


def exact(
    values: dict[str, Tensor], bias: bool, indices: range, scale: float, replicas: int
) -> dict[str, Tensor]:
    """Return the gradients of one process in float64, by name."""
    model = Net(bias).double()
    model.load_state_dict({name: value.double() for name, value in values.items()})
    for index in indices:
        for replica in range(replicas):
            (loss_of(model, index, replica) * (scale / replicas)).backward()
    return {name: param.grad for name, param in model.named_parameters()}


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(param).detach().clone() for name, param in model.named_parameters()}


def errors(model: nn.Module, wanted: dict[str, Tensor]) -> dict[str, float]:
    return {
        name: ((whole(param.grad).double() - wanted[name]).norm() / wanted[name].norm()).item()
        for name, param in model.named_parameters()
    }


def in_place(
    plan: str, dtype: torch.dtype, counted: bool, options: dict[str, Any], bias: bool = True
) -> None:
    """Windows equal one process's, and no hook sees the weight gradients."""
    mesh = mesh_of((dist.get_world_size(),))
    model, part = parallel(plan, mesh, dtype, bias)
    stock, _ = parallel(plan, mesh, dtype, bias)
    optimizer = wrap(model, K if counted else None, model=model, lr=1e-2, **options)
    received, receive = set(), optimizer._capture.receive

    def noting(slot, gradient, *more):
        if gradient is not None:
            received.add(slot.name)
        return receive(slot, gradient, *more)

    optimizer._capture.receive = noting
    clip = options.get("max_grad_norm")
    for update in range(UPDATES):
        indices = range(update * K, update * K + K)
        wanted = exact(values_of(model), bias, indices, 1 / K if counted else 1.0, 1)
        stock.load_state_dict(model.state_dict())
        for index in indices:
            loss_of(model, index, 0, part).backward()
            (loss_of(stock, index, 0, part) * (1 / K if counted else 1.0)).backward()
            if counted and index != indices[-1]:
                optimizer.step(), optimizer.zero_grad()
        ours, theirs = errors(model, wanted), errors(stock, wanted)
        if dtype is torch.float32:
            assert max(ours.values()) < 1e-6, ours
        else:
            limits = {name: 1.0 if name in WEIGHTS else 1.5 for name in ours}
            assert all(ours[name] <= limits[name] * theirs[name] for name in ours), (ours, theirs)
        weights = [param.grad for name, param in model.named_parameters() if name in WEIGHTS]
        assert all(isinstance(each, DTensor) and each.dtype == torch.float32 for each in weights)
        norm = torch.stack([each.norm() for each in wanted.values()]).norm()
        optimizer.step()
        if clip:
            torch.testing.assert_close(optimizer.grad_norm.double(), norm, rtol=1e-5, atol=0)
            assert clip < norm
            wanted = {name: each * (clip / norm) for name, each in wanted.items()}
            assert max(errors(model, wanted).values()) < 1e-5
        optimizer.zero_grad(), stock.zero_grad()
    assert optimizer.num_updates == UPDATES
    assert not received & WEIGHTS, received
    rows = {line.split()[0]: line for line in optimizer.explain().splitlines() if line.strip()}
    assert all(" gemm " in rows[f"{name}.weight"] for name in ("up", "down")), optimizer.explain()
    assert "each rank adds to its own shard" in optimizer.explain()
    assert "left to the compiler: the weight is a DTensor" in optimizer.explain()
    optimizer.close()
    assert model.up.weight.grad_dtype == dtype
    (loss_of(model, 0, 0, part)).backward()  # PyTorch's forward again


LOW = torch.bfloat16


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize("plan", PLANS)
def test_a_window_equals_one_process(plan, dtype, counted, ranks):
    on_ranks(ranks, in_place, plan, dtype, counted, {})


@pytest.mark.parametrize(
    ("plan", "dtype", "options", "bias"),
    [
        ("plain", torch.float32, {"max_grad_norm": 0.01}, False),
        ("sequence", torch.float32, {"max_grad_norm": 0.01}, True),
        ("plain", LOW, {"master_weights": True}, True),
        ("plain", torch.float32, {"skip_nonfinite": True}, False),
    ],
)
def test_options(plan, dtype, options, bias):
    on_ranks(2, in_place, plan, dtype, True, options, bias)


@on_each_rank(2)
def test_biases_that_are_no_parameters() -> None:
    mesh, results = mesh_of((2,)), []
    for wraps in (False, True):
        model, _ = parallel("plain", mesh, torch.float32)
        if wraps:
            _optimizer = wrap(model, K, model=model, lr=1e-2)
        for module in (model.up, model.down):
            constant = module.bias.detach() + 1
            del module.bias
            module.bias = constant
        loss = loss_of(model, 0)
        (loss if wraps else loss / K).backward()
        results.append((loss, model.up.weight, model.norm.weight))
    (loss, *params), (ours, *own) = results
    torch.testing.assert_close(ours, loss)
    _optimizer.flush()
    for param, mine in zip(params, own, strict=True):
        with torch.no_grad():
            param -= 1e-2 * K * param.grad  # flush() takes the mean over one micro-batch
        torch.testing.assert_close(whole(mine), whole(param))


@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@on_each_rank(2)
def test_memory(dtype: torch.dtype) -> None:
    """Micro-batches after the first allocate at most a tenth of a shard of a weight.

    With AMX, products of the forward pass copy half of it.
    """
    mesh = mesh_of((2,))
    net = nn.Sequential(nn.Linear(1024, 1536), nn.Linear(1536, 1024)).to(dtype)
    model = parallelize_module(net, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), 8, model=model)
    x = torch.ones(4, 1024, dtype=dtype)

    def run() -> None:
        model(x).float().pow(2).mean().backward()

    run(), optimizer.step(), run(), optimizer.step()
    held = peak_of(run)
    share = 0.6 if has_amx() and dtype is LOW else 0.1
    assert held < share * 1024 * 768 * dtype.itemsize, held


@pytest.mark.parametrize("freezes", [False, True])
@on_each_rank(2)
def test_what_is_a_partial_sum_is_left_to_torch(freezes: bool) -> None:
    """Every rank has the whole weight. PyTorch adds the gradients, and explain() says why."""
    mesh = mesh_of((2,))
    torch.manual_seed(0)
    reference = nn.Linear(WIDTH, WIDTH)
    model = nn.Linear(WIDTH, WIDTH)
    model.load_state_dict(reference.state_dict())
    model = distribute_module(model, mesh)
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), None, model=model)
    for index in range(K):
        x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(index))
        model.weight.requires_grad_(not freezes or index > 0)
        model(distribute_tensor(x, mesh, [Shard(0)])).pow(2).mean().full_tensor().backward()
        if not freezes or index > 0:
            reference(x).pow(2).mean().backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), reference.weight.grad, rtol=1e-5, atol=1e-8)
    assert PARTIAL in optimizer.explain()


@on_each_rank(2)
def test_dtensors_that_cannot_be_taken_apart_are_left_to_torch() -> None:
    """If torch's DTensors lack the private name, PyTorch adds the gradients."""
    mesh = mesh_of((2,))
    model, _ = parallel("plain", mesh, torch.float32)
    wanted = exact(values_of(model), True, range(K), 1 / K, 1)
    with lacking(local_parts, "_local_tensor"):
        inner = torch.optim.SGD(model.parameters(), lr=1e-2)
        optimizer = fusedacc.AccumulatingOptimizer(inner, K, model=model)
        for index in range(K):
            loss_of(model, index).backward()
            if index < K - 1:
                optimizer.step()
        assert max(errors(model, wanted).values()) < 1e-6, errors(model, wanted)
        rows = {line.split()[0]: line for line in optimizer.explain().splitlines() if line.strip()}
        assert all(" eager " in rows[name] for name in WEIGHTS), optimizer.explain()
        optimizer.step()


@pytest.mark.sweep(pairs=False)
@pytest.mark.parametrize("compute", [torch.float32, LOW])
@pytest.mark.parametrize("counted", [True, False])
@on_each_rank(4)
def test_with_fsdp2(counted: bool, compute: torch.dtype) -> None:
    """Two replicas of two parts: FSDP2 reduces the sums of the unsharded DTensors once per window."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    model, part = parallel("plain", mesh["tp"], torch.float32)
    stock, _ = parallel("plain", mesh["tp"], torch.float32)
    for each in (model, stock):
        fully_shard(each, mesh=mesh["dp"], mp_policy=policy)
    optimizer = wrap(model, K if counted else None, model=model, lr=1e-2)
    for update in range(UPDATES):
        indices = range(update * K, update * K + K)
        wanted = exact(values_of(model), True, indices, 1 / K if counted else 1.0, 2)
        stock.load_state_dict(model.state_dict())
        for index in indices:
            for each, scale in ((model, 1.0), (stock, 1 / K if counted else 1.0)):
                each.set_requires_gradient_sync(index == indices[-1])
                (loss_of(each, index, mesh.get_local_rank("dp"), part) * scale).backward()
            if counted and index != indices[-1]:
                optimizer.step(), optimizer.zero_grad()
        ours, theirs = errors(model, wanted), errors(stock, wanted)
        if compute is torch.float32:
            assert max(ours.values()) < 1e-6, ours
        else:  # mostly the forward's own rounding
            assert all(ours[name] < 1.5 * theirs[name] for name in ours), (ours, theirs)
        optimizer.step(), optimizer.zero_grad(), stock.zero_grad()
    assert optimizer.num_updates == UPDATES
    rows = {line.split()[0]: line for line in optimizer.explain().splitlines() if line.strip()}
    assert all(" gemm " in rows[f"{name}.weight"] for name in ("up", "down")), optimizer.explain()
    assert "unsharded, reduced by FSDP2" in optimizer.explain()
