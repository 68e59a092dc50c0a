"""`plan`: its figures agree with each other, and its plans are exact."""

import copy
import dataclasses
import math

import pytest
import torch
from planned_models import KINDS, adamw, classified, mlp, planned, rows, wrapped
from torch import nn

import fusedacc
from fusedacc.planner import KINDS as MEMORY_KINDS
from fusedacc.planner import Plan, budget

MIB = 2**20


@pytest.fixture(autouse=True)
def _known_scratch(monkeypatch):
    """Do not start a process that measures the memory of libraries. Other tests do that."""
    monkeypatch.setattr(budget, "scratch_bytes", lambda: 3 * MIB)


def wide() -> nn.Module:
    """Return a model whose memory depends mainly on the number of samples."""
    return nn.Sequential(nn.Linear(32, 1024), nn.ReLU(), nn.Linear(1024, 10))


def test_all_samples_at_once_if_they_fit():
    model = mlp()
    found = planned(model, wrapped(model), rows(4, 128))
    assert (found.micro_batch_size, found.gradient_accumulation_steps) == (64, 1)
    assert found.micro_batch_sizes == [64]
    assert not found.ragged
    assert found.memory_budget == 2**30


@pytest.mark.parametrize("way", ["stock", "wrapped", "model="])
def test_figures_agree_with_each_other(way):
    model = wide()
    optimizer = adamw(model) if way == "stock" else wrapped(model, model=model if way == "model=" else None)
    whole = planned(model, optimizer, rows(4, 32), 512)
    budget = int(0.9 * whole.peak_bytes)
    found = planned(model, optimizer, rows(4, 32), 512, memory_budget=budget)
    assert 1 <= found.micro_batch_size < 512
    assert sum(found.bytes_by_kind.values()) == found.peak_bytes <= budget
    assert set(MEMORY_KINDS) < set(found.bytes_by_kind)
    assert found.bytes_by_kind["parameters"] == sum(own.nbytes for own in model.parameters())
    assert found.headroom_bytes == budget - found.peak_bytes
    assert found.micro_batch_size * found.gradient_accumulation_steps >= 512
    assert sum(found.micro_batch_sizes) == 512
    assert 0 < found.accumulation_bytes_per_update < found.bytes_per_update
    assert set(found.certainty.values()) <= {"exact", "measured", "estimated"}
    assert found.tried[found.micro_batch_size] == found.peak_bytes
    # One more sample exceeds the budget.
    next_peak = found.tried[found.micro_batch_size + 1]
    assert next_peak > budget
    more = planned(model, optimizer, rows(4, 32), 512, memory_budget=next_peak)
    assert more.micro_batch_size > found.micro_batch_size
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.micro_batch_size = 3
    with pytest.raises(TypeError):
        found.bytes_by_kind["parameters"] = 0


def test_ranks_share_the_batch():
    model = mlp()
    for batch, world in ((64, 4), (10, 3)):
        found = planned(model, wrapped(model), rows(4, 128), batch, world_size=world)
        assert found.samples_per_rank == math.ceil(batch / world)
        assert found.micro_batch_size * found.gradient_accumulation_steps * world >= batch
        assert found.ragged == (batch % world != 0)
    model = wide()
    found = smaller(model, wrapped(model), 1204, world_size=4)
    trained = sum(parameter.nbytes for parameter in model.parameters())
    sent = budget.format_bytes(found.gradient_accumulation_steps * trained)
    assert f"keeps {budget.format_bytes(trained)} of unsharded sums" in str(found)
    assert f"of gradients per update, not {sent}" in str(found)
    assert "each of the 4 ranks holds all parameters and optimizer state of this module" in str(found)
    state = sum(found.bytes_by_kind[kind] for kind in ("parameters", "optimizer"))
    kept = budget.format_bytes(math.ceil(state / 4))
    assert f"keep {kept} of parameters and state instead of {budget.format_bytes(state)}" in str(found)


@pytest.mark.parametrize("steps", [8, None])
def test_a_stage_of_a_pipeline_keeps_the_activations_of_several_micro_batches(steps):
    stage = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 64))
    how = {"loss_fn": lambda stage, x: stage(x).sum(), "batch_dims": 0, "memory_budget": "1GiB"}
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(stage.parameters(), lr=0.1), steps)
    one, four = (
        fusedacc.planner.plan(
            stage, optimizer, torch.ones(64, 64), global_batch_size=64 * count, in_flight=count, **how
        )
        for count in (1, 4)
    )
    assert four.measured_peak_bytes == pytest.approx(four.peak_bytes, rel=0.05)
    # One is freed before the peak, which is when gradients are added for the first time.
    assert four.bytes_by_kind["activations"] >= 2.9 * one.bytes_by_kind["activations"] > 0
    assert four.bytes_by_kind["parameters"] == one.bytes_by_kind["parameters"]
    assert "the activations of 4 micro-batches are in memory at once" in str(four)
    assert four.gradient_accumulation_steps == 4
    assert four.wrapper_arguments()["gradient_accumulation_steps"] == 1  # a `step()` of the schedule


