"""`load_state_dict` of a damaged checkpoint raises and changes nothing, or training continues.

A case is made from its number alone. FUSEDACC_FULL_TESTS=1 runs thousands.
"""

import copy
import functools
import inspect
import json
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from loops import LOW, Failure, fail, identical, loss_of, micro_batch
from torch import nn

import fusedacc
from fusedacc.optimizer.checkpoint.format import COUNTERS, MASTER, SUM, TOP_LEVEL, pack, unpack
from fusedacc.optimizer.checkpoint.inner_checks import SHAPED

CASES = 12000 if os.environ.get("FUSEDACC_FULL_TESTS") else 140


def network(dtype: torch.dtype, width: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2)).to(dtype)


def wrapped(make: Callable, steps: Any, dtype: torch.dtype = torch.float32, **options) -> tuple:
    model = network(dtype)
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.02}]
    return model, fusedacc.AccumulatingOptimizer(make(groups), steps, **options)


KINDS: dict[str, Callable[[], tuple]] = {
    "counted": lambda: wrapped(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 3),
    "bfloat16": lambda: wrapped(lambda p: torch.optim.AdamW(p, lr=0.01), 3, LOW),
    "masters": lambda: wrapped(lambda p: torch.optim.Adam(p, lr=0.01), 3, LOW, master_weights=True),
    "manual": lambda: wrapped(lambda p: torch.optim.RMSprop(p, lr=0.01), None),
    "weighted": lambda: wrapped(lambda p: torch.optim.AdamW(p, lr=0.01), 3, LOW, reduction="weighted"),
    "fused": lambda: wrapped(
        lambda p: torch.optim.AdamW(p, lr=0.01, fused=True), 3, max_grad_norm=0.1, skip_nonfinite=True
    ),
    "scheduled": lambda: wrapped(lambda p: torch.optim.Adamax(p, lr=0.01), lambda update: 3),
}


def train(model: nn.Module, optimizer: fusedacc.AccumulatingOptimizer, seeds: range) -> None:
    weighted = optimizer._window.reduction.weighs
    for seed in seeds:
        with optimizer.accumulate(weight=seed + 1 if weighted else None):
            loss_of(model, seed).backward()
        if optimizer._window.counted or seed % 3 == 2:
            optimizer.step(), optimizer.zero_grad()


def everything(model: nn.Module, optimizer: fusedacc.AccumulatingOptimizer) -> list:
    """Return all that a failed load must not change."""
    counts = [optimizer.micro_step, optimizer.num_updates, int(optimizer.num_skipped), optimizer.has_updated]
    shown = [p.grad is None or p.grad.clone() for p in model.parameters()]
    return copy.deepcopy([model.state_dict(), optimizer.state_dict(), counts, shown])


