"""Checkpoints of a part of a window of several ranks: loaded on as many ranks, on more, and on one."""

import copy
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from loops import network
from ranks import on_each_rank, on_ranks
from ranks_setting import LOW, error_of, given, refused, small_loss, wrap
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fusedacc.accumulators.reduction import WEIGHING
from fusedacc.integrations.distributed_checkpoint import make_room

K = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "bfloat16": {"dtype": LOW, "master_weights": True},
    "sum": {"reduction": "sum"},
    "weighted": {"reduction": "weighted"},
    "normalized": {"reduction": "normalized", "kind": "group"},
    "private": {"private_gradients": True, "max_grad_norm": 0.1},
    "backwards": {"backwards": 2},
    "reduced": {},
    "reduced weighted": {"reduction": "weighted"},
    "manual": {"steps": None},
    "manual group": {"steps": None, "kind": "group"},
    "manual mean": {"steps": None, "reduction": "mean"},
    "stochastic": {"dtype": LOW},
    "reduced stochastic": {},
    "manual stochastic": {"steps": None, "reduction": "mean"},
}
#: With another number of ranks, stochastic rounding gives other sums.
ROUNDED = {name for name in OPTIONS if "stochastic" in name}
for name in ROUNDED:
    OPTIONS[name] |= {"accumulate_dtype": LOW, "rounding": "stochastic", "max_grad_norm": 0.1}


