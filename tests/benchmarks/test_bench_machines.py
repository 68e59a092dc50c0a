"""The benchmark of emulated machines: its models train, its loops agree, its goals are judged as they say. No
time is asserted."""

from __future__ import annotations

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

from benchmarks.harness.results import Results, read
from benchmarks.machines import cells, child, emulated, loops, zoo
from benchmarks.machines import run as machines

MODELS = (
    "gpt-64", "gpt-256", "gpt-words", "vit", "lstm", "mlp", "conv", "unet", "moe", "moe-stacked", "t5",
    "mamba", "dlrm", "gpt-compiled", "mlp-compiled", "linears", "lookup",
)  # fmt: skip


def entry(name: str, quick: bool = True):
    return zoo.entries(quick)[name]


# The models


@pytest.mark.parametrize("name", MODELS)
def test_a_model_learns_its_micro_batch(name):
    of = dataclasses.replace(entry(name), regions=None)
    torch.manual_seed(0)
    model = of.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs, targets = of.batch(torch.Generator().manual_seed(0))
    losses = []
    for _ in range(20):
        loss = of.loss(model(*inputs), targets)
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("name", ["gpt-compiled", "mlp-compiled"])
def test_what_is_said_to_be_compiled_is(name, monkeypatch):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **how: compiled(self, backend=backend, **how)
    )
    torch._dynamo.reset()
    of = entry(name)
    model = of.model()
    inputs, _ = of.batch(torch.Generator().manual_seed(0))
    model(*inputs)
    assert len(graphs) == 1
    linears = sum(isinstance(module, torch.nn.Linear) for of in of.regions(model) for module in of.modules())
    called = [node for node in graphs[0].graph.nodes if "linear" in str(node.target)]
    assert len(called) == linears > 0


def test_both_sizes_have_the_same_models():
    assert tuple(zoo.entries(True)) == tuple(zoo.entries()) == MODELS


# The loops


@pytest.mark.parametrize("precision", ["float32", "autocast", "bfloat16", "bfloat16 sums"])
def test_all_ways_train_alike(precision):
    training = loops.Training(entry("mlp"), precision, steps=4)
    data = [training.window(number) for number in range(3)]
    losses, weights = {}, {}
    for way in (*loops.STOCK_WAYS[precision], *loops.ours(precision)):
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


def test_the_sums_of_stock_are_the_exact_ones(monkeypatch):
    """Every way of float32 sums clips the same tensors, which are those of a sum in float32."""
    training = loops.Training(entry("mlp"), "bfloat16", steps=4)
    window = training.window(0)
    seen = {}
    for way in loops.STOCK_WAYS["bfloat16"]:
        loop = way.make(training)

        def look(name=way.name, loop=loop, clip=loop.clip):
            seen[name] = [total.clone() for total in loop.clipped()]
            clip()

        monkeypatch.setattr(loop, "clip", look)
        loop.update(window)
    model = training.model()
    expected = [torch.zeros_like(p, dtype=torch.float32) for p in model.parameters()]
    for inputs, targets in window:
        loss = training.loss(model, inputs, targets) / 4
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for total, gradient in zip(expected, gradients, strict=True):
            total += gradient
    assert len(seen) == len(loops.STOCK_WAYS["bfloat16"])
    for found in seen.values():
        assert all(map(torch.equal, found, expected))


def test_stock_clips():
    training = dataclasses.replace(loops.Training(entry("mlp"), "float32"), steps=2)
    loop = loops.STOCK_WAYS["float32"][0].make(training)
    norms = []

    def look(*_):
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in loop.parameters]).item())

    loop.inner.register_step_pre_hook(look)
    for parameter in loop.parameters:
        parameter.grad = torch.ones_like(parameter)
    loop.step()
    assert norms == [pytest.approx(loops.MAX_NORM, rel=1e-4)]
    assert all(p.grad is None for p in loop.parameters)


# The machines


