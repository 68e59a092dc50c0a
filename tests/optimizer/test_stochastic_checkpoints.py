"""Training with stochastic rounding continues from checkpoints and copies with the same bits."""

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from loops import LOW, assert_close_weights, identical, loss_of, network, through_file, wrap
from test_checkpoint_damage import everything
from test_resume import assert_resumes, settings

import fusedacc
from fusedacc.optimizer.checkpoint.format import NOISE, TOP_LEVEL

STOCHASTIC: dict[str, Any] = {"accumulate_dtype": LOW, "rounding": "stochastic", "seed": 8}
KINDS: dict[str, dict[str, Any]] = {
    "counted": {"dtype": LOW},
    "float32": {},
    "weighted": {"dtype": LOW, "reduction": "weighted"},
    "clipped": {"dtype": LOW, "max_grad_norm": 0.1},
    "masters": {"dtype": LOW, "master_weights": True},
    "model=": {"dtype": LOW, "inside": True},
    "model=, float32": {"inside": True, "max_grad_norm": 0.1},
    "manual": {"dtype": LOW, "steps": None, "sparse": True},
    "manual, mean": {"dtype": LOW, "steps": None, "sparse": True, "reduction": "mean"},
    "manual, weighted": {"dtype": LOW, "steps": None, "sparse": True, "reduction": "weighted"},
}


def made(kind: str, seed: int = 8):
    return settings(**KINDS[kind], **(STOCHASTIC | {"seed": seed}))


