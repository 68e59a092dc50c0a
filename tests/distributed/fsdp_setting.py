"""A sharded model, data, an optimizer and the result of one process, for tests of FSDP2 on two ranks."""

import math
from collections.abc import Callable
from typing import Any

import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fusedacc


def world() -> DeviceMesh:
    """Return the mesh of all ranks."""
    return ranks.mesh_of((dist.get_world_size(),))


def hybrid(replicas: int, shards: int) -> DeviceMesh:
    """Return a mesh for HSDP: replicas of shards."""
    return ranks.mesh_of((replicas, shards), ("replicate", "shard"))


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)  # a bias of 5 elements gives uneven shards, and a bias of 1 an empty shard
    layers = nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1)
    return nn.Sequential(*layers).to(dtype)


def sharded(dtype: torch.dtype = torch.float32, mesh: DeviceMesh | None = None, **options: Any) -> Any:
    """Return the network, sharded over all ranks or over a mesh."""
    model, mesh = network(dtype), world() if mesh is None else mesh
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def batch(index: int, of_rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(10 * index + of_rank)
    return torch.randn(3, 4, generator=generator).to(dtype)


def loss_of(model: nn.Module, index: int, of_rank: int | None = None) -> Tensor:
    """Return the mean loss of a micro-batch, for a given rank or (None) for this rank."""
    dtype = next(model.parameters()).dtype
    return model(batch(index, dist.get_rank() if of_rank is None else of_rank, dtype)).float().pow(2).mean()


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, **options)


_options: dict[str, Any] = {}


def plainly(check: Callable[[], None]) -> None:
    check()


def in_place(check: Callable[[], None]) -> None:
    """Run a check with `model=` in its wrappers."""
    _options["in_place"] = True
    try:
        check()
    finally:
        _options.clear()


def wrap(
    model: nn.Module,
    steps: int | None,
    inner: Callable[[nn.Module], torch.optim.Optimizer] = adam,
    /,
    **options: Any,
) -> fusedacc.AccumulatingOptimizer:
    if _options:
        options.setdefault("model", model)
    return fusedacc.AccumulatingOptimizer(inner(model), steps, **options)


def trained(steps: int) -> tuple[Any, fusedacc.AccumulatingOptimizer]:
    """Return a sharded model after an update of that many micro-batches, and its optimizer."""
    model = sharded()
    optimizer = wrap(model, steps)
    for index in range(steps):
        loss_of(model, index).backward()
        optimizer.step(), optimizer.zero_grad()
    return model, optimizer


def alone(steps: int, updates: int, clip: float = math.inf) -> tuple[nn.Module, list[float]]:
    """Train one process on the data of two ranks, and return its model and the norms of its gradients."""
    model, norms = network(), []
    optimizer = adam(model)
    for update in range(updates):
        for index in range(steps * update, steps * (update + 1)):
            for of_rank in (0, 1):
                (loss_of(model, index, of_rank) / (2 * steps)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step(), optimizer.zero_grad()
    return model, norms


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def far(model: nn.Module, reference: nn.Module) -> float:
    """Return the largest difference, relative to the largest element of each parameter."""
    return max(
        ((whole(p) - whole(q)).abs().max() / whole(q).abs().max()).item()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True)
    )


def same_on_both(value: Tensor) -> None:
    value = torch.as_tensor(value).double().reshape(1)
    found = [torch.empty_like(value) for _ in range(2)]
    dist.all_gather(found, value)
    assert torch.equal(*found), found