def test_a_machine_is_left_out_where_the_cpu_has_no_more():
    of = {kind.name: kind for kind in emulated.MACHINES}
    assert not of["native"].left_out(frozenset())
    assert "none of avx512f" in of["avx2"].left_out(frozenset({"avx2", "fma"}))
    assert not of["avx2"].left_out(frozenset({"avx2", "avx512f"}))
    assert not of["baseline"].left_out(frozenset({"avx2"}))


@pytest.mark.parametrize("name", ["native-1", "avx512", "avx2", "baseline"] if sweeps.FULL else ["avx2"])
def test_a_machine_is_what_it_says(tmp_path, name):
    """A process that starts with its environment; and nonsense is found out."""
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


# The goals


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


def test_a_cell_is_disturbed_by_what_others_took():
    assert [cells.disturbed(row(**of)) for of in ({}, {"others": 0.1}, {"others": 0.101})] == [0, 0, 1]
    text = cells.report([row(others=0.5), row(model="lstm")])
    assert "others took more than 10% of the CPUs: native, mlp, float32\n" in text


def test_layers_are_shown_and_count_for_nothing():
    rows = [row(ratio=0.9, high=0.95), row(model="lookup", ratio=30.0, high=0.5)]
    text = cells.report(rows)
    assert re.search(r"lookup +30\.00! / - ", text)
    assert "best 0.90; 1 cells" in text
    assert "below 0.98: native, lookup" not in text
    assert "| 1 | 0.90 (0.90 to 0.95) | 0.90 | 0.90 |" in cells.markdown(rows)


def test_the_table_names_what_falls_short():
    text = cells.report(
        [
            row(ratio=0.9, high=0.95),
            row(model="lstm", peak=12_000_000),
            row(loop=cells.MODEL, ratio=1.2, low=1.1, high=1.3),
            cells.Row("avx2", note="left out: of course"),
        ]
    )
    assert "fusedacc: worst 0.90 (0.90 to 0.95) of stock's speed (native, mlp, float32), median 0.95" in text
    assert "below 0.98: native, mlp, float32: 0.90 (0.90 to 0.95)" in text
    assert "peak above stock's: native, lstm, float32: 12.0 MB, stock 10.0" in text
    assert "avx2: left out: of course" in text
    assert "MISSED" not in text
    assert "1.05: MISSED" in cells.report([row(loop=cells.MODEL)])


def test_kept_casts_are_held_against_the_model_without_them():
    assert cells.names("autocast") == ("stock", loops.PLAIN, loops.MODEL, loops.KEPT)
    assert cells.names("float32") == ("stock", loops.PLAIN, loops.MODEL)
    assert [cells.baseline(loop) for loop in cells.names("autocast")[1:]] == ["stock", "stock", loops.MODEL]
    kept = {"ratio": 0.9, "low": 0.8, "high": 0.97, "peak": 12_000_000}
    rows = [row(loops.PLAIN), row(loops.MODEL, ratio=1.1), row(loops.KEPT, **kept)]
    rows = [dataclasses.replace(each, precision="autocast") for each in rows]
    text = cells.report(rows)
    assert re.search(r"mlp +- / - +1\.00 / 1\.10 / 0\.90!\^ +- / -", text)
    assert f"{loops.KEPT}: worst 0.90 (0.80 to 0.97) of {loops.MODEL}'s speed (native, mlp, autocast)" in text
    assert "below 0.98: native, mlp, autocast: 0.90 (0.80 to 0.97)" in text
    assert f"peak above {loops.MODEL}'s: native, mlp, autocast: 12.0 MB, {loops.MODEL} 10.0" in text
    assert "`keep_casts`" not in cells.markdown(rows[:2])


def test_a_cell_under_autocast_has_kept_casts_in_its_rounds():
    training = loops.Training(entry("moe-stacked"), "autocast", steps=2)
    rows = {found.loop: found for found in child.cell(training, 0.1, "a test")}
    assert tuple(rows) == cells.names("autocast")
    assert [found.way for found in rows.values()] == ["p.grad", "p.grad", "p.grad", loops.MODEL]
    assert {found.rounds for found in rows.values()} == {rows[cells.STOCK].rounds}
    assert rows[loops.KEPT].stock_peak == rows[loops.MODEL].peak
    assert rows[loops.MODEL].stock_peak == rows[cells.STOCK].peak == rows[cells.STOCK].stock_peak
    assert all(0 < found.low <= found.ratio <= found.high for found in rows.values())


