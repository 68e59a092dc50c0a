"""Checkpoints of several ranks: a partly filled window goes on on as many ranks, a full one on any number."""

import copy
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from loops import identical, network
from ranks import on_each_rank, on_ranks
from ranks_setting import LOW, Net, error_of, given, loss_of, refused, small_loss, wrap
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
    "clipped": {"max_grad_norm": 0.1},
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
STOCHASTIC = {name for name in OPTIONS if "stochastic" in name}
for name in STOCHASTIC:
    OPTIONS[name] |= {"accumulate_dtype": LOW, "rounding": "stochastic", "max_grad_norm": 0.1}


class Pair:
    """A model, its wrapper with an option, and its loop. `alone`: without `data_parallel`."""

    def __init__(self, name: str, alone: bool = False) -> None:
        options = dict(OPTIONS[name])
        if name in STOCHASTIC:
            options["seed"] = dist.get_rank()
        self.model = network(options.pop("dtype", torch.float32))
        self.backwards, self.steps = options.pop("backwards", 1), options.pop("steps", K)
        self.net, parallel = self.model, None
        kind = options.pop("kind", "ddp")
        if not alone:
            self.net, parallel = given(self.model, kind)
        self.optimizer = wrap(self.model, self.steps, data_parallel=parallel, **options)
        self.weighs = self.optimizer.reduction in WEIGHING

    def silence(self, index: int) -> AbstractContextManager:
        by_hand = self.steps is None and self.net is not self.model and (index + 1) % K
        return self.net.no_sync() if by_hand else nullcontext()

    def backward(self, index: int) -> None:
        weight = index + 1.5 + dist.get_rank() if self.weighs else None
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


@pytest.mark.parametrize("name", OPTIONS)
@on_each_rank(2)
def test_a_window_goes_on_with_the_same_bits(name: str, tmp_path: Path) -> None:
    """Continue with the pair that was saved, with each rank's file, and with a distributed checkpoint."""
    folder = str(tmp_path)
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
    for each in (pair, again, by_file):
        if reduced:
            each.step()
        each.train(range(2 * K if reduced else K + 2, 2 * K + 1))
        each.optimizer.flush()
        assert each.optimizer.num_updates == 3
        assert torch.equal(each.parameters(), pair.parameters())


def save_in_window(folder: str, name: str, micro_batches: int) -> Tensor:
    """Save a distributed checkpoint and a file, both with what the window holds, and a file without.

    Returns:
        The parameters.
    """
    pair = Pair(name)
    pair.train(range(micro_batches))
    dcp.save(pair.tree(), checkpoint_id=f"{folder}/dcp")
    if dist.get_rank() == 0:
        for partial in (True, False):
            state = pair.optimizer.state_dict(include_partial=partial)
            torch.save([pair.model.state_dict(), state], f"{folder}/{partial}.pt")
    return pair.parameters()


def load_file(pair: Pair, file: str) -> None:
    model, optimizer = torch.load(file, weights_only=False)
    pair.model.load_state_dict(model)
    pair.optimizer.load_state_dict(optimizer)


def refuse_window(folder: str, name: str, alone: bool, present: str) -> None:
    """Check that a window of two ranks is refused, and that this changes nothing."""
    pair, ranks = Pair(name, alone), dist.get_world_size()
    pair.train(range(1))
    before = copy.deepcopy(pair.optimizer.state_dict())
    words = f"of 2 ranks of data_parallel=, and this run has {present}. Allowed: the same ranks"
    refused(ValueError, words, lambda: load_file(pair, f"{folder}/True.pt"))
    assert identical(pair.optimizer.state_dict(), before)
    load_file(pair, f"{folder}/False.pt")
    assert (pair.optimizer.num_updates, pair.optimizer.has_partial_window) == (1, False)

    pair = Pair(name, alone)
    state = pair.tree()
    if ranks != 2:
        names = str(state)
        refused(
            ValueError, f"of 2 ranks, and the group has {ranks}.", lambda: make_room(state, f"{folder}/dcp")
        )
        assert str(state) == names
    dcp.load(state, checkpoint_id=f"{folder}/dcp")
    optim = state["training"]["optim"]
    refused(ValueError, words, lambda: set_optimizer_state_dict(pair.model, pair.optimizer, optim))
    assert (pair.optimizer.num_updates, pair.optimizer.has_partial_window) == (0, False)


