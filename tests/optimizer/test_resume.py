"""A run that resumes from a checkpoint inside a window ends with the same bits."""

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from loops import LOW, identical, loss_of, micro_batch, network, scalar, through_file, wrap
from torch import nn

import fusedacc


def pair(lr: float = 0.1):
    model = network()
    return model, wrap(model, 3, functools.partial(torch.optim.SGD, momentum=0.9), lr)


def settings(steps: int | None = 4, dtype=torch.float32, frozen=(), inside=False, sparse=False, **options):
    """Return a model, its wrapper, and a function that runs micro-batches by their seeds.

    Args:
        steps: micro-batches of a window. None: a manual loop with an update after every fourth.
        frozen: the micro-batches in which the first weight is frozen.
        inside: whether the wrapper has the model too.
        sparse: whether every third micro-batch has gradients of the first layer only.
    """
    weighted = options.get("reduction") == "weighted"
    model = network(dtype)
    model[0].weight.requires_grad_(0 not in frozen)
    adam = functools.partial(torch.optim.Adam, eps=1e-4)  # float16 holds it
    optimizer = wrap(model, steps, adam, lr=0.01, model=model if inside else None, **options)

    def train(seeds, looks: bool = False) -> None:
        for seed in seeds:
            model[0].weight.requires_grad_(seed not in frozen)
            with optimizer.accumulate(weight=seed + 1 if weighted else None):
                alone = sparse and seed % 3 == 0
                (model[0](torch.ones(4, dtype=dtype)).sum() if alone else loss_of(model, seed)).backward()
            if looks:
                optimizer.state_dict()
            if steps or seed % 4 == 3:
                optimizer.step(), optimizer.zero_grad()

    return model, optimizer, train


def assert_resumes(
    made: Callable, done: int, before: int = 5, saves: Callable | None = None, to: Callable | None = None
):
    """Check that a run that resumes from a checkpoint ends with the same bits.

    Args:
        made: makes a model, its wrapper and `train`.
        done: the number of micro-batches before the checkpoint.
        before: the number of micro-batches of the other wrapper before it loads the checkpoint.
        saves: loads the first run into the second. None: through a file.
        to: makes the second run. None: `made`.

    Returns:
        What `saves` returned: the checkpoint.
    """
    model, optimizer, train = made()
    train(range(done))
    other, resumed, train_other = (to or made)()
    train_other(range(20, 20 + before))
    if not resumed._window.counted:
        resumed.zero_grad()  # as in stock, loading does not change p.grad
    saved = (saves or by_file)(model, optimizer, other, resumed)
    assert (resumed.micro_step, resumed.num_updates) == (optimizer.micro_step, optimizer.num_updates)
    for go_on in (train, train_other):
        go_on(range(done, 13))
    optimizer.flush(), resumed.flush()
    assert identical([model.state_dict(), optimizer.state_dict()], [other.state_dict(), resumed.state_dict()])
    return saved


def by_file(model, optimizer, other, resumed) -> dict:
    saved = through_file([model.state_dict(), optimizer.state_dict()])
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert identical(saved[1], resumed.state_dict())
    return saved[1]


WAYS = {
    "float32": {},
    "bfloat16": {"dtype": LOW},
    "float16": {"dtype": torch.float16},
    "masters": {"dtype": LOW, "master_weights": True},
    "masters, one frozen": {"dtype": LOW, "master_weights": True, "frozen": range(99)},
    "frozen inside": {"frozen": range(1, 9)},
    "model=, frozen inside": {"inside": True, "dtype": LOW, "frozen": range(1, 9)},
    "masters, frozen inside": {"dtype": LOW, "master_weights": True, "frozen": range(1, 9)},
    "manual, frozen inside": {"steps": None, "frozen": range(1, 9)},
    "model=": {"inside": True},
    "model=, bfloat16": {"inside": True, "dtype": LOW},
    "model=, masters": {"inside": True, "dtype": LOW, "master_weights": True},
    "weighted": {"dtype": LOW, "reduction": "weighted"},
    "manual": {"steps": None},
    "manual, weighted": {"steps": None, "dtype": LOW, "reduction": "weighted"},
}


@pytest.mark.sweep
@pytest.mark.parametrize("done", [2, 4, 7])
@pytest.mark.parametrize("before", [0, 5])
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_training_resumes_from_a_file_bit_for_bit(options, before, done):
    saved = assert_resumes(functools.partial(settings, **options), done, before)
    sums = {entry["fusedacc_sum"].dtype for entry in saved["state"].values() if "fusedacc_sum" in entry}
    assert sums == (set() if done == 4 else {torch.float32})