def test_stacked_experts_are_multiplied_by_ours_with_the_model_alone():
    training = loops.Training(entry("moe-stacked"), "float32", steps=2)
    for way in (*loops.STOCK_WAYS["float32"], *loops.OURS):
        loop = way.make(training)
        found = {m.way for m in loop.model.modules() if isinstance(m, loops.Experts)}
        assert found == {"ours" if way.name == loops.MODEL else "grouped"}
    loop.update(training.window(0))  # at a weight's first use it is known
    assert loop.optimizer.explain().count(" grouped ") == 4


# The driver


def test_a_pattern_chooses_cells_and_a_wrong_one_is_refused():
    assert machines.wanted("avx2/mlp/float32") == [("avx2", "mlp", "float32")]
    assert {cell[1] for cell in machines.wanted("native/gpt-*")} == {name for name in MODELS if "gpt" in name}
    assert len(machines.wanted(None)) == 7 * len(MODELS) * 4
    with pytest.raises(SystemExit, match=r"'pentium' matches no cell; allowed: native; .* / gpt-64; .* / fl"):
        machines.wanted("native,pentium")


def test_what_is_finished_is_found_again(tmp_path):
    kept = Results(tmp_path / "machines.csv", "cpu", cells.COLUMNS)
    kept.add([dataclasses.replace(row(ratio=ratio), sources="new") for ratio in (0.5, 0.75)])
    kept.add([dataclasses.replace(row(model="lstm", steps=8), sources="old")])
    found = cells.finished(kept.path, kept.conditions, "new")
    assert {key: row.ratio for key, row in found.items()} == {("native", "mlp", "float32", "fusedacc"): 0.75}
    every = cells.finished(kept.path, kept.conditions, "")
    assert every["native", "lstm", "float32", "fusedacc"].steps == 8
    assert not cells.finished(kept.path, {**kept.conditions, "torch": "1.0"}, "")


def test_what_is_missing_or_was_disturbed_is_measured():
    done = [row("stock"), row("stock", "lstm", others=0.5), row("fusedacc", "vit")]
    every = [("native", model, "float32") for model in ("mlp", "lstm", "vit")]
    assert machines.missing(every, {(*of.key, of.loop): of for of in done}) == every[1:]


def test_a_run_is_gone_on_with(tmp_path):
    path = tmp_path / "machines.csv"
    options = ("--results", path, "--only", "native-1/mlp/bfloat16", "--quick")
    code, _, told = run_main(machines, *options)
    assert code == 0, told
    assert "1 cells to measure, 0 there already" in told
    lines = read(path)
    assert [line["loop"] for line in lines] == ["stock", "fusedacc", "fusedacc model="]
    assert all(0 <= float(line["others"]) <= 1 for line in lines)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({**line, "others": 0} for line in lines)  # whatever ran beside this test
    before = path.read_text()
    code, shown, told = run_main(machines, *options)
    assert code == 0, told
    assert "0 cells to measure, 1 there already" in told
    assert path.read_text() == before
    assert "fusedacc model=: worst" in shown


@pytest.mark.parametrize(
    ("child", "hung", "note"),
    [
        ("benchmarks.machines.nothing", 100.0, "its process ended with 1"),
        ("hangs", 0.2, "its process took longer than 0.2 seconds"),
    ],
)
def test_a_process_that_breaks_down_or_hangs_has_a_row(tmp_path, monkeypatch, child, hung, note):
    (tmp_path / "hangs.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(machines, "ROOT", tmp_path)
    monkeypatch.setattr(machines, "CHILD", child)
    monkeypatch.setattr(machines, "HUNG", hung)
    kept = Results(tmp_path / "machines.csv", "cpu", cells.COLUMNS)
    machines.run("native", "mlp", ["float32"], 1.0, kept, tmp_path, True)
    (line,) = cells.finished(kept.path, kept.conditions, "").values()
    assert (line.model, line.note) == ("mlp", f"not run: {note}")