def smaller(model, optimizer, batch, share=0.9, **how):
    """Return a plan with less memory than all samples need."""
    whole = planned(model, optimizer, rows(4, 32), batch, **how)
    return planned(model, optimizer, rows(4, 32), batch, memory_budget=int(share * whole.peak_bytes), **how)


def test_a_ragged_window_gives_the_mean_of_all_samples():
    model = wide()
    found = smaller(model, wrapped(model), 301)
    batch = rows(301, 32)
    assert found.ragged
    assert found.wrapper_arguments()["reduction"] == "weighted"
    assert found.wrapper_arguments()["gradient_accumulation_steps"] == found.gradient_accumulation_steps
    twin = copy.deepcopy(model)
    classified(twin, batch).backward()
    optimizer = fusedacc.AccumulatingOptimizer(
        torch.optim.SGD(model.parameters(), 1.0), **found.wrapper_arguments()
    )
    before = [parameter.detach().clone() for parameter in model.parameters()]
    parts = list(found.split(batch))
    assert [samples for samples, _ in parts] == found.micro_batch_sizes
    for samples, part in parts:
        with optimizer.accumulate(weight=samples):
            classified(model, part).backward()
            optimizer.step(), optimizer.zero_grad()
    for old, new, wanted in zip(before, model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(old - new, wanted.grad, rtol=1e-4, atol=1e-6)
        assert not torch.equal(old, new)


def test_dividing_gives_micro_batches_of_one_size():
    model = wide()
    found = smaller(model, wrapped(model), 300)
    even = found.dividing()
    assert 300 % even.micro_batch_size == 0
    assert even.micro_batch_size <= found.micro_batch_size
    assert not any(300 % size == 0 for size in range(even.micro_batch_size + 1, found.micro_batch_size + 1))
    assert not even.ragged
    assert even.wrapper_arguments()["reduction"] == "mean"
    assert even.micro_batch_size * even.gradient_accumulation_steps == 300
    assert even.peak_bytes <= found.peak_bytes
    with pytest.raises(ValueError, match="global_batch_size=10 is not divisible by world_size=3"):
        planned(model, wrapped(model), rows(4, 32), 10, world_size=3).dividing()


def test_wrapper_arguments_are_those_of_the_plan():
    model = mlp().bfloat16()
    how = {"master_weights": True, "accumulate_dtype": torch.bfloat16, "max_grad_norm": 0.5, "model": model}
    inputs, labels = rows(4, 128)
    found = planned(model, wrapped(model, **how), (inputs.bfloat16(), labels), 8)
    given = found.wrapper_arguments()
    assert {name: given[name] for name in how} == how
    assert given["gradient_accumulation_steps"] == 1
    again = fusedacc.AccumulatingOptimizer(adamw(mlp().bfloat16()), **given | {"model": None})
    assert again.gradient_accumulation_steps == 1
    stock = planned(model, adamw(model), (inputs.bfloat16(), labels), 8)
    assert stock.wrapper_arguments() == {"gradient_accumulation_steps": 1}


def test_traffic_is_exact_if_it_depends_only_on_shapes():
    """The number of rows of an embedding's sum that are written depends on the words."""
    for inside, told in ((False, "exact"), (True, "estimated")):
        model = KINDS["tied"].make()
        optimizer = wrapped(model, model=model if inside else None)
        found = planned(model, optimizer, KINDS["tied"].draw(), 8)
        assert found.certainty["bytes_per_update"] == told


def test_budget_in_words_and_none(monkeypatch):
    model = mlp()
    assert planned(model, wrapped(model), rows(4, 128), memory_budget="1.5 GiB").memory_budget == 3 * 2**29
    monkeypatch.setattr("fusedacc.planner.plans.available", lambda device: 10**9)
    found = planned(model, wrapped(model), rows(4, 128), memory_budget=None)
    parameter_bytes = sum(own.nbytes for own in model.parameters())
    assert found.memory_budget == 950_000_000 + parameter_bytes


def test_verify_measures_the_peak():
    model = mlp()
    found = planned(model, wrapped(model), rows(16, 128), 32, verify=True)
    assert found.not_measured == ""
    assert found.measured_peak_bytes == pytest.approx(found.peak_bytes, rel=0.05)
    assert found.certainty["measured_peak_bytes"] == "measured"
    assert planned(model, wrapped(model), rows(4, 128), 8).measured_peak_bytes is None


def test_a_model_on_meta():
    with torch.device("meta"):
        model = mlp()
    real = mlp()
    with_shapes = planned(model, wrapped(model), rows(4, 128), 32, verify=True)
    assert with_shapes.measured_peak_bytes is None
    assert "meta" in with_shapes.not_measured
    assert with_shapes.peak_bytes == planned(real, wrapped(real), rows(4, 128), 32).peak_bytes
    assert all(own.is_meta for own in model.parameters())


def test_models_that_return_a_loss_need_no_loss_fn():
    class Own(nn.Linear):
        def forward(self, x, labels):
            loss = nn.functional.cross_entropy(super().forward(x), labels)
            return type("Output", (), {"loss": loss})

    model = Own(32, 10)
    x, labels = rows(4, 32)
    found = planned(model, wrapped(model), {"x": x, "labels": labels}, loss_fn=None)
    assert isinstance(found, Plan)