def test_training_does_not_change_a_checkpoint():
    model, optimizer = pair()
    micro_batch(model, optimizer, 0)
    state = optimizer.state_dict()
    before = copy.deepcopy(state)
    micro_batch(model, optimizer, 1)
    assert any("fusedacc_sum" in entry for entry in state["state"].values()), "the window is not partial"
    assert identical(before, state)


def test_a_checkpoint_without_its_partial_window_puts_no_counters_into_live_groups():
    """The groups of the checkpoint hold counters, which a bare optimizer ignores."""
    model, optimizer = pair()
    micro_batch(model, optimizer, 0)
    state = through_file(optimizer.state_dict(include_partial=False))
    assert all("fusedacc_counters" in group for group in state["param_groups"])
    _, fresh = pair()
    fresh.load_state_dict(state)
    assert (fresh.micro_step, optimizer.micro_step) == (0, 1)
    bare = torch.optim.SGD(pair()[0].parameters(), lr=0.7, momentum=0.9)
    bare.load_state_dict(state)
    bare.step(), bare.zero_grad()
    again = pair()[1]
    again.load_state_dict(through_file(bare.state_dict()))
    for each in (optimizer, fresh, again):
        assert each.param_groups[0].keys() == bare.param_groups[0].keys() - {"fusedacc_counters"}
        assert each.param_groups[0]["lr"] == 0.1


MISMATCHES = {
    "fewer parameters": lambda: torch.optim.SGD([nn.Parameter(torch.zeros(5, 4))], lr=0.3),
    "more groups": lambda: torch.optim.SGD(
        [{"params": [p]} for p in pair()[0].parameters()], lr=0.3, momentum=0.9
    ),
}


@pytest.mark.parametrize("other", MISMATCHES.values(), ids=MISMATCHES.keys())
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_mismatched_checkpoint_raises_and_changes_nothing(other, wrapped):
    model, optimizer = pair()
    for seed in range(4):
        micro_batch(model, optimizer, seed)
        optimizer.zero_grad()
    inner = other()
    state = fusedacc.AccumulatingOptimizer(inner, 3).state_dict() if wrapped else inner.state_dict()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with pytest.raises(ValueError, match=r"group|parameter"):
        optimizer.load_state_dict(state)
    assert identical(before, (model.state_dict(), optimizer.state_dict()))
    assert optimizer.micro_step == 1
    for seed in (4, 5):
        micro_batch(model, optimizer, seed)
    assert optimizer.has_updated


def test_state_is_loaded_by_keyword_without_our_key():
    """Distributed checkpoint loads by keyword and drops top-level keys that it does not know."""
    model, optimizer = pair()
    micro_batch(model, optimizer, 0)
    state = optimizer.state_dict()
    known = {"state": state["state"], "param_groups": state["param_groups"]}
    twin, fresh = pair()
    fresh.load_state_dict(state_dict=known)
    assert fresh.micro_step == 1
    micro_batch(model, optimizer, 1), micro_batch(twin, fresh, 1)
    optimizer.flush(), fresh.flush()
    assert identical(model.state_dict(), twin.state_dict())


