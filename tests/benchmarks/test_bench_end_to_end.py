"""The benchmark that trains a GPT from end to end: rows, checks and time limit. No test checks times."""

import dataclasses

import pytest
import torch
from bench_setup import CPU

from benchmarks.contestants import gpt
from benchmarks.contestants.loops import MixedAdd
from benchmarks.records import Results
from benchmarks.suites import end_to_end

CUDA = pytest.param("cuda", marks=pytest.mark.cuda)


def measured(device="cpu", **options):
    results = Results(None, device)
    end_to_end.figures(results, "quick", **options)
    return results.rows


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_every_way_has_every_metric_eager_and_compiled(device):
    rows = measured(device)
    found = {(row.mode, row.provider, row.metric) for row in rows if row.median is not None}
    modes = end_to_end.EAGER, end_to_end.COMPILED
    names = [way.name for way in gpt.WAYS]
    assert found == {
        (mode, name, metric) for mode in modes for name in names for metric in end_to_end.METRICS
    }
    assert all(row.median > 0 for row in rows if row.metric != "gradient error")
    ours = (gpt.WRAPPED, gpt.INSIDE, gpt.FUSED)
    against = {(row.provider, row.against) for row in rows if row.against}
    assert against == {(way.name, stock.name) for way in ours for stock in (gpt.REFERENCE, gpt.HOOK)}


def test_ways_with_float32_sums_have_the_same_gradient():
    errors = {row.provider: row.median for row in measured() if row.metric == "gradient error"}
    exact = (gpt.REFERENCE, gpt.HOOK, gpt.WRAPPED)
    assert [errors.pop(way.name) for way in exact] == [0.0] * 3  # the losses are divided by a power of two
    assert 0 < errors[gpt.INSIDE.name] < errors[gpt.INEXACT.name]


class Forgetful(MixedAdd):
    """Loses the last micro-batch of a window."""

    def accumulate_all(self, micro_batches):
        losses = super().accumulate_all(micro_batches[:-1])
        return [*losses, losses[-1]]


class Doubling(MixedAdd):
    """Adds each gradient twice."""

    def micro_batch(self, micro_batch, is_last):
        super().micro_batch(micro_batch, is_last)
        return super().micro_batch(micro_batch, is_last)


@pytest.mark.parametrize("kind", [Forgetful, Doubling])
def test_a_way_that_trains_differently_is_not_timed(kind, monkeypatch):
    wrong = dataclasses.replace(gpt.HOOK, name="wrong", kind=kind)
    monkeypatch.setattr(end_to_end, "WAYS", (gpt.REFERENCE, wrong))
    monkeypatch.setattr(end_to_end, "QUICK_CASES", end_to_end.QUICK_CASES[:1])
    rows = [row for row in measured() if row.provider == "wrong"]
    assert not any(row.median for row in rows if row.metric != "gradient error")
    assert any(row.note.startswith("not run: wrong: ") for row in rows)


def test_nothing_new_begins_after_the_time_limit():
    rows = measured(seconds=0)
    assert len(rows) == len(end_to_end.QUICK_CASES)
    assert {row.note for row in rows} == {"not run: the limit of 0 s was reached"}


def test_a_case_that_the_time_limit_meets_times_the_ways_that_are_ready(monkeypatch):
    results = Results(None, CPU)
    size = end_to_end.QUICK
    cell = end_to_end.Cell(results, gpt.template(size, CPU), size, end_to_end.EAGER, 16)
    answers = iter([False, False, True])
    deadline = end_to_end.Deadline(1.0)
    monkeypatch.setattr(deadline, "passed", lambda: next(answers, True))
    cell.measure(5, deadline)
    timed = {row.provider: row.rounds for row in results.rows if row.metric == "time" and row.median}
    assert timed == {way.name: 1 for way in gpt.WAYS[:2]}
    assert sum("limit of 1 s" in row.note for row in results.rows) == len(gpt.WAYS) - 2


def test_the_model_has_the_size_that_its_cases_need():
    for device, cases in end_to_end.CASES.items():
        context = end_to_end.SIZES[device].context
        assert all(tokens % context == 0 for _, tokens in cases)
    with torch.device("meta"):
        model = gpt.GPT(end_to_end.SIZES["cuda"])
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(538e6, rel=0.01)
    assert end_to_end.CASES["cuda"][:4] == (
        ("eager", 2048),
        ("eager", 512),
        ("eager", 8192),
        ("compiled", 2048),
    )
