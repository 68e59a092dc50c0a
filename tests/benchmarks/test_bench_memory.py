"""The suite of docs/memory.md, and plots and tables of the recorded rows."""

import importlib
import re

import pytest
import torch
from bench_setup import page_of, run_main

from benchmarks import harness
from benchmarks.records import Results
from benchmarks.suites import memory

PAGE = page_of("memory-figures", "grows", "halves")


@pytest.fixture
def kept(tmp_path):
    return Results(tmp_path / "memory.csv", "cpu", memory.COLUMNS)


def figures(kept, metric):
    return {(row.provider, row.micro_batch): row.median for row in kept.rows if row.metric == metric}


def test_halves_make_the_same_step_in_less_memory(monkeypatch, kept):
    monkeypatch.setattr(memory, "HALVES", ("vit",))
    memory.halves(kept, "quick")
    off, peak = figures(kept, "gradients apart"), figures(kept, "peak")
    assert off.pop(("stock, 1 x 64", 64)) == 0
    assert set(off) == {(loop.name, loop.size) for loop in memory.LOOPS[1:]}
    # The rounding error of sums of some thousand terms.
    assert all(0 < apart < 32 * torch.finfo(torch.float32).eps for apart in off.values())
    assert peak["fusedacc, 2 x 32", 32] < peak["stock, 1 x 64", 64]
    assert set(figures(kept, "time")) == set(peak)
    assert figures(kept, "time, share")["stock, 1 x 64", 64] == 1


def test_a_norm_over_samples_changes_the_gradient():
    pytest.importorskip("sklearn")
    images, labels = (each[:16] for each in memory.digits())
    for norm, changes in (("BatchNorm", True), ("GroupNorm", False)):
        model = memory.net(norm, 4, 0)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        whole, parts = (memory.gradient(model, images, labels, size) for size in (16, 4))
        assert (memory.apart([parts], [whole]) > 0.01) == changes
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_plots_and_tables_of_the_recorded_figures(tmp_path):
    pytest.importorskip("matplotlib").use("Agg")
    charts = importlib.import_module("benchmarks.report.memory_charts")
    page, out = tmp_path / "memory.md", tmp_path / "figures"
    page.write_text(PAGE)
    recorded = harness.RESULTS.with_name("memory.csv")
    code, told, _ = run_main(charts, "--results", recorded, "--out", out, "--page", page)
    assert code == 0
    assert "not drawn" not in told
    names = {f"memory_{name}.{kind}" for name in charts.CHARTS for kind in ("png", "svg")}
    assert {path.name for path in out.iterdir()} == names
    text = page.read_text()
    assert "old" not in text
    rows = re.findall(r"^\|[^|]+\| (\d+) \| (\d+\.\d\d) \| (\d+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    assert len(rows) == len(memory.GROWS)
    for stays, adds, whole, half, one in (map(float, row) for row in rows):
        assert one == pytest.approx(stays + adds, abs=1)  # rounded
        assert half == pytest.approx(stays + 32 * adds, abs=1)
        assert whole > half
