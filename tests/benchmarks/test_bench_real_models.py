"""The benchmark of real models: its models, loops, rows and goals. No test checks times."""

import dataclasses

import pytest
import torch
from bench_setup import run_main

from benchmarks import records
from benchmarks.contestants import zoo
from benchmarks.contestants.zoo import training
from benchmarks.suites import real_models

MODELS = (
    "gpt-64",
    "gpt-256",
    "gpt-words",
    "vit",
    "lstm",
    "mlp",
    "conv",
    "unet",
    "moe",
    "moe-stacked",
    "t5",
    "mamba",
    "dlrm",
    "gpt-compiled",
    "mlp-compiled",
)


def test_every_model_is_listed():
    assert tuple(zoo.entries()) == tuple(zoo.entries(True)) == MODELS


@pytest.mark.parametrize("name", MODELS)
def test_a_model_learns_its_micro_batch(name):
    of = dataclasses.replace(zoo.entries(True)[name], regions=None)
    torch.manual_seed(0)
    model = of.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs, targets = of.batch(torch.Generator().manual_seed(0))
    losses = []
    for _ in range(20):
        loss = of.loss(model(*inputs), targets)
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step(), optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("precision", ["float32", "autocast", "bfloat16", "bfloat16 sums"])
def test_all_ways_train_alike(precision):
    task = training.Training(zoo.entries(True)["mlp"], precision, steps=4)
    data = [task.window(number) for number in range(3)]
    losses, weights = {}, {}
    for way in (*training.STOCK_VARIANTS[precision], *training.ours(precision)):
        loop = way.make(task)
        losses[way.name] = [loop.update(window).item() for window in data]
        weights[way.name] = loop.parameters
        assert {p.dtype for p in loop.parameters} == {task.dtype}
    first, *others = losses
    # Norms are summed in different orders, and bfloat16 weights may be rounded to either side of a tie.
    rounding = 2.0**-6 if precision.startswith("bfloat16") else 2.0**-8 if precision == "autocast" else 1e-5
    for name in others:
        assert losses[name][0] == pytest.approx(
            losses[first][0], rel=rounding if training.MODEL in name else 0
        )
        assert losses[name] == pytest.approx(losses[first], rel=rounding)
    assert len(set(losses[first])) == 3
    assert precision != "autocast" or losses[training.KEPT] == losses[training.MODEL]


@pytest.fixture
def rows():
    """Return the rows of a tiny model in two precisions, by metric and provider."""
    results = records.Results(None, "cpu")
    real_models.figures(results, "quick", models=["mlp"], precisions=["autocast", "bfloat16"])
    return {(row.dtypes, row.metric, row.provider): row for row in results.rows}


def test_our_loops_are_compared_with_the_fastest_of_pytorch(rows):
    for precision in ("autocast", "bfloat16"):
        names = {way.name for way in training.STOCK_VARIANTS[precision]}
        ours = {way.name for way in training.ours(precision)}
        for metric in ("time", "peak memory"):
            of_metric = {key[2]: row for key, row in rows.items() if key[:2] == (precision, metric)}
            (best,) = names & of_metric.keys()
            assert of_metric.keys() == {best, *ours}
            assert {row.provider: row.against for row in of_metric.values() if row.against} == {
                name: training.MODEL if name == training.KEPT else best for name in ours
            }
    assert ("autocast", "time", training.KEPT) in rows


def test_a_loop_is_too_slow_if_its_whole_interval_is(monkeypatch):
    seconds = {"p.grad": [1.0] * 7, training.PLAIN: [1.03] * 6 + [1.0], training.MODEL: [1.1] * 7}
    monkeypatch.setattr(
        real_models, "take_turns", lambda runs, rounds: {name: seconds[name] for name in runs}
    )
    found = real_models.measure(zoo.entries(True)["mlp"], "float32", 0.1)
    reached = {row.provider: row.reached for row in found if row.metric == "time"}
    assert reached == {"p.grad": "", training.PLAIN: "yes", training.MODEL: "no"}
    (plain,) = [row for row in found if (row.metric, row.provider) == ("time", training.PLAIN)]
    assert plain.note == "0.971 to 1.000"


def test_the_command_measures_what_it_is_asked(tmp_path):
    options = ("--quick", "--models", "lstm", "--precisions", "float32")
    code, shown, told = run_main(real_models, *options)
    assert code == 0, told
    assert "real_models: lstm, window, float32" in shown
    code, _, told = run_main(real_models, "--models", "pentium")
    assert code == 1
    assert "unknown model 'pentium'; allowed: gpt-64" in told
