"""The suite of docs/rounding.md, and what is drawn of rows that are made up."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch
from bench_setup import run_main

from benchmarks.contestants import rounded
from benchmarks.contestants.rounded import FLOAT32, NEAREST, STOCHASTIC, STOCK
from benchmarks.harness.results import Case, Results, read
from benchmarks.suites import rounding
from examples.demo.measure import batches
from examples.demo.model import load_text

TINY = dataclasses.replace(rounding.SMALL, **rounding.TINY, steps=2)
PARTS = ("training", "sums", "statistics", "speed", "lists", "memory")


@pytest.fixture
def kept(tmp_path):
    return Results(tmp_path / "rounding.csv", "cpu", rounding.COLUMNS)


@pytest.fixture(scope="module")
def text():
    return load_text()


def figures(kept, metric):
    return {(row.provider, row.at): row.median for row in kept.rows if row.metric == metric}


def test_ways_have_the_sums_that_they_are_named_after(text):
    for way in rounded.WITH_STOCK:
        loop = way.make(TINY)
        loop.update(batches(text, TINY, 0))
        if way.name != STOCK:
            sums = torch.float32 if way.name == FLOAT32 else torch.bfloat16
            assert {slot.accumulate_dtype for slot in loop.optimizer._slots} == {sums}
            assert ("rounded stochastically" in str(loop.optimizer.explain())) == (way.name == STOCHASTIC)
            loop.optimizer.close()


def test_training_compares_seeds_with_their_own_run(text, kept):
    config = dataclasses.replace(TINY, seed=1)
    found = rounding.losses_of(config, 4)
    assert found == rounding.losses_of(config, 4)
    assert {len(losses) for losses in found.values()} == {5}
    first = [losses[0] for losses in found.values()]
    assert first[0] == first[1] == first[2]  # the same weights and data
    kept.add(rounding.training_rows(config, found, 2))
    assert {row.seed for row in kept.rows} == {1}
    means = figures(kept, "loss")
    assert means[NEAREST, 4] == pytest.approx(sum(found[NEAREST][2:4]) / 2)
    above = figures(kept, f"loss above {FLOAT32}")
    assert set(above) == {(name, at) for name in (NEAREST, STOCHASTIC) for at in (2, 4)}
    assert above[STOCHASTIC, 4] == pytest.approx(means[STOCHASTIC, 4] - means[FLOAT32, 4], abs=1e-9)
    off = figures(kept, f"unseen loss above {FLOAT32}")
    assert off[NEAREST, 4] == found[NEAREST][-1] - found[FLOAT32][-1]


def test_jobs_side_by_side():
    here = rounding.side_by_side(divmod, [(7, 2), (9, 4)], here=True)
    assert list(here) == [((7, 2), (3, 1)), ((9, 4), (2, 1))]
    apart = rounding.side_by_side(divmod, [(7, 2), (9, 4)], here=False)
    assert sorted(apart) == [((7, 2), (3, 1)), ((9, 4), (2, 1))]


def test_sums_of_one_gradient_are_exact_and_of_several_apart(monkeypatch, kept):
    monkeypatch.setattr(rounding, "SIZES", (1,))
    rounding.sums(kept, "quick")
    apart, share = figures(kept, "apart"), figures(kept, "share kept")
    assert set(apart) == {(name, at) for name in (NEAREST, STOCHASTIC) for at in (1, 2, 4, 8)}
    assert {apart[name, 1] for name in (NEAREST, STOCHASTIC)} == {0}
    # Each addition errs by at most a unit in the last place.
    assert all(0 < apart[name, 8] < 8 * 2**-7 for name in (NEAREST, STOCHASTIC))
    assert all(abs(value - 1) < 8 * 2**-7 for value in share.values())


def test_statistics_keep_the_mean(monkeypatch, kept):
    rounding.statistics(kept, "quick")
    off = [value for (name, _), value in figures(kept, "off by").items() if name == STOCHASTIC]
    assert len(off) == rounding.LOOKS
    assert abs(off[-1]) < 4
    means = figures(kept, "mean")
    assert {value for (name, _), value in means.items() if name == NEAREST} == {1}
    counted = {key: value for key, value in figures(kept, "elements").items() if key[0] == STOCHASTIC}
    assert sum(counted.values()) == rounding.ELEMENTS
    mean = sum(value * elements for (_, value), elements in counted.items()) / rounding.ELEMENTS
    assert mean == pytest.approx(means[STOCHASTIC, 64])


def test_speed_has_the_bandwidth_beside_it():
    rows = rounding.timed(Case("speed", "small"), [(64,), (3, 5)], 2, bandwidth=True)
    against = {row.against for row in rows if row.provider == STOCHASTIC}
    assert against == {FLOAT32, NEAREST, "copy (bytes/s)", "triad (bytes/s)"}
    bytes_of = {row.provider: row.bytes for row in rows}
    assert bytes_of[STOCHASTIC] == bytes_of[NEAREST] == 6 * 79
    assert bytes_of[FLOAT32] == 10 * 79
    assert all(row.percent_of_peak for row in rows)


def test_memory_is_that_of_stock(kept):
    rounding.memory(kept, "quick")
    peaks = figures(kept, "peak memory")
    assert peaks[STOCHASTIC, None] == peaks[NEAREST, None] <= peaks[STOCK, None]
    assert peaks[STOCHASTIC, None] == pytest.approx(peaks[FLOAT32, None] - 2, abs=0.1)
    assert {row.reached for row in kept.rows if row.provider == STOCHASTIC and row.goal} == {"yes"}


def test_the_command_records_nothing_when_quick():
    code, told, _ = run_main(rounding, "--quick", "--only", "statistics")
    assert code == 0
    assert "statistics: " in told
    assert "off by" in told
    assert "appended" not in told


def page():
    return "# Sums\n" + "".join(
        f"<!-- {name}: written by make rounding-figures -->\nold\n<!-- end of {name} -->\n" for name in PARTS
    )


def test_plots_and_tables(kept, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib").use("Agg")
    charts = importlib.import_module("benchmarks.report.rounding_charts")
    monkeypatch.setattr(rounding, "SIZES", (1,))
    for seed in range(2):
        losses = {name: [3.0 + off, 2.0 + off, 1.5 + off] for name, off in OFF[seed].items()}
        kept.add(rounding.training_rows(dataclasses.replace(TINY, seed=seed), losses, 2))
    for part in ("sums", "statistics", "speed", "memory"):
        rounding.PARTS[part](kept, "quick")
    path, out = tmp_path / "rounding.md", tmp_path / "figures"
    path.write_text(page())
    code, told, _ = run_main(charts, "--results", kept.path, "--out", out, "--page", path)
    assert code == 0
    assert "not drawn" not in told
    assert "not written" not in told
    names = {f"rounding_{name}.{kind}" for name in charts.CHARTS for kind in ("png", "svg")}
    assert {each.name for each in out.iterdir()} == names
    written = path.read_text()
    assert "old" not in written
    # By seeds above float32 sums: 0.001 and 0.003 nats.
    assert f"| 2 | {NEAREST} | 2 | 1.5020 ± 0.0014 | 0.00200 ± 0.00141 | 0.00300 |" in written
    assert f"| 2 | {FLOAT32} | 2 | 1.5000 ± 0.0000 |  |  |" in written
    assert f"| {NEAREST} | 1 | 0 |  | 0.00 % |" in written
    assert "| ResNet-50 | " in written
    assert len(read(kept.path)) == len(kept.rows)


OFF = [
    {FLOAT32: 0.0, NEAREST: 0.001, STOCHASTIC: 0.0},
    {FLOAT32: 0.0, NEAREST: 0.003, STOCHASTIC: 0.0},
]


def test_what_has_no_rows_is_told(tmp_path):
    pytest.importorskip("matplotlib").use("Agg")
    charts = importlib.import_module("benchmarks.report.rounding_charts")
    path = tmp_path / "rounding.md"
    path.write_text(page())
    empty = Results(tmp_path / "empty.csv", "cpu", rounding.COLUMNS)
    code, told, _ = run_main(charts, "--results", empty.path, "--out", tmp_path, "--page", path)
    assert code == 0
    assert told.count("not drawn") == 3
    assert told.count("not written") == len(PARTS)
    assert path.read_text() == page()
    assert run_main(charts, "--results", tmp_path / "none.csv", "--page", path)[0] == 1
