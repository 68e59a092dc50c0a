"""embedding.py: every way adds the same, and its bytes are those of the rows. No time is asserted."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

pytest.importorskip("tqdm", reason="the benchmarks show progress by tqdm")
BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def embedding(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("embedding")


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("common")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_way_adds_the_same(embedding, dtype):
    size, count = (300, 16), 40
    results, counted = [], []
    for way in range(3):
        torch.manual_seed(0)
        own = embedding.work(size, count, (dtype, torch.float32), torch.device("cpu"))
        variant = embedding.accumulations(own, size, count)[way]
        own.sums.zero_()
        own.turn_back()
        for _ in range(embedding.SETS):
            variant.run()
        results.append(own.sums)
        counted.append(variant.bytes)
    # Sums of at most 160 gradients; stock's bfloat16 gradient is rounded after every addition.
    loose = 0.1 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(results[0], results[2], rtol=loose, atol=loose)
    torch.testing.assert_close(results[1], results[2], rtol=1e-5, atol=1e-5)
    assert counted[2] < counted[1] < counted[0]


def test_tokens_are_rows_and_the_first_are_the_most_frequent(embedding):
    torch.manual_seed(0)
    tokens = embedding.text_like(20_000, 1000, torch.device("cpu"))
    assert (int(tokens.min()), int(tokens.max())) == (0, 999)
    counts = torch.bincount(tokens, minlength=1000)
    assert counts[0] > counts[1:10].max() > counts[500:].max()


def test_a_quick_run_has_every_case(embedding, common):
    results = common.Results(None)
    embedding.figures(results, "quick")
    assert {found.mode for found in results.rows} == {"accumulate", "norm", "zero"}
    assert {found.dtypes for found in results.rows} == {
        "float32 into float32",
        "bfloat16 into float32",
        "float32",
    }
    assert not any(found.reached for found in results.rows), "no goal is for tiny tables"
