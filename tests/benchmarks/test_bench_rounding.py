"""The suite of docs/rounding.md, and what is drawn of rows that are made up."""

import dataclasses
import importlib

import pytest
import torch
from bench_setup import page_of, run_main

from benchmarks.contestants import rounded
from benchmarks.contestants.rounded import FLOAT32, NEAREST, STOCHASTIC, STOCK
from benchmarks.suites import rounding
from examples.demo.measure import batches
from examples.demo.model import load_text
from fusedacc.commands.measuring.records import Results, read

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


PAGE = page_of("rounding-figures", *PARTS)


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
    path.write_text(PAGE)
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


OFF = [{FLOAT32: 0.0, NEAREST: 0.001, STOCHASTIC: 0.0}, {FLOAT32: 0.0, NEAREST: 0.003, STOCHASTIC: 0.0}]
