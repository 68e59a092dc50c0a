"""The benchmark of emulated machines: its models, loops, goals and reports. No test checks times."""

import csv
import dataclasses
import json
import re
import subprocess
import sys

import pytest
import sweeps
import torch
from bench_setup import ROOT, run_main

from benchmarks.machines import cells, emulated, loops, zoo
from benchmarks.machines import run as machines
from fusedacc.commands.measuring.records import read

MODELS = (
    "gpt-64", "gpt-256", "gpt-words", "vit", "lstm", "mlp", "conv", "unet", "moe", "moe-stacked", "t5",
    "mamba", "dlrm", "gpt-compiled", "mlp-compiled", "linears", "lookup",
)  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_learns_its_micro_batch(name):
    of = dataclasses.replace(zoo.entries(True)[name], regions=None)
    torch.manual_seed(0)
    model = of.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs, targets = of.batch(torch.Generator().manual_seed(0))
    losses = []
    for _ in range(20):
        loss = of.loss(model(*inputs), targets)
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step(), optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("precision", ["float32", "autocast", "bfloat16", "bfloat16 sums"])
def test_all_ways_train_alike(precision):
    training = loops.Training(zoo.entries(True)["mlp"], precision, steps=4)
    data = [training.window(number) for number in range(3)]
    losses, weights = {}, {}
    for way in (*loops.STOCK_VARIANTS[precision], *loops.ours(precision)):
        loop = way.make(training)
        losses[way.name] = [loop.update(window).item() for window in data]
        weights[way.name] = loop.parameters
        assert {p.dtype for p in loop.parameters} == {training.dtype}
    first, *others = losses
    # Norms are summed in different orders, and bfloat16 weights may be rounded to either side of a tie.
    rounding = 2.0**-6 if precision.startswith("bfloat16") else 2.0**-8 if precision == "autocast" else 1e-5
    for name in others:
        assert losses[name][0] == pytest.approx(losses[first][0], rel=rounding if loops.MODEL in name else 0)
        assert losses[name] == pytest.approx(losses[first], rel=rounding)
    assert len(set(losses[first])) == 3
    assert precision != "autocast" or losses[loops.KEPT] == losses[loops.MODEL]


@pytest.mark.parametrize("name", ["native-1", "avx512", "avx2", "baseline"] if sweeps.FULL else ["avx2"])
def test_the_environment_of_a_machine_takes_effect(tmp_path, name):
    """A wrong setting is reported."""
    (kind,) = [kind for kind in emulated.MACHINES if kind.name == name]
    if why := kind.left_out(emulated.flags()):
        pytest.skip(why)
    program = "import json; from benchmarks.machines import emulated; print(json.dumps(emulated.effects()))"
    environment = {**kind.environment(tmp_path, "digest"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    if found["fusedacc"] == "not built":
        pytest.skip("the library is not built")
    few = int(found["cores"]) < kind.threads
    assert kind.wrong(found) == (f"{kind.threads} threads have {found['cores']} cores" if few else "")
    assert found["threads"] == str(kind.threads)
    if name == "avx2" and not few:
        wrong = kind.wrong(found | {"oneDNN": "Intel AVX"})
        assert wrong.startswith("oneDNN is 'Intel AVX', not 'Intel AVX2")


def row(loop="fusedacc", model="mlp", **values):
    figures = {"ratio": 1.0, "low": 0.9, "high": 1.1, "peak": 10_000_000, "stock_peak": 10_000_000, **values}
    return cells.Row("native", model, "float32", loop, **figures)


def test_a_loop_falls_short_by_the_upper_end_of_its_interval():
    assert cells.short(row(ratio=0.9, high=0.979))
    assert not cells.short(row(ratio=0.9, high=0.98))
    assert not cells.short(row(loop="stock", high=0.9))
    assert not cells.large(row(peak=11_000_000))
    assert cells.large(row(peak=11_000_001))
    assert not cells.large(row(peak=505_000_000, stock_peak=500_000_000))
    assert cells.large(row(peak=505_000_001, stock_peak=500_000_000))


def test_the_table_names_what_falls_short():
    rows = [row(ratio=0.9, high=0.95), row(model="lstm", peak=12_000_000), row(model="vit", others=0.5)]
    rows += [row(loop=cells.MODEL, ratio=1.2, low=1.1, high=1.3), cells.Row("avx2", note="left out: no")]
    rows += [row(model="lookup", ratio=30.0, high=0.5)]  # shown, but without a goal
    text = cells.report(rows)
    for said in (
        "fusedacc: worst 0.90 (0.90 to 0.95) of stock's speed (native, mlp, float32), median 1.00",
        "below 0.98: native, mlp, float32: 0.90 (0.90 to 0.95)",
        "peak above stock's: native, lstm, float32: 12.0 MB, stock 10.0",
        "others took more than 10% of the CPUs: native, vit, float32\n",
        "avx2: left out: no",
        "; 3 cells",
    ):
        assert said in text
    assert re.search(r"lookup +30\.00! / - ", text)
    assert not re.search("below 0.98: native, lookup|MISSED", text)
    assert "1.05: MISSED" in cells.report([row(loop=cells.MODEL)])
    assert [cells.disturbed(row(others=share)) for share in (0.1, 0.101)] == [False, True]


def test_patterns_select_cells_and_unknown_ones_are_refused():
    assert machines.wanted("avx2/mlp/float32") == [("avx2", "mlp", "float32")]
    assert {cell[1] for cell in machines.wanted("native/gpt-*")} == {name for name in MODELS if "gpt" in name}
    assert len(machines.wanted(None)) == 7 * len(MODELS) * 4
    with pytest.raises(SystemExit, match=r"'pentium' matches no cell; allowed: native; .* / gpt-64; .* / fl"):
        machines.wanted("native,pentium")


def test_a_run_is_resumed(tmp_path):
    path = tmp_path / "machines.csv"
    options = ("--results", path, "--only", "native-1/mlp/bfloat16", "--quick")
    code, _, told = run_main(machines, *options)
    assert code == 0, told
    assert "1 cells to measure, 0 already measured" in told
    lines = read(path)
    assert [line["loop"] for line in lines] == ["stock", "fusedacc", "fusedacc model="]
    assert all(0 <= float(line["others"]) <= 1 for line in lines)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({**line, "others": 0} for line in lines)  # other tests may run at the same time
    before = path.read_text()
    code, shown, told = run_main(machines, *options)
    assert code == 0, told
    assert "0 cells to measure, 1 already measured" in told
    assert path.read_text() == before
    assert "fusedacc model=: worst" in shown
