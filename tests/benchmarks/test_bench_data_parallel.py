"""The benchmark on two ranks: its ways train alike, its rows have goals. No time is asserted."""

from __future__ import annotations

import dataclasses

import pytest
import sweeps
import torch
import torch.distributed as dist
from bench_setup import CPU
from ranks import on_ranks

from benchmarks.contestants.data_parallel_loops import MODEL, PLAIN, STOCK, WAYS
from benchmarks.harness.results import Results
from benchmarks.suites import data_parallel as suite
from examples.demo.loops import Config
from examples.demo.measure import batches
from examples.demo.model import load_text


def config(dtype: str) -> Config:
    return Config(dtype, CPU, 2, width=32, layers=2, heads=2, context=16, micro_batch_size=2)


def losses(dtype: str) -> dict[str, list[float]]:
    """Of each way's updates on this rank."""
    of, text = dataclasses.replace(config(dtype), seed=dist.get_rank()), load_text()
    found = {}
    for way in WAYS[dtype]:
        loop = way.make(of, **way.options)
        found[way.name] = [loop.update(batches(text, of, update)) for update in range(4)]
    return found


@pytest.mark.parametrize("dtype", WAYS)
def test_all_ways_train_alike(dtype):
    for found in on_ranks(2, losses, dtype):
        inside = found.pop(MODEL.name)
        first, *others = found.values()
        assert others
        for other in others:  # float32 sums of two ranks, scaled by powers of two: bit for bit
            assert other == first
        assert inside == pytest.approx(first, rel=2.0**-8 if dtype == "bfloat16" else 2.0**-18)
        assert first[-1] < first[0]


def test_rows_have_their_goals(monkeypatch):
    def measured(measure, of, rounds):
        names = [way.name for way in WAYS[of.dtype]]
        parameters = sum(p.numel() for p in of.model().parameters())
        peaks = {name: (20 if name == STOCK.name else 15) * parameters for name in names}
        return {name: [1.04 if name == PLAIN.name else 1.0] * rounds for name in names}, peaks

    monkeypatch.setattr(suite, "on_all_ranks", measured)
    results = Results(None, "cpu")
    suite.figures(results, "quick")
    reached = {(r.dtypes, r.metric, r.against): r.reached for r in results.rows if r.goal}
    assert set(reached) == {
        ("float32", "time", "stock DDP, no_sync"),
        ("float32", "time", "stock DDP, no_sync, gradient_as_bucket_view"),
        ("float32", "peak memory", "stock DDP, no_sync less 3 B/param"),
        ("bfloat16 into float32", "time", "stock, float32 sums by hand"),
    }
    assert [key for key, value in reached.items() if value == "no"] == [
        ("bfloat16 into float32", "time", "stock, float32 sums by hand")
    ]
    (peak,) = [r for r in results.rows if r.metric == "peak memory" and r.goal]
    assert peak.median == pytest.approx(11)


def test_a_rank_that_fails_is_a_row(monkeypatch):
    def fails(*_):
        raise RuntimeError("no network")

    monkeypatch.setattr(suite, "on_all_ranks", fails)
    results = Results(None, "cpu")
    suite.figures(results, "quick")
    assert all("no network" in r.note for r in results.rows)
    assert len(results.rows) == sum(map(len, WAYS.values()))


def about_this_rank() -> tuple[int, int, int]:
    return dist.get_rank(), dist.get_world_size(), torch.get_num_threads()


@pytest.mark.skipif(not sweeps.FULL, reason="starts new processes: in make test-full only")
def test_ranks_have_a_thread_each():
    assert suite.on_all_ranks(about_this_rank) == (0, 2, 1)
