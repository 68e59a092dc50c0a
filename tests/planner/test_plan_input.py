"""`plan` does not change its arguments, even if it fails, and its errors explain bad input."""

import random
import re

import numpy as np
import pytest
import torch
from planned_models import adamw, classified, mlp, planned, rows, wrapped
from torch import nn
from torch.nn import functional as F

import fusedacc
from fusedacc.planner import DataDependentError, budget, plan


@pytest.fixture(autouse=True)
def _known_scratch(monkeypatch):
    """Do not start a process that measures the memory of libraries. Other tests do that."""
    monkeypatch.setattr(budget, "scratch_bytes", lambda: 3 * 2**20)


class Counts(nn.Module):
    """Uses all random generators, and has a module in eval mode. With `fail` it raises an exception."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer, self.dropout = nn.BatchNorm1d(32), nn.Linear(32, 10), nn.Dropout(0.5)
        self.fail = False
        self.norm.eval()  # unlike the model

    def forward(self, x):
        random.random()
        np.random.rand()
        x = self.layer(self.dropout(self.norm(x)))
        if self.fail:
            raise LookupError("the model's own")
        return x


@pytest.mark.sweep
@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("way", ["stock", "wrapped", "model=", "masters"])
def test_nothing_is_changed(way, verify, fail):
    model = Counts()
    inner = adamw(model)
    batch = rows(6, 32)
    classified(model, batch).backward()
    inner.step(), inner.zero_grad()
    optimizer = inner
    if way != "stock":
        how = {"model=": {"model": model}, "masters": {"master_weights": True}}.get(way, {})
        optimizer = fusedacc.AccumulatingOptimizer(inner, 3, **how)
    classified(model, batch).backward()  # in mid-window
    if way != "stock":
        optimizer.step()
    model.fail = fail

    def look():
        tensors = [*model.parameters(), *model.buffers(), *batch]
        tensors += [value for own in inner.state.values() for value in own.values()]
        grads = [own.grad for own in model.parameters()]
        kept = optimizer.state_dict() if way != "stock" else {}
        leaves = torch.utils._pytree.tree_leaves(kept)
        return {
            "ids": [id(own) for own in tensors],
            "grad ids": [None if own is None else id(own) for own in grads],
            "values": [own.clone() for own in (*tensors, *(g for g in grads if g is not None))],
            "window": [own.clone() if isinstance(own, torch.Tensor) else own for own in leaves],
            "modes": [module.training for module in model.modules()],
            "requires": [own.requires_grad for own in model.parameters()],
            "python": random.getstate(),
            "numpy": np.random.get_state()[1].tolist(),
            "torch": torch.get_rng_state(),
            "hooks": [
                (len(own._backward_hooks or ()), len(own._post_accumulate_grad_hooks or ()))
                for own in model.parameters()
            ],
            "forwards": [vars(module).get("forward") for module in model.modules()],
            "groups": [{n: v for n, v in group.items() if n != "params"} for group in inner.param_groups],
            "grad mode": torch.is_grad_enabled(),
        }

    before = look()
    if fail:
        with pytest.raises(LookupError, match="the model's own"):
            planned(model, optimizer, batch, 12, verify=verify)
    else:
        planned(model, optimizer, batch, 12, verify=verify)
    after = look()
    for name, value in before.items():
        if name in ("values", "torch"):
            torch.testing.assert_close(after[name], value, rtol=0, atol=0, msg=name)
        elif name != "window":
            assert after[name] == value, name
    for new, old in zip(after["window"], before["window"], strict=True):
        assert torch.equal(new, old) if isinstance(old, torch.Tensor) else new == old
    model.fail = False
    classified(model, batch).backward()  # and it trains on
    optimizer.step()


def test_modes_of_single_modules_are_planned_for():
    """A norm that is in eval mode takes a single sample, and what it is planned with stays in that mode."""
    model = Counts()
    assert planned(model, wrapped(model), rows(6, 32), 6).micro_batch_size == 6


def test_a_norm_that_refuses_one_sample_is_planned_from_two():
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 10))
    optimizer = wrapped(model)
    found = planned(model, optimizer, rows(6, 32), 6)
    assert found.micro_batch_size == 6
    with pytest.raises(ValueError, match="less than one sample"):
        planned(model, optimizer, rows(6, 32), 6, memory_budget=found.peak_bytes // 4)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        planned(model, optimizer, rows(6, 32), 1)


WEIGHT = torch.ones(10, 32, requires_grad=True)


class Picks(nn.Linear):
    def forward(self, x):
        return super().forward(x)[x[:, 0] > 0]


def test_bad_models():
    model = Picks(32, 10)
    with pytest.raises(DataDependentError, match=r"nonzero.*find_micro_batch_size"):
        planned(model, adamw(model), rows(4, 32))
    with pytest.raises(TypeError, match=r"loss_fn must return the loss, a 0-dim tensor; got .*\(1, 10\)"):
        planned(model, adamw(model), rows(4, 32), 1, loss_fn=lambda model, batch: F.linear(batch[0], WEIGHT))
    with pytest.raises(TypeError, match=r"loss_fn=None calls model\(\*\*sample_batch\).loss.* is a tuple"):
        planned(model, adamw(model), rows(4, 32), loss_fn=None)


@pytest.mark.parametrize(
    ("how", "error", "told"),
    [
        ({"global_batch_size": 3, "world_size": 4}, ValueError, "=3 is less than world_size=4"),
        ({"global_batch_size": 0}, ValueError, "global_batch_size is an int of at least 1; it was 0"),
        ({"global_batch_size": 2.0}, TypeError, "global_batch_size is an int of at least 1; it was 2.0"),
        ({"world_size": True}, TypeError, "world_size is an int of at least 1; it was True"),
        ({"in_flight": 0}, ValueError, "in_flight is an int of at least 1; it was 0"),
        ({"global_batch_size": 3, "in_flight": 4}, ValueError, "=4 is more than the 3 samples of a rank"),
        ({"memory_budget": "much"}, ValueError, "memory_budget is"),
        ({"memory_budget": 1.5}, TypeError, "memory_budget is"),
        ({"model": "resnet"}, TypeError, "model must be a torch.nn.Module, got str"),
        ({"optimizer": "adam"}, TypeError, "optimizer must be a torch.optim.Optimizer, got str"),
        ({"optimizer": adamw(mlp())}, ValueError, "optimizer has none of the model's parameters"),
        (
            {"sample_batch": (torch.ones(4, 128), torch.ones(3))},
            ValueError,
            "number of samples ([0]: 4 in dimension 0, [1]: 3 in dimension 0); name the dimension",
        ),
    ],
)
def test_bad_arguments(how, error, told):
    model = mlp()
    given = {"model": model, "optimizer": adamw(model), "sample_batch": rows(4, 128)}
    given |= {"global_batch_size": 8, "memory_budget": "1GiB", "loss_fn": classified, "verify": False}
    with pytest.raises(error, match=re.escape(told)):
        plan(**given | how)


def test_a_budget_that_one_sample_exceeds():
    model = nn.Sequential(nn.Linear(32, 4096), nn.ReLU(), nn.Linear(4096, 10)).bfloat16()
    sample = rows(4, 32)[0].bfloat16(), rows(4, 32)[1]
    optimizer = wrapped(model, master_weights=True)
    one = planned(model, optimizer, sample, 1)
    with pytest.raises(ValueError, match="less than one sample takes") as raised:
        planned(model, optimizer, sample, 8, memory_budget=one.peak_bytes - 600_000)
    advice = (
        "no master_weights",
        "accumulate_dtype=torch.bfloat16",
        "sharding model and optimizer over 2 ranks",
    )
    for words in (*advice, "parameters"):
        assert words in str(raised.value)


def test_checkpointing_is_advised_if_activations_need_the_memory():
    model = nn.Sequential(*(nn.ReLU() for _ in range(6)), nn.Linear(4096, 10))
    sample = torch.ones(4, 512, 4096), torch.zeros(4, 512, dtype=torch.int64)
    one = planned(model, adamw(model), sample, 1)
    with pytest.raises(ValueError, match="activation checkpointing"):
        planned(model, adamw(model), sample, 8, memory_budget=one.peak_bytes - 2**20)