class Pair:
    """A model, its wrapper with an option, and its loop. `alone`: without `data_parallel`."""

    def __init__(self, name: str, alone: bool = False) -> None:
        options = dict(OPTIONS[name])
        if name in ROUNDED:
            options["seed"] = dist.get_rank()
        self.model = network(options.pop("dtype", torch.float32))
        self.backwards, self.steps = options.pop("backwards", 1), options.pop("steps", K)
        self.net, parallel = self.model, None
        kind = options.pop("kind", "ddp")
        if not alone:
            self.net, parallel = given(self.model, kind)
        self.optimizer = wrap(self.model, self.steps, data_parallel=parallel, **options)
        self.weighs = self.optimizer.reduction in WEIGHING

    def weight(self, index: int, of_rank: int) -> float:
        return index + 1.5 + of_rank

    def silence(self, index: int) -> AbstractContextManager:
        by_hand = self.steps is None and self.net is not self.model and (index + 1) % K
        return self.net.no_sync() if by_hand else nullcontext()

    def backward(self, index: int) -> None:
        weight = self.weight(index, dist.get_rank()) if self.weighs else None
        with self.silence(index), self.optimizer.accumulate(weight=weight):
            for part in range(self.backwards):
                small_loss(self.net, index + 50 * part).backward()

    def step(self) -> None:
        self.optimizer.step(), self.optimizer.zero_grad()

    def train(self, indices: Iterable[int]) -> None:
        for index in indices:
            self.backward(index)
            if self.steps or (index + 1) % K == 0:
                self.step()

    def finish(self, indices: Iterable[int]) -> None:
        """Add what two ranks would add in these micro-batches, on any number of ranks."""
        if self.optimizer.reduction == "mean":  # the micro-batches differ: end the window here
            self.optimizer.flush() if self.steps else self.optimizer.step()
            return
        ranks, rank = dist.get_world_size(), dist.get_rank()
        for index in indices:
            owned = range(2) if ranks == 1 else [rank] if rank < 2 else []
            losses = [small_loss(self.net, index, each) for each in owned]
            losses = losses or [0.0 * small_loss(self.net, index, 0)]
            weights = [self.weight(index, each) for each in owned] or [0.0]
            weight = sum(weights) if self.weighs else None
            if self.optimizer.reduction == "weighted" and weight:
                losses = [loss * (w / weight) for loss, w in zip(losses, weights, strict=True)]
            elif self.optimizer.reduction == "sum":
                losses = [loss * (ranks / 2) for loss in losses]
            with self.silence(index), self.optimizer.accumulate(weight=weight):
                sum(losses).backward()
            if self.steps:
                self.step()
        if self.steps is None:
            self.step()

    def end_window(self, name: str) -> Tensor:
        """End the saved window and return the parameters."""
        if name.startswith("reduced"):
            self.step()
        else:
            self.finish(range(K + 2, 2 * K))
        assert self.optimizer.num_updates == 2
        return self.parameters()

    def parameters(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    def tree(self) -> dict[str, Any]:
        state = get_optimizer_state_dict(self.model, self.optimizer)
        return {"model": self.model.state_dict(), "training": {"optim": state}}


def resumed(name: str, folder: str, alone: bool = False) -> Pair:
    pair = Pair(name, alone)
    state = pair.tree()
    make_room(state, folder)
    dcp.load(state, checkpoint_id=folder)
    pair.model.load_state_dict(state["model"])
    set_optimizer_state_dict(pair.model, pair.optimizer, state["training"]["optim"])
    return pair


def saves(folder: str, name: str) -> Tensor:
    """Save between micro-batches and continue with the pair, each rank's file, and a distributed checkpoint.

    Returns:
        The parameters after the saved window.
    """
    pair, reduced = Pair(name), name.startswith("reduced")
    pair.train(range(K + 2))
    if reduced:  # the last backward is done, but step() is not
        pair.train([K + 2]), pair.backward(K + 3)
    dcp.save(pair.tree(), checkpoint_id=folder)
    file = f"{folder}/{dist.get_rank()}.pt"
    torch.save([pair.model.state_dict(), pair.optimizer.state_dict()], file)

    again, by_file = resumed(name, folder), Pair(name)
    model, optimizer = torch.load(file)
    by_file.model.load_state_dict(model)
    by_file.optimizer.load_state_dict(optimizer)
    ended = resumed(name, folder).end_window(name)
    for each in (pair, again, by_file):
        if reduced:
            each.step()
        each.train(range(2 * K if reduced else K + 2, 2 * K + 1))
        each.optimizer.flush()
        assert each.optimizer.num_updates == 3
        assert torch.equal(each.parameters(), pair.parameters())
    return ended


def loads(folder: str, name: str, alone: bool) -> Tensor:
    return resumed(name, folder, alone).end_window(name)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_window_goes_on_on_two_ranks_three_and_one(name, tmp_path):
    """On two ranks, which saved the window, the result is bitwise equal."""
    wanted = on_ranks(2, saves, str(tmp_path), name)[0].double()
    for ranks, alone in () if name in ROUNDED else ((3, False), (1, False), (1, True)):
        for found in on_ranks(ranks, loads, str(tmp_path), name, alone):
            # three ranks' losses are multiplied by 3/2, which rounds
            most = 3e-8 if name.startswith("manual") else 1.5e-8
            assert (found.double() - wanted).norm() / wanted.norm() <= most, (ranks, alone)


def saved(folder: str) -> tuple[Pair, Pair, str, dict[str, Any]]:
    """Save a pair between micro-batches, and return it, a new pair, the folder and this rank's state."""
    pair = Pair("weighted")
    pair.train(range(K + 2))
    dcp.save(pair.tree(), checkpoint_id=folder)
    return pair, Pair("weighted"), folder, pair.optimizer.state_dict()


@on_each_rank(2)
def test_damaged_or_of_another_rank(tmp_path: Path) -> None:
    """Load damaged files and files of another rank."""
    _, loaded, _, own = saved(str(tmp_path))
    before, states, rank = loaded.optimizer.state_dict(), [None, None], dist.get_rank()
    dist.all_gather_object(states, own)
    wrong = f"the sums of rank {1 - rank}, not of rank {rank}"
    refused(ValueError, wrong, lambda: loaded.optimizer.load_state_dict(states[1 - rank]))
    for key in ("fusedacc_rank_sum", "fusedacc_rank_counters"):
        damaged = copy.deepcopy(states[rank])
        del damaged["state"][1][key]
        error_of(ValueError, lambda: loaded.optimizer.load_state_dict(damaged))  # noqa: B023
    damaged = copy.deepcopy(states[rank])
    damaged["state"][0]["fusedacc_rank_counters"].to_local()[0, 5] = 200
    refused(ValueError, "damaged", lambda: loaded.optimizer.load_state_dict(damaged))
    assert (loaded.optimizer.num_updates, loaded.optimizer.state_dict()) == (0, before)


@on_each_rank(2)
def test_without_ranks_or_room(tmp_path: Path) -> None:
    """Load a distributed checkpoint without `data_parallel` and without `make_room`."""
    _, loaded, folder, _ = saved(str(tmp_path))
    alone = Pair("weighted", alone=True)
    for pair, has_room, words in ((alone, True, "data_parallel="), (loaded, False, "make_room")):
        state = pair.tree()
        if has_room:
            make_room(state, folder)
        dcp.load(state, checkpoint_id=folder)
        optim = state["training"]["optim"]
        refused(ValueError, words, lambda: set_optimizer_state_dict(pair.model, pair.optimizer, optim))  # noqa: B023


@on_each_rank(2)
def test_gathered_on_every_rank(tmp_path: Path) -> None:
    """Each rank takes its own row. A copy of the wrapper has no ranks."""
    pair, loaded, *_ = saved(str(tmp_path))
    whole = StateDictOptions(full_state_dict=True)
    state = copy.deepcopy(get_optimizer_state_dict(pair.model, pair.optimizer, options=whole))
    loaded.model.load_state_dict(pair.model.state_dict())
    set_optimizer_state_dict(loaded.model, loaded.optimizer, state)
    for each in (pair, loaded):
        each.train(range(K + 2, 2 * K))
    assert loaded.optimizer.num_updates == 2
    assert torch.equal(pair.parameters(), loaded.parameters())

    copy.deepcopy(pair.optimizer)
    pair.train([0])
    refused(RuntimeError, "data_parallel", lambda: copy.deepcopy(pair.optimizer))
    assert "fusedacc_rank_sum" not in str(pair.optimizer.state_dict(include_partial=False))


@on_each_rank(2)
def test_begun_on_one_rank_only(tmp_path: Path) -> None:
    uneven = Pair("mean")
    if dist.get_rank() == 0:
        uneven.train([0])
    tree = {"optim": get_optimizer_state_dict(uneven.model, uneven.optimizer)}
    error_of(dcp.api.CheckpointException, lambda: dcp.save(tree, checkpoint_id=tmp_path))


@on_each_rank(2)
def test_saved_by_one_process() -> None:
    """The first rank continues with the sums."""
    for name in ("mean", "weighted", "manual"):
        alone, loaded = Pair(name, alone=True), Pair(name)
        for index in range(2):
            with alone.optimizer.accumulate(weight=2.0 if alone.weighs else None):
                small_loss(alone.net, index, 0).backward()
            if alone.steps:
                alone.step()
        loaded.optimizer.load_state_dict(alone.optimizer.state_dict())
        if not alone.steps:  # p.grad now belongs to one rank
            for each in (alone, loaded):
                (0.0 * small_loss(each.net, 2, 0)).backward()
        for each in (alone, loaded):
            each.optimizer.flush()
        assert alone.optimizer.num_updates == loaded.optimizer.num_updates == 1
        torch.testing.assert_close(alone.parameters(), loaded.parameters(), rtol=1e-6, atol=1e-7)
