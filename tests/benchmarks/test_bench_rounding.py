"""The suite of docs/rounding.md, and plots and tables of synthetic rows."""

import dataclasses
import importlib

import pytest
from bench_setup import page_of, run_main

from benchmarks.records import Results, read
from benchmarks.suites import rounding
from benchmarks.suites.rounding import FLOAT32, NEAREST, STOCHASTIC

TINY = dataclasses.replace(rounding.SMALL, **rounding.TINY, steps=2)
PARTS = ("training", "sums", "statistics", "speed", "lists", "memory")


OFF = [{FLOAT32: 0.0, NEAREST: off, STOCHASTIC: 0.0} for off in (0.001, 0.003)]


def test_plots_and_tables(tmp_path, monkeypatch):
    kept = Results(tmp_path / "rounding.csv", "cpu", rounding.COLUMNS)
    pytest.importorskip("matplotlib").use("Agg")
    charts = importlib.import_module("benchmarks.report.rounding_charts")
    monkeypatch.setattr(rounding, "SIZES", (1,))
    for seed in range(2):
        losses = {name: [3.0 + off, 2.0 + off, 1.5 + off] for name, off in OFF[seed].items()}
        kept.add(rounding.training_rows(dataclasses.replace(TINY, seed=seed), losses, 2))
    for part in ("sums", "statistics", "speed", "memory"):
        rounding.PARTS[part](kept, "quick")
    path, out = tmp_path / "rounding.md", tmp_path / "figures"
    path.write_text(page_of("rounding-figures", *PARTS))
    code, told, _ = run_main(charts, "--results", kept.path, "--out", out, "--page", path)
    assert (code, "not drawn" in told, "not written" in told) == (0, False, False)
    names = {f"rounding_{name}.{kind}" for name in charts.CHARTS for kind in ("png", "svg")}
    assert {each.name for each in out.iterdir()} == names
    written = path.read_text()
    assert "old" not in written
    # With the two seeds, the losses are 0.001 and 0.003 above those of float32 sums.
    assert f"| 2 | {NEAREST} | 2 | 1.5020 ± 0.0014 | 0.00200 ± 0.00141 | 0.00300 |" in written
    assert f"| 2 | {FLOAT32} | 2 | 1.5000 ± 0.0000 |  |  |" in written
    assert f"| {NEAREST} | 1 | 0 |  | 0.00 % |" in written
    assert "| ResNet-50 | " in written
    assert len(read(kept.path)) == len(kept.rows)
