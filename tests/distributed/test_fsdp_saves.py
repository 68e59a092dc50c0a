"""FSDP2: checkpoints of a part of a window, loaded on as many ranks, on more, and on one."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_setting import loss_of, network, sharded, whole, wrap
from ranks import on_ranks
from ranks_setting import assert_close
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import fusedacc
from fusedacc.integrations.distributed_checkpoint import make_room

K = 2
#: The wrapper's steps, the parameters' dtype, and options.
CASES = {
    "mean": (K, torch.float32, {}),
    "sum": (K, torch.float32, {"reduction": "sum"}),
    "masters": (K, torch.bfloat16, {"master_weights": True}),
    "clip": (K, torch.bfloat16, {"private_gradients": True, "max_grad_norm": 0.1}),
    "normalized": (K, torch.float32, {"reduction": "normalized"}),
    "manual": (None, torch.float32, {}),
    "manual normalized": (None, torch.float32, {"reduction": "normalized"}),
    "manual mean": (None, torch.bfloat16, {"reduction": "mean"}),
}


def made(name: str, shards: bool = True) -> tuple[Any, fusedacc.AccumulatingOptimizer]:
    steps, dtype, options = CASES[name]
    model = sharded(dtype) if shards else network(dtype)
    return model, wrap(model, steps, **options)


def tree(model: nn.Module, optimizer: fusedacc.AccumulatingOptimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}


def train(model: nn.Module, optimizer: fusedacc.AccumulatingOptimizer, name: str, indices: range) -> None:
    """Train on micro-batches of two ranks, on any number of ranks, with the same result."""
    ranks, rank, steps = dist.get_world_size(), dist.get_rank(), CASES[name][0]
    for index in indices:
        owned = range(2) if ranks == 1 else [rank] if rank < 2 else []
        losses = [loss_of(model, index, each) for each in owned] or [0.0 * loss_of(model, index, 0)]
        weight, scale = None, ranks / 2
        if optimizer.reduction == "normalized":
            weights = [index + 1.5 + each for each in owned]
            weight, scale = sum(weights), 1.0
            losses = [w * loss for w, loss in zip(weights, losses, strict=True)] if owned else losses
        with optimizer.accumulate(weight=weight):
            (sum(losses) * scale).backward()
        if steps or (index + 1) % K == 0:
            optimizer.step(), optimizer.zero_grad()


def save_and_go_on(folder: str, name: str) -> list[Tensor]:
    model, optimizer = made(name)
    train(model, optimizer, name, range(K + 1))
    dcp.save(tree(model, optimizer), checkpoint_id=folder)
    train(model, optimizer, name, range(K + 1, 3 * K))
    assert optimizer.num_updates == 3
    return [whole(p).detach().clone() for p in model.parameters()]


def load_and_go_on(folder: str, name: str, shards: bool) -> list[Tensor]:
    model, optimizer = made(name, shards)
    found = tree(model, optimizer)
    make_room(found, folder)
    dcp.load(found, checkpoint_id=folder)
    model.load_state_dict(found["model"])
    set_optimizer_state_dict(model, optimizer, found["optim"])
    assert optimizer.num_updates == 1
    if CASES[name][0]:
        assert optimizer.micro_step == 1
    train(model, optimizer, name, range(K + 1, 3 * K))
    assert optimizer.num_updates == 3
    return [whole(p).detach().clone() for p in model.parameters()]


@pytest.mark.sweep(pairs=False)
@pytest.mark.parametrize(("ranks", "shards"), [(2, True), (3, True), (1, True), (1, False)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_window_goes_on(name, ranks, shards, tmp_path):
    """A window of two ranks goes on on two ranks, where the result is bitwise equal, on three and on one."""
    wanted, same = on_ranks(2, save_and_go_on, str(tmp_path), name)
    for found in on_ranks(ranks, load_and_go_on, str(tmp_path), name, shards):
        for p, q, r in zip(found, wanted, same, strict=True):
            assert torch.equal(q, r)
            if ranks == 2:
                assert torch.equal(p, q)
            else:  # three ranks' losses are multiplied by 3/2, which rounds
                assert_close(p, q, 3e-7 if p.dtype is torch.float32 else 0.01, ranks)
