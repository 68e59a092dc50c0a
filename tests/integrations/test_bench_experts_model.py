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
from benchmarks.suites.layers import INSIDE, STOCK, WRAPPED

(SIZE,) = experts_model.SIZES["quick"]


@pytest.mark.parametrize("dtypes", experts.DTYPES)
def test_every_way_adds_the_same(dtypes):
    names = experts.WAYS[dtypes]
    ways = {way: experts_model.work(SIZE, dtypes, way, torch.device("cpu")) for way in names}
    assert_ways_add_the_same(ways, atol=4e-3)
    assert ways[INSIDE].bytes() < min(ways[way].bytes() for way in names if way != INSIDE)
    assert sum(slot.param.dim() == 3 for slot in ways[INSIDE].optimizer._slots) == 4
    assert " grouped " in ways[INSIDE].optimizer.explain()


def test_rows_are_told_for_both_kinds_of_memory(monkeypatch):
    monkeypatch.setitem(experts_model.GOALS, (SIZE, "float32"), 1e-3)
    results = Results(None)
    experts_model.figures(results, "quick")
    assert all(row.median is not None for row in results.rows)
    assert {(row.benchmark, row.case) for row in results.rows} == {("experts_model", str(SIZE))}
    assert {row.note.split()[0] for row in results.rows} == {"transformers"}
    held = {mode: [] for mode in (*experts.MODES, "backward")}
    for row in results.rows:
        if row.against:
            assert row.provider == INSIDE
            held[row.mode].append((row.dtypes, row.against, row.goal, row.reached))
    float32, bfloat16 = experts.DTYPES
    for mode in experts.MODES:
        goal = (1e-3, "yes") if mode == experts.DEFAULTS else (None, "")
        assert held[mode] == [
            (float32, STOCK, *goal),
            (bfloat16, STOCK, None, ""),
            (bfloat16, experts.HOOK, None, ""),
        ]
    assert held["backward"] == [(dtypes, "best of stock", 1.0, "yes") for dtypes in experts.DTYPES]
    assert {row.provider for row in results.rows} == {STOCK, experts.HOOK, WRAPPED, INSIDE}
    assert {size for size, _ in experts_model.GOALS} >= set(experts_model.SIZES["short"])


def test_without_transformers_nothing_is_recorded(monkeypatch, tmp_path):
    monkeypatch.setattr(experts_model.importlib.util, "find_spec", lambda name: None)
    kept = Results(tmp_path / "results.csv")
    before = kept.path.read_text()
    with pytest.raises(SystemExit, match="make bench-integrations"):
        experts_model.figures(kept, "quick")
    assert kept.path.read_text() == before
