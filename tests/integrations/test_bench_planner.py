"""The benchmark of predicted peaks: every architecture is planned, trained and told of, at tiny sizes."""

from __future__ import annotations

import importlib
import os
from unittest import mock

import pytest
import torch

# The package pins threads for the process that measures, not for what other tests start.
with mock.patch.dict(os.environ):
    importlib.import_module("benchmarks")

from benchmarks.machines.zoo.architectures import architectures
from benchmarks.report import accuracy
from benchmarks.suites import planner
from fusedacc.commands.measuring.records import Results

TINY = {own.name: own for own in architectures(tiny=True)}
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", TINY)
def test_peak_of_each_architecture(name):
    """By `model=` and under autocast, where most is done by operators of ours."""
    found = planner.compared(TINY[name], "model=", planner.AUTOCAST, CPU)
    assert abs(found.error) <= planner.TOLERANCE


def test_rows_and_their_table(tmp_path, monkeypatch):
    monkeypatch.setattr(
        planner, "combinations", lambda effort: [(planner.FLOAT32, "stock"), (planner.FLOAT32, "model=")]
    )
    kept = Results(tmp_path / "results.csv")
    planner.figures(kept, "quick", ["LSTM"])
    assert [row.provider for row in kept.rows] == [
        "stock: measured",
        "stock: predicted",
        "model=: measured",
        "model=: predicted",
    ]
    assert {row.reached for row in kept.rows} == {"", "yes"}
    page = tmp_path / "memory.md"
    page.write_text("before\n<!-- accuracy -->\nold\n<!-- /accuracy -->\nafter\n")
    monkeypatch.setattr("sys.argv", ["accuracy", "--results", str(kept.path), "--page", str(page)])
    accuracy.main()
    text = page.read_text()
    assert "2 of 2 combinations of 1 architectures within 5%" in text
    assert "| LSTM | float32 |" in text
    assert text.startswith("before\n<!-- accuracy -->")
    assert text.endswith("<!-- /accuracy -->\nafter\n")
    assert "old" not in text