@pytest.mark.parametrize(
    ("ranks", "alone", "present"),
    [(3, False, "3 ranks of data_parallel="), (2, True, "one process"), (1, True, "one process")],
)
@pytest.mark.parametrize("name", ["mean", "weighted"])
def test_a_window_is_refused_on_other_ranks(name, ranks, alone, present, tmp_path):
    on_ranks(2, save_in_window, str(tmp_path), name, K + 2)
    on_ranks(ranks, refuse_window, str(tmp_path), name, alone, present)


def go_on_after_update(folder: str, name: str, alone: bool) -> Tensor:
    pair = resumed(name, f"{folder}/dcp", alone)
    assert (pair.optimizer.num_updates, pair.optimizer.has_partial_window) == (1, False)
    loaded = pair.parameters()
    pair.train(range(K, 2 * K))
    assert pair.optimizer.num_updates == 2
    assert not torch.equal(pair.parameters(), loaded)
    return loaded


@pytest.mark.parametrize(("ranks", "alone"), [(3, False), (1, False), (1, True)])
@pytest.mark.parametrize("name", ["bfloat16", "normalized", "manual", "stochastic"])
def test_between_windows_a_checkpoint_loads_on_any_number_of_ranks(name, ranks, alone, tmp_path):
    wanted = on_ranks(2, save_in_window, str(tmp_path), name, K)[0]
    for loaded in on_ranks(ranks, go_on_after_update, str(tmp_path), name, alone):
        assert torch.equal(loaded, wanted)


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
    for value in (None, torch.zeros(()), torch.zeros(3, 5, 4)):
        damaged = copy.deepcopy(states[rank])
        damaged["state"][0]["fusedacc_rank_sum"] = value
        words = "the sum of parameter 0 is damaged: it is no tensor with a row for each of 2 ranks"
        refused(ValueError, words, lambda: loaded.optimizer.load_state_dict(damaged))  # noqa: B023
    damaged = copy.deepcopy(states[rank])
    damaged["param_groups"][0]["fusedacc_counters"] = damaged["param_groups"][0]["fusedacc_counters"].replace(
        '"num_updates": 1', '"num_updates": 2'
    )
    refused(ValueError, "of another window", lambda: loaded.optimizer.load_state_dict(damaged))
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
def test_a_parameter_without_a_gradient_has_none_afterwards() -> None:
    net = Net()
    called, parallel = given(net, "ddp", find_unused_parameters=True)
    optimizer = wrap(net, 2, data_parallel=parallel)
    loss_of(called, 0).backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    loss_of(called, 1).backward()
    assert net.up.weight.grad is not None
    assert net.never.weight.grad is None


@on_each_rank(2)
def test_begun_on_one_rank_only(tmp_path: Path) -> None:
    uneven = Pair("mean")
    if dist.get_rank() == 0:
        uneven.train([0])
    tree = {"optim": get_optimizer_state_dict(uneven.model, uneven.optimizer)}
    error_of(dcp.api.CheckpointException, lambda: dcp.save(tree, checkpoint_id=tmp_path))


@on_each_rank(2)
def test_saved_by_one_process() -> None:
    for name in ("mean", "manual"):
        alone, loaded = Pair(name, alone=True), Pair(name)
        small_loss(alone.net, 0).backward()
        words = "of one process, and this run has 2 ranks of data_parallel="
        state = alone.optimizer.state_dict()
        refused(ValueError, words, lambda: loaded.optimizer.load_state_dict(state))  # noqa: B023
