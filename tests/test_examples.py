"""The examples, run as a user runs them."""

from __future__ import annotations

import importlib
import json
import re
import runpy
from pathlib import Path

import pytest
import torch
from example_scripts import EXAMPLES, output_of

from fusedacc import native_hooks

pytest.importorskip("matplotlib", reason="the examples draw with matplotlib")
pytest.importorskip("sklearn", reason="the examples read scikit-learn's digits")
pytest.importorskip("tqdm", reason="the examples show progress by tqdm")


@pytest.fixture
def byte_transformer(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("byte_transformer")


def test_digits_are_learnt():
    printed = output_of("digits.py")
    updates, accuracy = re.search(r"(\d+) updates, accuracy .*: ([\d.]+)%", printed).groups()
    assert int(updates) == 20 * 24  # 47 micro-batches are 23 windows of two, and one of one
    assert float(accuracy) > 85


def test_digits_are_learnt_as_by_stock_accumulation():
    """All twenty epochs; halves and doubles are exact, so that the weights are equal bit for bit."""
    found = runpy.run_path(str(EXAMPLES / "digits.py"))
    torch.manual_seed(0)
    train = torch.utils.data.DataLoader(found["train"].dataset, batch_size=32, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(20):
        for index, (x, y) in enumerate(train):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            (loss if index == 46 else loss / 2).backward()
            if index % 2 or index == 46:
                optimizer.step(), optimizer.zero_grad()
    for mine, stock, before in zip(found["model"].parameters(), model.parameters(), start, strict=True):
        assert torch.equal(mine, stock)
        assert not torch.equal(stock, before)


def test_a_schedule_is_resumed_in_mid_window():
    printed = output_of("scheduler.py")
    steps, accuracy, same = re.search(r"(\d+) steps .*accuracy ([\d.]+)%, .*: (\w+)", printed).groups()
    assert (int(steps), same) == (300, "True")
    assert float(accuracy) > 85


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "autocast"])
def test_demo_trains_all_loops_alike(byte_transformer, dtype, tmp_path, capsys):
    arguments = ["--dtype", dtype, "--updates", "6", "--steps", "4", "--rounds", "1", "--width", "64"]
    result = byte_transformer.main([*arguments, "--device", "cpu", "--out", str(tmp_path)])

    # Scaling by 1/4 is exact, so both loops do the same arithmetic in the same order.
    assert result.losses["fusedacc"] == result.losses["stock"]
    # A product inside the sum is rounded once less, and AdamW divides tiny gradients by their own size.
    inside = result.losses["fusedacc, model="]
    assert inside[0] == result.losses["stock"][0]
    assert inside == pytest.approx(result.losses["stock"], rel=1e-5 if dtype == "float32" else 1e-2)
    assert result.largest_difference("fusedacc") == 0
    assert len(result.losses["stock"]) == 6
    assert result.losses["stock"][-1] < result.losses["stock"][0] - 0.1

    # On a CPU native hooks add each gradient as it comes; Python's, and a GPU, add them all together.
    assert result.calls["fusedacc"] <= result.calls["stock"] / (1 if native_hooks.module() else 4)
    parameter_bytes = result.parameters * (2 if dtype == "bfloat16" else 4)
    assert min(result.peaks.values()) > 4 * parameter_bytes  # parameters, sums and AdamW's two states
    assert result.peaks["fusedacc"] <= result.peaks["stock"] + 25_000_000
    # Which rows were looked up is kept through a window, in 8 bytes a token.
    assert result.peaks["fusedacc, model="] <= result.peaks["fusedacc"] + 4 * 8 * 64 * 8

    shown = capsys.readouterr().out
    for row in (
        "loss of update 6",
        "largest difference",
        "fusedacc, model=",
        "time per update",
        "peak memory",
        "calls",
        "bytes per",
    ):
        assert row in shown
    numbers = json.loads((tmp_path / f"byte_transformer-{dtype}.json").read_text())
    assert numbers["losses"] == result.losses
    assert_drawn(tmp_path / f"byte_transformer-{dtype}.png")


def test_demo_reads_any_text_and_refuses_too_short_a_one(byte_transformer, tmp_path):
    model = importlib.import_module("demo.model")
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 4)
    assert model.load_text(text).tolist() == list(range(256)) * 4
    text.write_bytes(b"short")
    with pytest.raises(ValueError, match="at least"):
        model.load_text(text)


def assert_drawn(path: Path) -> None:
    from matplotlib.image import imread

    pixels = imread(path)
    assert pixels.shape[1] >= 1000
    assert (pixels[..., :3].reshape(-1, 3) != 1).any(axis=1).mean() > 0.02, "the plot is blank"
