"""Checks that training in a process group of one rank equals training without one, on any device."""

import collections
import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fusedacc

STEPS, WINDOWS = 2, 4

#: Keeps groups for longer than a DistributedDataParallel does, which frees its group with the GIL held. The
#: group then waits for threads of gloo, which may wait for the GIL. Python releases the GIL first.
_ended_groups: collections.deque[dist.ProcessGroup | None] = collections.deque(maxlen=20)


@contextlib.contextmanager
def process_group(backend: str, folder: Path) -> Iterator[None]:
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    try:
        yield
    finally:
        _ended_groups.append(dist.group.WORLD)
        dist.destroy_process_group()


def network(device: str, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device, dtype)


def loss_of(model: nn.Module, index: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(index))
    return model(x.to(device, dtype)).float().pow(2).mean()


def trained(kind: str, device: str, dtype: torch.dtype, reduction: str) -> list[torch.Tensor]:
    """Return the parameters after some windows. The last window is not full."""
    model = network(device, dtype)
    called, (way, _, extra) = model, kind.partition(", ")
    options = {"model": model} if extra == "model=" else {}
    if way == "ddp":
        called = options["data_parallel"] = DistributedDataParallel(model)
    elif way == "group":
        options["data_parallel"] = dist.group.WORLD
    elif way == "fsdp2":
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        given = {"mp_policy": mixed} if extra == "mixed precision" else {}
        fully_shard(model[0], mesh=init_device_mesh(device, (1,)), **given)
        fully_shard(model, mesh=init_device_mesh(device, (1,)), **given)
    if extra == "bfloat16 on the wire":
        options["reduce_dtype"] = torch.bfloat16
    optimizer = fusedacc.AccumulatingOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        STEPS,
        reduction=reduction,
        max_grad_norm=0.5,
        skip_nonfinite=True,
        **options,
    )
    for index in range(STEPS * WINDOWS + 1):
        weight = 1.0 + index % 3
        with optimizer.accumulate(called, weight=weight if reduction == "normalized" else None):
            loss = loss_of(called, index, device, dtype) * (weight if reduction == "normalized" else 1.0)
            (loss * torch.inf if index == STEPS else loss).backward()
        optimizer.step(), optimizer.zero_grad()
    optimizer.flush()
    assert (optimizer.num_updates, int(optimizer.num_skipped)) == (WINDOWS + 1, 1)
    assert optimizer.grad_norm.device.type == device
    optimizer.close()
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
    return [p.detach().clone() for p in whole]


KINDS = ("ddp", "group", "fsdp2")
#: These round to bfloat16 on the way.
ROUNDED = ("ddp, bfloat16 on the wire", "fsdp2, mixed precision")
#: The kind and the reduction.
CASES = [
    *itertools.product(KINDS, ("mean", "sum", "normalized")),
    *((f"{kind}, model=", "mean") for kind in KINDS),
    *((kind, "mean") for kind in ROUNDED),
]
DTYPES = (torch.float32, torch.bfloat16)


def check(kind: str, backend: str, device: str, dtype: torch.dtype, reduction: str, folder: Path) -> None:
    """Check that one rank in a process group trains the same parameters as no process group."""
    wanted = trained("", device, dtype, reduction)
    with process_group(backend, folder):
        found = trained(kind, device, dtype, reduction)
    exact = dtype is torch.float32 and kind not in ROUNDED
    close = {"rtol": 1e-5, "atol": 1e-6} if exact else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(found, wanted, **close)
