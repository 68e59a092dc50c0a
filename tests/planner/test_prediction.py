"""The peak predicted with fake tensors is that of real training, for all options of the wrapper."""

import pytest
import sweeps
import torch
from planned_models import CPU, KINDS, adamw, classified, mlp, rows, under_autocast, wrapped
from planned_models import predicted_and_measured as both

from fusedacc.planner.prediction import Batch, Predictor, recipe_of

#: The allowed relative error of a prediction.
CLOSE = 0.02
WAYS = {
    "stock": adamw,
    "stock, fused": lambda model: adamw(model, fused=True),
    "wrapped": wrapped,
    "model=": lambda model: wrapped(model, model=model),
}


def assert_close(found: tuple[int, int]) -> None:
    predicted, measured = found
    assert abs(predicted / measured - 1) <= CLOSE, f"predicted {predicted}, measured {measured}"


def traits(kind: str, way: str) -> dict[str, object]:
    return {"kind": kind, "wrapped": "stock" not in way, "fused": "fused" in way, "model=": "model" in way}


@pytest.mark.sweep(of=traits, pairs=False)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_peak_is_that_of_real_training(kind, way):
    model = KINDS[kind].make()
    assert_close(both(model, WAYS[way](model), KINDS[kind].draw()))


@pytest.mark.parametrize("kind", KINDS if sweeps.FULL else ["checkpointed", "tied"])
def test_peak_under_autocast(kind):
    model = KINDS[kind].make()
    optimizer = wrapped(model, model=model, keep_casts=True)
    assert_close(both(model, optimizer, KINDS[kind].draw(), under_autocast))


@pytest.mark.sweep(pairs=False)
@pytest.mark.parametrize("way", ["stock", "wrapped", "model="])
@pytest.mark.parametrize("kind", ["mlp", "tied"])
def test_peak_of_bfloat16(kind, way):
    model = KINDS[kind].make().bfloat16()
    inputs, labels = KINDS[kind].draw()
    inputs = inputs.bfloat16() if inputs.is_floating_point() else inputs
    assert_close(both(model, WAYS[way](model), (inputs, labels)))


@pytest.mark.parametrize(
    "how",
    [
        {"master_weights": True},
        {"accumulate_dtype": torch.bfloat16},
        {"master_weights": True, "accumulate_dtype": torch.bfloat16},
        {"max_grad_norm": 1.0, "skip_nonfinite": True},
    ],
    ids=lambda how: ", ".join(how),
)
def test_peak_of_masters_and_narrow_sums(how):
    model = mlp().bfloat16()
    inputs, labels = rows(64, 128)
    assert_close(both(model, wrapped(model, **how), (inputs.bfloat16(), labels)))


def test_peak_of_the_manual_loop_and_of_one_step():
    for steps in (None, 1, 3):
        model = mlp()
        assert_close(both(model, wrapped(model, steps), rows(32, 128), steps=steps or 2))


def predictor(model, draw, note=lambda size: None, loss_fn=classified):
    return Predictor(model, recipe_of(adamw(model)), Batch(draw), loss_fn, CPU, note)


def test_each_size_is_run_once():
    seen = []
    own = predictor(mlp(), rows(4, 128), seen.append)
    first = own.peak(3, 7)
    assert own.peak(3, 2) is first  # micro-batches between the first and the last are as the last
    assert own.peak(3, 1) is not first
    assert seen == [3, 3]
    assert set(own.tried) == {3}
