"""Weights that stay on the device. Here they are CPU tensors that the window is told not to read."""

import copy
import math

import pytest
import torch
from loops import LOW, NoHostRead, assert_close_weights, loss_of, network

import fusedacc
from fusedacc.accumulators.reduction import WEIGHING
from fusedacc.optimizer import micro_batch as micro_batch_module

F32 = torch.float32
WEIGHTS = [3.0, 17.0, 9.0, 40.0]


@pytest.fixture
def _on_device(monkeypatch):
    monkeypatch.setattr(micro_batch_module, "_on_host", lambda tensor: False)


pytestmark = pytest.mark.usefixtures("_on_device")


def build(reduction, dtype=F32, steps=4, fused=True, **options):
    model = network(dtype)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    return model, fusedacc.AccumulatingOptimizer(inner, steps, reduction=reduction, **options)


def run(model, optimizer, weights, late=False):
    for seed, weight in enumerate(weights):
        with optimizer.accumulate(weight=None if late else weight) as micro_batch:
            loss_of(model, seed).backward()
            if late:
                micro_batch.weight = weight
        if optimizer._window.counted:
            optimizer.step()
    if not optimizer._window.counted:
        optimizer.step()
    optimizer.zero_grad()


def on_device(weights):
    return [torch.tensor(weight) for weight in weights]


@pytest.mark.parametrize("steps", [4, None])
@pytest.mark.parametrize("dtype", [F32, LOW])
@pytest.mark.parametrize(
    ("reduction", "late"), [("weighted", False), ("normalized", False), ("normalized", True)]
)
def test_device_weights_act_as_numbers(reduction, late, dtype, steps):
    """Late weights are integers here."""
    wanted, reference = build(reduction, dtype, steps)
    ours, optimizer = build(reduction, dtype, steps)
    for _ in range(3):
        run(wanted, reference, WEIGHTS)
        run(ours, optimizer, on_device(map(int, WEIGHTS) if late else WEIGHTS), late)
    assert_close_weights(ours, wanted, 1e-5 if dtype == F32 else 2e-2)
    assert int(optimizer.num_skipped) == 0


@pytest.mark.parametrize("reduction", WEIGHING)
def test_the_host_reads_no_weight(reduction):
    model, optimizer = build(reduction, max_grad_norm=0.1)
    run(model, optimizer, on_device(WEIGHTS))
    weights = on_device(WEIGHTS)
    with NoHostRead():
        run(model, optimizer, weights)
    assert optimizer.num_updates == 2


@pytest.mark.parametrize("weights", [[0, 0, 0, 0], [1, -1, 2, 3], [1, math.nan, 1, 1], [1, math.inf, 1, 1]])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("reduction", WEIGHING)
def test_an_update_with_invalid_weights_is_skipped(reduction, fused, weights):
    model, optimizer = build(reduction, fused=fused)
    run(model, optimizer, on_device(WEIGHTS))
    before = copy.deepcopy(list(model.parameters()))
    state = copy.deepcopy(optimizer.optimizer.state_dict()["state"])
    run(model, optimizer, on_device([float(weight) for weight in weights]))
    assert all(map(torch.equal, model.parameters(), before))
    for index, entry in optimizer.optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, state[index][name]) for name, value in entry.items())
    assert int(optimizer.num_skipped) == 1
    run(model, optimizer, on_device(WEIGHTS))
    assert int(optimizer.num_skipped) == 1


def test_a_partial_window_is_saved_and_flushed():
    def part(reference):
        model, optimizer = build("weighted", steps=10)
        weights = WEIGHTS if reference else on_device(WEIGHTS)
        run(model, optimizer, weights[:2])
        if not reference:
            other, restored = build("weighted", steps=10)
            other.load_state_dict(model.state_dict())
            restored.load_state_dict(optimizer.state_dict())
            model, optimizer = other, restored
        for seed in (2, 3):
            with optimizer.accumulate(weight=weights[seed]):
                loss_of(model, seed).backward()
            optimizer.step()
        optimizer.flush()
        return model

    assert_close_weights(part(False), part(True))


def test_a_second_weight_and_a_weight_of_two_elements_are_refused():
    model, optimizer = build("normalized")
    first, second = on_device([3.0, 4.0])
    with optimizer.accumulate() as micro_batch:
        micro_batch.weight = first
        loss_of(model).backward()
        micro_batch.weight = first
        with pytest.raises(RuntimeError, match="a micro-batch has one weight"):
            micro_batch.weight = second
    with (
        pytest.raises(TypeError, match=r"got a torch\.float32 tensor of shape \(2,\)"),
        optimizer.accumulate(weight=torch.zeros(2)),
    ):
        pass
