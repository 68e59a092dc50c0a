"""FSDP2: a partly filled window goes on on as many ranks, and a full one on any number."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_setting import loss_of, network, sharded, whole, wrap
from loops import identical
from ranks import on_each_rank, on_ranks
from ranks_setting import refused
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
    "clip": (K, torch.bfloat16, {"max_grad_norm": 0.1}),
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
    for index in indices:
        normalized = optimizer.reduction == "normalized"
        with optimizer.accumulate(weight=index + 1.5 + dist.get_rank() if normalized else None):
            loss_of(model, index).backward()
        if CASES[name][0] or (index + 1) % K == 0:
            optimizer.step(), optimizer.zero_grad()


def parameters(model: nn.Module) -> list[Tensor]:
    return [whole(p).detach().clone() for p in model.parameters()]


def load(folder: str, model: nn.Module, optimizer: fusedacc.AccumulatingOptimizer) -> None:
    found = tree(model, optimizer)
    make_room(found, folder)
    dcp.load(found, checkpoint_id=folder)
    model.load_state_dict(found["model"])
    set_optimizer_state_dict(model, optimizer, found["optim"])


@pytest.mark.parametrize("name", CASES)
@on_each_rank(2)
def test_a_window_goes_on_with_the_same_bits(name: str, tmp_path: Path) -> None:
    model, optimizer = made(name)
    train(model, optimizer, name, range(K + 1))
    dcp.save(tree(model, optimizer), checkpoint_id=tmp_path)
    again, resumed = made(name)
    load(str(tmp_path), again, resumed)
    assert resumed.num_updates == 1
    assert resumed.has_partial_window
    for each, its in ((model, optimizer), (again, resumed)):
        train(each, its, name, range(K + 1, 3 * K))
        assert its.num_updates == 3
    assert identical(parameters(model), parameters(again))


def save(folder: str, name: str, micro_batches: int) -> list[Tensor]:
    model, optimizer = made(name)
    train(model, optimizer, name, range(micro_batches))
    dcp.save(tree(model, optimizer), checkpoint_id=folder)
    return parameters(model)


def refuse(folder: str, name: str, shards: bool, present: str) -> None:
    model, optimizer = made(name, shards)
    words = f"of 2 ranks of FSDP2, and this run has {present}. Allowed: the same ranks"
    refused(ValueError, words, lambda: load(folder, model, optimizer))
    assert (optimizer.num_updates, optimizer.has_partial_window) == (0, False)


def load_and_go_on(folder: str, name: str, shards: bool) -> list[Tensor]:
    model, optimizer = made(name, shards)
    load(folder, model, optimizer)
    assert (optimizer.num_updates, optimizer.has_partial_window) == (1, False)
    loaded = parameters(model)
    train(model, optimizer, name, range(K, 2 * K))
    assert optimizer.num_updates == 2
    assert not identical(parameters(model), loaded)
    return loaded


OTHERS = {(3, True): "3 ranks of FSDP2", (1, True): "one process", (1, False): "one process"}


@pytest.mark.parametrize(("ranks", "shards"), OTHERS)
@pytest.mark.parametrize("name", ["mean", "normalized"])
def test_a_window_is_refused_on_other_ranks(name, ranks, shards, tmp_path):
    on_ranks(2, save, str(tmp_path), name, K + 1)
    on_ranks(ranks, refuse, str(tmp_path), name, shards, OTHERS[ranks, shards])


@pytest.mark.parametrize(("ranks", "shards"), OTHERS)
@pytest.mark.parametrize("name", ["masters", "manual normalized"])
def test_between_windows_a_checkpoint_loads_on_any_number_of_ranks(name, ranks, shards, tmp_path):
    wanted = on_ranks(2, save, str(tmp_path), name, K)[0]
    for loaded in on_ranks(ranks, load_and_go_on, str(tmp_path), name, shards):
        assert identical(loaded, wanted)