class Averaged(torch.optim.Optimizer):
    """Wraps another optimizer and averages the weights. Its state dict does not have torch's form."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.updates = base, 0
        super().__init__(base.param_groups, base.defaults)
        self.param_groups = base.param_groups

    def step(self, closure=None) -> None:
        self.base.step()
        self.updates += 1
        for group in self.param_groups:
            for param in group["params"]:
                average = self.state[param].get("average", param.detach())
                self.state[param]["average"] = average.lerp(param.detach(), 0.5)

    def state_dict(self) -> dict:
        averages = {(0, i): self.state[p] for i, p in enumerate(self.param_groups[0]["params"])}
        return {"updates": self.updates, "averages": averages, "base": self.base.state_dict()}

    def load_state_dict(self, state_dict: dict) -> None:
        self.updates = state_dict["updates"]
        self.base.load_state_dict(state_dict["base"])
        self.param_groups = self.base.param_groups
        for i, param in enumerate(self.param_groups[0]["params"]):
            self.state[param] = dict(state_dict["averages"][0, i])


APART = {
    "float32": {},
    "bfloat16": {"dtype": LOW},
    "masters": {"dtype": LOW, "master_weights": True},
    "manual": {"steps": None},
}


def averaged(steps: int | None = 3, dtype: torch.dtype = torch.float32, **options):
    model = network(dtype)
    inner = Averaged(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    optimizer = fusedacc.AccumulatingOptimizer(inner, steps, **options)

    def train(seeds) -> None:
        for seed in seeds:
            loss_of(model, seed).backward()
            if steps or seed % 3 == 2:
                optimizer.step(), optimizer.zero_grad()

    return model, optimizer, train


@pytest.mark.sweep
@pytest.mark.parametrize("done", [1, 3, 5])
@pytest.mark.parametrize("options", APART.values(), ids=APART)
def test_training_resumes_from_a_state_dict_of_another_form(options, done):
    saved = assert_resumes(functools.partial(averaged, **options), done, before=4)
    assert {key for key in saved if not key.startswith("fusedacc")} == {"updates", "averages", "base"}


def test_a_state_dict_of_another_form_is_exchanged_with_the_bare_optimizer():
    _, optimizer, train = averaged()
    train(range(6))
    bare = averaged()[1].optimizer
    bare.load_state_dict(through_file(optimizer.state_dict()))
    assert identical(bare.state_dict(), optimizer.optimizer.state_dict())
    _, fresh, train_fresh = averaged()
    train_fresh(range(1))
    fresh.load_state_dict(through_file(bare.state_dict()))
    assert (fresh.micro_step, fresh.num_updates, fresh.optimizer.updates) == (0, 0, 2)
    train(range(5))
    fresh.load_state_dict(optimizer.state_dict(include_partial=False))
    assert (fresh.micro_step, fresh.num_updates, fresh.optimizer.updates) == (0, 3, 3)


APART_DAMAGE = {
    "no dict": (lambda s: [], "must be a dict, as state_dict"),
    "nothing": (lambda s: {}, "does not fit Averaged: KeyError"),
    "torch's form": (lambda s: s["base"], "does not fit Averaged: KeyError"),
    "sums that are lost": (lambda s: s.pop("fusedacc_state") and s, "sums of 4 parameters"),
    "sums that are no dict": (lambda s: s | {"fusedacc_state": [1]}, "must be a dict of dicts"),
    "a sum is lost": (lambda s: s["fusedacc_state"].pop(2) and s, "it holds those of 3"),
    "a sum of another": (
        lambda s: s | {"fusedacc_state": {i + 1: e for i, e in s["fusedacc_state"].items()}},
        "the sum of parameter 1 is",
    ),
    "the window is lost": (lambda s: s["fusedacc"].pop("window") and s, "lacks window"),
    "theirs, found late": (lambda s: s["averages"].popitem() and s, "does not fit Averaged: KeyError"),
    "the base's": (lambda s: s["base"].pop("param_groups") and s, "does not fit Averaged: KeyError"),
}


@pytest.mark.parametrize(("change", "message"), APART_DAMAGE.values(), ids=APART_DAMAGE.keys())
def test_a_damaged_state_dict_of_another_form_changes_nothing(change, message):
    _, other, train_other = averaged()
    train_other(range(7))
    damaged = change(through_file(other.state_dict()))
    (model, optimizer, train), (twin, untouched, train_twin) = averaged(), averaged()
    train(range(4)), train_twin(range(4))
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(damaged)
    assert identical(optimizer.state_dict(), untouched.state_dict())
    train(range(4, 9)), train_twin(range(4, 9))
    assert identical(
        [model.state_dict(), optimizer.state_dict()], [twin.state_dict(), untouched.state_dict()]
    )


def test_a_state_dict_of_another_form_loads_without_our_top_level_counters():
    _, optimizer, train = averaged()
    train(range(4))
    state = through_file(optimizer.state_dict())
    del state["fusedacc"]
    _, fresh, _ = averaged()
    fresh.load_state_dict(state)
    assert (fresh.micro_step, fresh.num_updates) == (1, 1)
    assert identical(fresh.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("choice", ["0", ""])
@pytest.mark.parametrize("before", [0, 8, 9])
def test_a_window_of_another_number_of_micro_batches_is_finished_first(before, choice, monkeypatch):
    """Its number is in the checkpoint. Later windows have that of the wrapper."""
    monkeypatch.setenv("FUSEDACC_ENGINE", choice)
    weight, optimizer = scalar(4)
    weight.backward()
    optimizer.step(), optimizer.zero_grad()
    state = through_file(optimizer.state_dict())

    weight, optimizer = scalar(8)
    for _ in range(before):
        weight.backward()
        optimizer.step(), optimizer.zero_grad()
    optimizer.load_state_dict(state)
    begun, seen = weight.item(), []
    for _ in range(3 + 16):
        weight.backward()
        optimizer.step(), optimizer.zero_grad()
        seen.append(begun - weight.item())
    assert seen == [0] * 2 + [1] * 8 + [2] * 8 + [3]