def paths(tree: Any, path: tuple = ()) -> Iterator[tuple]:
    """Return the path to each node below the root."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from paths(child, (*path, key))


VALUES = None, -1, 7, 1.5, float("nan"), True, "garbage", [], {}, [1, 2], torch.zeros(0), torch.ones(7)
GARBAGE = (
    *(lambda _, value=value: copy.copy(value) for value in VALUES),
    lambda _: torch.ones(5, 4, device="meta"),
    lambda old: old.double() if isinstance(old, torch.Tensor) else (1 << 70),
    lambda old: old.to(torch.int32) if isinstance(old, torch.Tensor) else "mean",
    lambda old: old.to_sparse() if isinstance(old, torch.Tensor) and old.ndim else "sum",
    lambda old: old[:-1] if isinstance(old, torch.Tensor) and old.ndim else b"",
    lambda old: old.reshape(-1) if isinstance(old, torch.Tensor) else False,
)


def damage(state: dict, rng: random.Random) -> str:
    """Delete or replace one node of a  Packed counters are damaged inside too."""
    found = list(paths(state))
    packed = [path for path in found if path[-1] == COUNTERS]
    path, inside = rng.choice(found), None
    if packed and rng.random() < 0.3:
        path = rng.choice(packed)
        owner = parent_of(state, path)
        if not isinstance(owner[path[-1]], torch.Tensor):
            return "nothing"
        try:
            inside = unpack(owner[path[-1]])
        except ValueError:
            return "nothing"
    target, where = (state, path) if inside is None else (inside, rng.choice(list(paths(inside)) or [()]))
    if not where:
        return "nothing"
    parent, how = parent_of(target, where), "deleted"
    if rng.random() < 0.4:
        del parent[where[-1]]
    else:
        parent[where[-1]] = rng.choice(GARBAGE)(parent[where[-1]])
        new = parent[where[-1]]
        tensor = isinstance(new, torch.Tensor)
        how = f"= {new.layout} {new.device} {tuple(new.shape)}" if tensor else f"= {new!r}"
    if inside is not None:
        try:
            text = json.dumps(inside)
        except TypeError:
            return "nothing"
        parent_of(state, path)[path[-1]] = torch.tensor(list(text.encode()), dtype=torch.uint8)
        where = (*path, *where)
    return f"{'/'.join(map(str, where))} {how}"


def parent_of(tree: Any, path: tuple) -> Any:
    for key in path[:-1]:
        tree = tree[key]
    return tree


@functools.cache
def saved(kind: str, partial: bool = True) -> dict:
    """Return a checkpoint after one update and, if `partial`, two more micro-batches."""
    model, optimizer = KINDS[kind]()
    train(model, optimizer, range(9, 14 if partial else 12))
    return optimizer.state_dict()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("partial", [True, False])
def test_an_undamaged_checkpoint_loads_completely(kind, partial):
    for done in (0, 4, 5):
        model, optimizer = KINDS[kind]()
        train(model, optimizer, range(done))
        optimizer.load_state_dict(saved(kind, partial))
        assert identical(saved(kind, partial), optimizer.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_checkpoint_changes_nothing_or_trains(kind):
    """Load into an optimizer inside a window, or into a fresh one."""
    refused = 0
    count = CASES // len(KINDS)
    for number in range(count):
        rng = random.Random(f"{kind} {number}")
        done = range(rng.choice([0, 4, 5]))
        (model, optimizer), (alike, untouched) = KINDS[kind](), KINDS[kind]()
        train(model, optimizer, done)
        state = copy.deepcopy(saved(kind, partial=rng.random() < 0.75))
        what = "; ".join(damage(state, rng) for _ in range(rng.choice([1, 1, 2, 3])))
        before = everything(model, optimizer)
        try:
            optimizer.load_state_dict(state)
        except (ValueError, TypeError) as error:
            refused += 1
            train(alike, untouched, done)
            try:
                assert identical(before, everything(model, optimizer))
                assert optimizer.state.keys() == dict.fromkeys(model.parameters()).keys() or not done
                for each in ((model, optimizer), (alike, untouched)):
                    train(*each, range(5, 12))
                assert identical(everything(alike, untouched), everything(model, optimizer))
            except AssertionError as difference:
                raise AssertionError(f"case {number}: {what}: {error}") from difference
        except Exception as error:
            raise AssertionError(f"case {number}: {what} raised {error!r}") from error
        else:
            # Options and counts may have any value of their kind. Two kinds of damage may hide each other.
            if "param_groups" in what or "step = -1" in what or ";" in what:
                continue
            try:
                train(model, optimizer, range(6))
            except Exception as error:
                raise AssertionError(f"case {number}: {what} was loaded and does not run") from error
    assert count / 3 < refused < count, "no case was refused, or every case"


def cut(entry: dict, key: str) -> None:
    entry[key] = entry[key][:-1]


def put(index: int, key: str, value: Any) -> Callable[[dict], None]:
    return lambda state: state["state"][index].update({key: value})


def repack(change: Callable[[dict], Any]) -> Callable[[dict], None]:
    """Return a function that changes the counters beside the first accumulator."""

    def changed(state: dict) -> None:
        counters = unpack(state["state"][0][COUNTERS])
        change(counters)
        state["state"][0][COUNTERS] = pack(counters)

    return changed


DAMAGE = {
    "a sum is missing": (lambda s: s["state"][1].pop(SUM), "sums without counters"),
    "a sum and its counters are missing": (
        lambda s: [s["state"][1].pop(key) for key in (SUM, COUNTERS)],
        "sums of 4 parameters, it holds those of 3",
    ),
    "a sum of another shape": (lambda s: cut(s["state"][0], SUM), "sum of parameter 0"),
    "a sum that would lose digits": (
        lambda s: s["state"][0].update({SUM: s["state"][0][SUM].double()}),
        r"float64; allowed.*float32",
    ),
    "a sum of nothing": (put(0, SUM, None), "sum of parameter 0"),
    "counters that are no dict": (put(0, COUNTERS, pack([1])), "0 are damaged"),
    "truncated counters": (lambda s: cut(s["state"][2], COUNTERS), "damaged"),
    "counters of another window": (repack(lambda c: c["window"].update(micro_step=1)), "another window"),
    "no counters at the top, and none beside": (
        lambda s: [s.pop(TOP_LEVEL), *(entry.pop(COUNTERS) for entry in s["state"].values())],
        "sums without counters",
    ),
    "a negative count": (lambda s: s[TOP_LEVEL]["window"].update(num_updates=-1), "num_updates is -1"),
    "a count that is a string": (
        lambda s: s[TOP_LEVEL]["window"].update(micro_step="2"),
        "micro_step is '2'",
    ),
    "a count that is no int": (
        lambda s: s[TOP_LEVEL]["window"].update(micro_step=1.5),
        "is 1.5; allowed: an int",
    ),
    "a count is missing": (lambda s: s[TOP_LEVEL]["window"].pop("sum_scale"), "lacks sum_scale"),
    "another version": (lambda s: s[TOP_LEVEL].update(version=99), "is of version 99; allowed: 1$"),
    "the ranks are missing": (lambda s: s[TOP_LEVEL].pop("ranks"), "lacks ranks"),
    "ranks that are no count": (lambda s: s[TOP_LEVEL].update(ranks=0), "ranks is 0; allowed: an int >= 1"),
    "other ranks": (
        lambda s: s[TOP_LEVEL].update(ranks=2, ranks_of="FSDP2"),
        "window of 2 ranks of FSDP2, and this run has one process. .*include_partial=False",
    ),
    "another loop": (lambda s: s[TOP_LEVEL].update(counted=False), "manual loop"),
    "another reduction": (lambda s: s[TOP_LEVEL].update(reduction="sum"), "include_partial=False"),
    "sums without a window": (lambda s: s[TOP_LEVEL]["window"].update(micro_step=0), "damaged"),
    "state that is no dict": (lambda s: s.update(state=[]), "'state'.* must be a dict"),
    "groups that are no list": (lambda s: s.update(param_groups={}), "param_groups"),
    "a parameter named twice": (lambda s: s["param_groups"][0].update(params=[0, 0]), "each parameter once"),
    "an option is missing": (lambda s: s["param_groups"][1].pop("lr"), "group 1 .*lacks 'lr'"),
    "an option of another kind": (lambda s: s["param_groups"][0].update(betas=0.9), "'betas' of group 0"),
    "state is missing": (lambda s: s["state"][3].pop("exp_avg"), "parameter 3 lacks exp_avg"),
    "state of another shape": (lambda s: cut(s["state"][3], "exp_avg_sq"), "'exp_avg_sq' of parameter 3"),
    "state that is no tensor": (put(3, "exp_avg", "lost"), "'exp_avg' of parameter 3"),
    "a master is missing": (lambda s: s["state"][2].pop(MASTER), "lacks the masters of 1"),
    "a master of another shape": (put(0, MASTER, torch.zeros(3)), "the master of parameter 0"),
    "a master of bfloat16": (
        put(0, MASTER, torch.zeros(5, 4, dtype=LOW)),
        "master of parameter 0",
    ),
    "a master that is no tensor": (put(0, MASTER, "text"), "the master of parameter 0"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_the_error_names_the_damage(name):
    change, message = DAMAGE[name]
    kind = "masters" if "master" in name else "bfloat16"
    model, optimizer = KINDS[kind]()
    train(model, optimizer, range(5))
    before, state = everything(model, optimizer), copy.deepcopy(saved(kind))
    change(state)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        optimizer.load_state_dict(state)
    assert identical(before, everything(model, optimizer))


def test_an_empty_window_with_a_weight_is_refused():
    _, optimizer = KINDS["counted"]()
    state = copy.deepcopy(saved("counted", partial=False))
    state[TOP_LEVEL]["window"].update(weight_total=2.0)
    with pytest.raises(ValueError, match="neither empty nor partly filled"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("state", [None, 3, "state", [], {}, {"state": {}}, {"param_groups": []}])
def test_other_values_than_checkpoints_are_refused(state):
    _, optimizer = KINDS["counted"]()
    with pytest.raises(ValueError, match="'state' and 'param_groups'"):
        optimizer.load_state_dict(state)


def test_the_list_of_state_with_the_parameters_shape_is_complete():
    """Try each of torch's optimizers."""
    shaped, others = set(), set()
    for name, kind in inspect.getmembers(torch.optim, inspect.isclass):
        if name in ("Optimizer", "LBFGS"):
            continue
        params = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(5, 2))]
        options = [key for key in ("amsgrad", "centered") if key in inspect.signature(kind).parameters]
        values = {"momentum": 0.9} if "momentum" in inspect.signature(kind).parameters else {}
        optimizer = kind(params, lr=0.01, **values, **dict.fromkeys(options, True))
        for param in params:
            param.grad = torch.ones_like(param)
            param.grad = param.grad.to_sparse() if name == "SparseAdam" else param.grad
        optimizer.step()
        for param in params:
            for key, value in optimizer.state[param].items():
                same = isinstance(value, torch.Tensor) and value.shape == param.shape
                (shaped if same else others).add(key)
    assert shaped | {"variance"} == SHAPED  # Adafactor's, of a vector
    assert not others & SHAPED


