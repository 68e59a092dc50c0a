"""The benchmarks run and count right. No time is asserted."""

from __future__ import annotations

import csv
import importlib
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("tqdm", reason="the benchmarks show progress by tqdm")

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def common(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("common")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)


def test_every_cpu_benchmark_runs(tmp_path):
    found = run(sys.executable, "benchmarks/run_all.py", "--quick", "--results", str(tmp_path))
    assert found.returncode == 0, found.stderr
    for case in (
        "elements in one tensor",
        "tensors of 100",
        "window of 8",
        "peak live bytes",
        "peak resident bytes",
    ):
        assert case in found.stdout
    assert "goals reached" in found.stdout
    assert not list(tmp_path.iterdir()), "a quick run must record nothing"


def test_figures_are_medians_and_ratios_within_a_round(common):
    clock = {"slow": iter([9.0, 4.0, 2.0, 8.0]), "fast": iter([9.0, 1.0, 1.0, 1.0])}
    variants = [
        common.Variant("slow", lambda: "slow", 100),
        common.Variant(
            "fast",
            lambda: "fast",
            50,
            (common.Goal("slow", 4.0), common.Goal("slow", 2.5, by_bandwidth=True)),
        ),
    ]
    rows = common.measure(
        "case", variants, 3, timer=lambda work, calls: next(clock[work()]), copy_bandwidth=50.0
    )
    slow, by_time, by_bandwidth = rows
    assert (slow.median, slow.p20, slow.p80) == (4e6, 2e6, 8e6)
    assert slow.gb_per_s == 25 / 1e9
    assert slow.percent_of_copy == 50
    assert (by_time.speedup, by_time.reached) == (4.0, "yes")
    assert (by_bandwidth.speedup, by_bandwidth.reached) == (2.0, "no")
    shown = common.table(rows)
    assert shown.count("fast") == 1
    assert "goal 4 reached" in shown
    assert "goal 2.5 MISSED" in shown


def test_csv_grows_by_rows_that_name_their_conditions(common, tmp_path):
    row = common.Row("case", "variant", "us", 1.0, 0.5, 2.0)
    path = tmp_path / "deep" / "figures.csv"
    common.append_csv(path, [row])
    common.append_csv(path, [row, row])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [found["variant"] for found in rows] == ["variant"] * 3
    assert rows[0]["torch"] == torch.__version__
    assert all(rows[0][name] for name in ("date", "commit", "device", "threads", "allocator", "python"))


@pytest.mark.parametrize(
    ("model", "count", "elements"), [("ResNet-50", 161, 25_557_032), ("GPT-2", 148, 124_439_808)]
)
def test_parameter_lists_are_those_of_the_models(common, model, count, elements):
    shapes = list(importlib.import_module("gpu_figures").MODELS[model]())
    assert (len(shapes), sum(map(math.prod, shapes))) == (count, elements)


def test_model_lists_are_held_to_both_goals(common, monkeypatch):
    gpu_figures = importlib.import_module("gpu_figures")
    monkeypatch.setitem(gpu_figures.MODELS, "tiny", lambda: iter([(3, 4), (5,)]))
    rows = gpu_figures.model_list("tiny", torch.bfloat16, 2, 1e9, device="cpu")
    ours = [row for row in rows if row.variant.startswith("fusedacc")]
    assert [row.against for row in ours] == ["loop of acc.add_(g, alpha=s)", "torch._foreach_add_"]
    assert [row.goal for row in ours] == [5.0, 1.5]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_gpu_figures_say_what_they_need():
    found = run(sys.executable, "benchmarks/gpu_figures.py")
    assert found.returncode == 1
    assert "needs a CUDA GPU" in found.stderr


def test_gpu_script_parses():
    found = run("bash", "-n", "benchmarks/gpu_run.sh")
    assert (found.returncode, found.stderr) == (0, "")


def test_readme_shows_the_newest_run_and_what_it_missed(common, tmp_path):
    readme_figures = importlib.import_module("readme_figures")
    stock = common.Row("case", "stock", "us", 2000.0, 1900.0, 2100.0)
    ours = common.Row(
        "case", "ours", "us", 500.0, 490.0, 510.0, against="stock", speedup=4.0, goal=5.0, reached="no"
    )
    for name in readme_figures.COMMANDS:
        common.append_csv(tmp_path / f"{name}.csv", [stock, ours])
    text = readme_figures.section(tmp_path)
    row = "| case | ours | 500 µs | 4.00 times the speed of `stock` (2.00 ms), goal 5 **missed** |"
    assert text.count(row) == len(readme_figures.COMMANDS)
    with pytest.raises(SystemExit, match="make bench"):
        readme_figures.section(tmp_path / "none")