@pytest.mark.sweep
@pytest.mark.parametrize("done", [0, 1, 4, 7])
@pytest.mark.parametrize("before", [0, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_training_resumes_from_a_file_bit_for_bit(kind, before, done):
    assert_resumes(functools.partial(made, kind), done, before, to=functools.partial(made, kind, seed=9))


@pytest.mark.parametrize("steps", [3, None])
def test_training_with_create_graph_resumes_bit_for_bit(steps):
    """Autograd stores those gradients, and `step()` adds them."""

    def pair():
        model = network(LOW)
        return model, wrap(model, steps, **STOCHASTIC)

    def train(model, optimizer, numbers) -> None:
        for number in numbers:
            loss_of(model, number).backward(create_graph=number % 2 == 1)
            if steps or number % 3 == 2:
                optimizer.step(), optimizer.zero_grad()

    model, optimizer = pair()
    train(model, optimizer, range(2))
    if not steps:
        for p in model.parameters():
            p.grad = p.grad.detach()
    saved = through_file([model.state_dict(), optimizer.state_dict()])
    other, resumed = pair()
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for each, its in ((model, optimizer), (other, resumed)):
        train(each, its, range(2, 9))
    assert identical(model.state_dict(), other.state_dict())


def test_float32_accumulators_are_refused_inside_a_window_only():
    _, optimizer, train = settings(dtype=LOW)
    other, loaded, _ = settings(dtype=LOW, **STOCHASTIC)
    train(range(2))
    before = everything(other, loaded)
    with pytest.raises(ValueError, match=r"is \(5, 4\) torch\.float32; allowed: .* torch\.bfloat16"):
        loaded.load_state_dict(optimizer.state_dict())
    assert identical(before, everything(other, loaded))
    train(range(2, 4))
    loaded.load_state_dict(optimizer.state_dict())
    assert (loaded.num_updates, loaded.state_dict()[TOP_LEVEL][NOISE]["seed"]) == (1, 8)


@pytest.mark.parametrize(
    ("nearest", "way"),
    [({"accumulate_dtype": LOW}, "to"), ({"accumulate_dtype": LOW}, "from"), ({}, "from")],
    ids=["to", "from", "to float32"],
)
def test_checkpoints_of_either_rounding_load_into_the_other(nearest, way):
    options = [nearest, STOCHASTIC] if way == "to" else [STOCHASTIC, nearest]
    (model, optimizer, train), (other, resumed, train_other) = (
        settings(dtype=LOW, **each) for each in options
    )
    train(range(2))
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(through_file(optimizer.state_dict()))
    assert resumed.micro_step == 2
    state = resumed.state_dict()[TOP_LEVEL]
    assert state.get(NOISE, {}).get("seed") == (8 if way == "to" else None), "rounding is the wrapper's own"
    for go_on in (train, train_other):
        go_on(range(2, 4))
    assert resumed.num_updates == 1
    assert_close_weights(model, other, 0.02, 0.02)


GOOD = {"seed": 1, "addition": 2, "reduction": 0, "reduced": False, "written": 0}
DAMAGES: dict[str, Any] = {
    "None": None,
    "a number": 3,
    "a list": [1, 2, 3],
    "empty": {},
    **{f"no {name}": {key: value for key, value in GOOD.items() if key != name} for name in GOOD},
    **{f"negative {name}": GOOD | {name: -1} for name in GOOD},
    **{f"float {name}": GOOD | {name: 1.0} for name in GOOD},
    **{f"None as {name}": GOOD | {name: None} for name in GOOD},
    **{f"bool {name}": GOOD | {name: True} for name in ("seed", "addition", "reduction", "written")},
    "tensor": GOOD | {"seed": torch.tensor(1)},
    "large seed": GOOD | {"seed": 2**63},
    "large addition": GOOD | {"addition": 2**31},
    "large reduction": GOOD | {"reduction": 2**31},
}


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_noise_is_refused_and_changes_nothing(damage, rounding):
    _, optimizer, train = settings(dtype=LOW, **STOCHASTIC)
    train(range(6))
    state = copy.deepcopy(optimizer.state_dict())
    state[TOP_LEVEL][NOISE] = damage
    other, loaded, train_other = settings(dtype=LOW, **(STOCHASTIC if rounding == "stochastic" else {}))
    train_other(range(3))
    before = everything(other, loaded)
    with pytest.raises(
        ValueError, match=r"state_dict\['fusedacc'\] is damaged: noise is .*; allowed: a dict"
    ):
        loaded.load_state_dict(state)
    assert identical(before, everything(other, loaded))


@pytest.mark.parametrize("how", ["file", "pickle", "deepcopy"])
@pytest.mark.parametrize("done", [4, 5])
def test_training_resumes_bit_for_bit_after_edits_of_the_parameters(how, done):
    """One was removed, one was inserted at the front, and one group was added."""
    model = network(LOW)
    params = list(model.parameters())
    inner = torch.optim.SGD(params[1:3], lr=0.1, momentum=0.9)
    optimizer = fusedacc.AccumulatingOptimizer(inner, 3, **STOCHASTIC)
    for number in range(done):
        loss_of(model, number).backward()
        optimizer.step(), optimizer.zero_grad()
        if number == 1:
            group = inner.param_groups[0]["params"]
            inner.state.pop(group.pop(1), None)
            group.insert(0, params[0])
    params[3].grad = None  # what autograd has stored there
    optimizer.add_param_group({"params": params[3:]})
    if how == "file":
        saved = through_file([model.state_dict(), optimizer.state_dict()])
        other = network(LOW)
        other.load_state_dict(saved[0])
        twins = dict(zip(params, other.parameters(), strict=True))
        groups = [{**group, "params": [twins[p] for p in group["params"]]} for group in inner.param_groups]
        twin = fusedacc.AccumulatingOptimizer(torch.optim.SGD(groups, lr=0.1, momentum=0.9), 3, **STOCHASTIC)
        twin.load_state_dict(saved[1])
    else:
        both = [model, optimizer]
        other, twin = copy.deepcopy(both) if how == "deepcopy" else pickle.loads(pickle.dumps(both))
    for each, its in ((model, optimizer), (other, twin)):
        for number in range(done, 12):
            loss_of(each, number).backward()
            its.step(), its.zero_grad()
    assert optimizer.num_updates == twin.num_updates == 4
    assert identical(model.state_dict(), other.state_dict())
