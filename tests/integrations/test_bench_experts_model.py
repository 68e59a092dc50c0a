"""The benchmark of a whole mixture of experts: every way trains the same model, ours moves fewer bytes. No
time is asserted."""

from __future__ import annotations

import importlib
import os
from unittest import mock

import pytest
import torch

# The package pins threads for the process that measures, not for what other tests start.
with mock.patch.dict(os.environ):
    importlib.import_module("benchmarks")

from experts_sums import assert_ways_add_the_same

from benchmarks.harness.results import Results
from benchmarks.suites import experts, experts_model
from benchmarks.suites.layers import INSIDE

(SIZE,) = experts_model.SIZES["quick"]


@pytest.mark.parametrize("dtypes", experts.DTYPES)
def test_every_way_adds_the_same(dtypes):
    names = experts.WAYS[dtypes]
    ways = {way: experts_model.work(SIZE, dtypes, way, torch.device("cpu")) for way in names}
    assert_ways_add_the_same(ways, atol=4e-3)
    assert ways[INSIDE].bytes() < min(ways[way].bytes() for way in names if way != INSIDE)
    assert sum(slot.param.dim() == 3 for slot in ways[INSIDE].optimizer._slots) == 4
    assert " grouped " in ways[INSIDE].optimizer.explain()


def test_cells_and_their_goals(monkeypatch):
    """tests/benchmarks/test_bench_experts.py has the rows that are made of them."""
    monkeypatch.setitem(experts_model.GOALS, (SIZE, "float32"), 1e-3)
    told = []
    monkeypatch.setattr(experts_model, "by_memory", lambda *arguments: told.append(arguments))
    experts_model.figures(Results(None), "quick")
    ((_, cells, rounds, note),) = told
    assert rounds == experts.ROUNDS["quick"]
    assert note.startswith("transformers ")
    assert [(cell.case.benchmark, cell.case.case, cell.case.dtypes) for cell in cells] == [
        ("experts_model", str(SIZE), dtypes) for dtypes in experts.DTYPES
    ]
    assert [cell.goals for cell in cells] == [{experts.DEFAULTS: 1e-3}, {experts.DEFAULTS: 0.0}]
    assert {size for size, _ in experts_model.GOALS} >= set(experts_model.SIZES["short"])


def test_without_transformers_nothing_is_recorded(monkeypatch, tmp_path):
    monkeypatch.setattr(experts_model.importlib.util, "find_spec", lambda name: None)
    kept = Results(tmp_path / "results.csv")
    before = kept.path.read_text()
    with pytest.raises(SystemExit, match="make bench-integrations"):
        experts_model.figures(kept, "quick")
    assert kept.path.read_text() == before