def test_an_error_of_a_load_hook_is_raised_unchanged():
    model, optimizer = KINDS["masters"]()
    optimizer.register_load_state_dict_pre_hook(fail)
    with pytest.raises(Failure):
        optimizer.load_state_dict(saved("masters"))
    loss_of(model, 0).backward()
    assert all(p.grad is None for p in model.parameters()), "gradients are not captured any more"


def test_a_hook_may_adapt_a_checkpoint_of_another_width():
    def widen(_, state: dict) -> None:
        for index, shape in ((0, (5, 4)), (1, (5,)), (2, (2, 5))):
            narrow = state["state"][index]["momentum_buffer"]
            wide = torch.zeros(shape)
            wide[tuple(slice(0, size) for size in narrow.shape)] = narrow
            state["state"][index] = {"momentum_buffer": wide}

    narrow = network(torch.float32, width=3)
    bare = torch.optim.SGD([{"params": narrow[i].parameters()} for i in (0, 2)], lr=0.1, momentum=0.9)
    micro_batch(narrow, bare, 0)
    _, optimizer = KINDS["counted"]()
    with pytest.raises(ValueError, match="'momentum_buffer' of parameter 0"):
        optimizer.load_state_dict(copy.deepcopy(bare.state_dict()))
    optimizer.register_load_state_dict_pre_hook(widen)
    optimizer.load_state_dict(copy.deepcopy(bare.state_dict()))
    loaded = optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"]
    assert torch.equal(loaded[:3], bare.state[narrow[0].weight]["momentum_buffer"])
