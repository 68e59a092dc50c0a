"""The suite of docs/memory.md, and what is drawn of rows that are made up."""

from __future__ import annotations

import importlib

import pytest
import torch
from bench_setup import page_of, run_main

from benchmarks.contestants import normed
from benchmarks.machines.zoo import entries
from benchmarks.suites import memory
from fusedacc.commands.measuring.records import Results, read

PAGE = page_of("memory-figures", "grows", "halves")


@pytest.fixture
def kept(tmp_path):
    return Results(tmp_path / "memory.csv", "cpu", memory.COLUMNS)


def figures(kept, metric):
    return {(row.provider, row.micro_batch): row.median for row in kept.rows if row.metric == metric}


def test_a_batch_has_as_many_different_samples():
    for name in {*memory.GROWS, *memory.HALVES, *memory.PER_SAMPLE}:
        inputs, targets = memory.batch_of(entries(quick=True)[name], 7)
        assert len(targets) == 7
        assert {len(each) for each in inputs} == {7}
        assert len({str(sample.tolist()) for sample in inputs[0]}) == 7


def test_halves_make_the_same_step_in_less_memory(monkeypatch, kept):
    monkeypatch.setattr(memory, "HALVES", ("vit",))
    memory.halves(kept, "quick")
    off, peak = figures(kept, "gradients apart"), figures(kept, "peak")
    assert off.pop(("stock, 1 x 64", 64)) == 0
    assert set(off) == {(loop.name, loop.size) for loop in memory.LOOPS[1:]}
    # As far as sums of some thousand terms may be off, each by half a unit in the last place.
    assert all(0 < apart < 32 * torch.finfo(torch.float32).eps for apart in off.values())
    assert peak["fusedacc, 2 x 32", 32] < peak["stock, 1 x 64", 64]
    assert set(figures(kept, "time")) == set(peak)
    assert figures(kept, "time, share")["stock, 1 x 64", 64] == 1


def test_what_grows_is_predicted_for_both_loops(monkeypatch, kept):
    monkeypatch.setattr(memory, "GROWS", ("gpt-64",))
    monkeypatch.setattr("fusedacc.planner.budget.scratch_bytes", lambda: 1000)
    memory.grows(kept, "quick")
    activations = figures(kept, "activations")
    assert activations["fusedacc", 3] > activations["fusedacc", 1]
    assert activations["stock", 64] > activations["stock", 3]
    sums = figures(kept, "accumulators")
    assert sums["fusedacc", 1] == sums["fusedacc", 3] > sums["stock", 3] == 0


def test_a_norm_over_samples_changes_the_gradient():
    pytest.importorskip("sklearn")
    images, labels = (each[:16] for each in normed.digits())
    for norm, changes in (("BatchNorm", True), ("GroupNorm", False)):
        model = normed.net(norm, 4, 0)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        whole, parts = (normed.gradient(model, images, labels, size) for size in (16, 4))
        assert (memory.apart([parts], [whole]) > 0.01) == changes
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_per_sample_updates_nothing(monkeypatch, kept):
    monkeypatch.setattr(memory, "PER_SAMPLE", ("mlp",))
    memory.per_sample(kept, "quick")
    time, share = figures(kept, "time"), figures(kept, "time, share")
    assert list(time) == list(share) == [("fusedacc", 1), ("fusedacc", 2)]
    assert min(time.values()) > 0
    assert share["fusedacc", 2] == 1


def made_up(kept):
    """Rows for every plot."""
    rows = []
    for model in memory.GROWS:
        for size in (1, 8, 32, 64):
            for kind, bytes in (("parameters", 10), ("activations", 2 * size), ("libraries", 5)):
                rows.append(memory.Row("grows", model, "fusedacc", 64, size, kind, "MiB", bytes))
    for model in memory.HALVES:
        for loop in memory.LOOPS:
            for metric, value in (("gradients apart", 1e-7), ("peak", 100), ("time, share", 3)):
                rows.append(memory.Row("halves", model, loop.name, 64, loop.size, metric, "MiB", value))
    for size in (1, 2, 4):
        for metric in ("time", "time, share"):
            middle = 4.0 / size
            figures = (metric, "ms", middle, 0.9 * middle, 1.1 * middle)
            rows.append(memory.Row("per_sample", "mlp", "fusedacc", 64, size, *figures))
    for norm in normed.NORMS:
        for size in memory.NORM_SIZES:
            where = ("norms", norm, norm, 64, size)
            rows.append(memory.Row(*where, "gradients apart", "relative", 0.25))
            rows += [
                memory.Row(*where, "loss", "nats", 1 / epoch, 0.5 / epoch, 2 / epoch, 3)
                for epoch in (1, 2, 3)
            ]
    kept.add(rows)
    return kept.path


def test_plots_and_tables(kept, tmp_path):
    pytest.importorskip("matplotlib").use("Agg")
    charts = importlib.import_module("benchmarks.report.memory_charts")
    page, out = tmp_path / "memory.md", tmp_path / "figures"
    page.write_text(PAGE)
    code, told, _ = run_main(charts, "--results", made_up(kept), "--out", out, "--page", page)
    assert code == 0
    assert "not drawn" not in told
    names = {f"memory_{name}.{kind}" for name in charts.CHARTS for kind in ("png", "svg")}
    assert {path.name for path in out.iterdir()} == names
    text = page.read_text()
    # 15 MiB stay, 2 a sample: 143 at once, 79 by halves, 17 by single samples.
    assert "| decoder | 15 | 2.00 | 143 | 79 | 17 |" in text
    assert "| decoder | 100 | 100 | 100 | 1.0e-07 | 1.0e-07 |" in text
    assert "old" not in text
    found = charts.curve_of(read(kept.path), "vit", "fusedacc")
    assert (list(found.by_size), found.samples) == ([1, 8, 32], 64)
