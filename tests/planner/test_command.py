"""`python -m fusedacc plan`: its arguments, its output and its errors."""

import json
import sys
import types
from unittest import mock

import pytest
import torch
from torch import nn

import fusedacc
from fusedacc import __main__
from fusedacc.commands import plan as command
from fusedacc.planner import KINDS

MODULE = "planned_by_tests"
BATCH = 64
ROOM = ("--memory", "1MiB")


def training(wrap=True, device="cpu"):
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    if wrap:
        optimizer = fusedacc.AccumulatingOptimizer(optimizer, gradient_accumulation_steps=2)
    batch = torch.ones(4, 64), torch.zeros(4, dtype=torch.long)
    return model, optimizer, batch, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1])


def fails():
    raise OSError("no such\nfile")


def swapped():
    model, optimizer, *rest = training()
    return optimizer, model, *rest


def wrong_shapes():
    model, optimizer, _, loss = training()
    return model, optimizer, (torch.ones(4, 63), torch.zeros(4, dtype=torch.long)), loss


def asks():
    model, optimizer, batch, loss = training()
    return model, optimizer, batch, lambda m, b: loss(m, b) * (1 if b[0].sum() > 0 else 2)


#: A user's module: functions by name.
FACTORIES = types.SimpleNamespace(
    wrapped=training,
    number=3,
    bare=lambda: training(wrap=False),
    meta=lambda: training(wrap=False, device="meta"),
    two=lambda: training()[:2],
    nothing=lambda: None,
    no_loss=lambda: training()[:3],
    swapped=swapped,
    fails=fails,
    wrong_shapes=wrong_shapes,
    asks=asks,
)


@pytest.fixture(autouse=True)
def module(monkeypatch):
    monkeypatch.setitem(sys.modules, MODULE, FACTORIES)
    monkeypatch.setattr("fusedacc.planner.budget.scratch_bytes", lambda: 1000)


def run(name, *options, batch=BATCH):
    return __main__.main(["plan", "--model", f"{MODULE}:{name}", "--batch", str(batch), *options])


def found(capsys, name, *options, verify=False):
    """What `--json` prints."""
    assert run(name, "--json", *(() if verify else ("--no-verify",)), *options) == 0
    return json.loads(capsys.readouterr().out)


def test_json_is_the_plan_and_nothing_else(capsys):
    model, optimizer, batch, loss = training()
    expected = fusedacc.planner.plan(
        model, optimizer, batch, global_batch_size=BATCH, memory_budget="1MiB", loss_fn=loss, verify=False
    ).as_dict()
    printed = found(capsys, "wrapped", "--memory", "1MiB")
    assert printed == json.loads(json.dumps(expected))
    assert printed["memory_budget"] == 2**20


def test_the_table_and_both_loops(capsys):
    assert run("wrapped", "--memory", "250KiB", "--world", "2") == 0
    done = capsys.readouterr()
    first, *lines = done.out.splitlines()
    assert first.endswith("x 2 ranks for a batch of 64") or "the last micro-batch of" in first
    assert {line.split()[0] for line in lines if line} >= set(KINDS)
    assert [line.split(":")[0] for line in lines[-2:]] == ["wrapped", "stock"]
    assert any(line.startswith("peak, measured") and line.endswith("measured") for line in lines)
    assert done.err.splitlines()[0] == "[1] wrapped: a micro-batch of 1"
    assert any("] stock: a micro-batch of 1" in line for line in done.err.splitlines())


@pytest.mark.parametrize(("name", "options"), [("bare", ()), ("wrapped", ("--stock",))])
def test_the_stock_loop_is_planned(capsys, name, options):
    printed = found(capsys, name, "--memory", "1MiB", *options)
    assert printed["bytes_by_kind"]["accumulators"] == 0
    assert printed["micro_batch_size"] > 0


def test_a_gpu_that_this_machine_lacks(capsys):
    printed = found(capsys, "meta", "--device", "H200", verify=True)
    assert printed["memory_budget"] == command.memory_of("h200")
    assert 120 * 2**30 < printed["memory_budget"] < 141 * 2**30
    assert printed["measured_peak_bytes"] is None
    assert printed["micro_batch_size"] == BATCH
    assert found(capsys, "meta", "--device", "h200", "--memory", "1GiB")["memory_budget"] == 2**30


def test_a_stage_of_a_pipeline(capsys):
    model, optimizer, batch, loss = training()
    expected = fusedacc.planner.plan(
        model,
        optimizer,
        batch,
        global_batch_size=BATCH,
        memory_budget="1MiB",
        loss_fn=loss,
        verify=False,
        in_flight=4,
    ).as_dict()
    printed = found(capsys, "wrapped", "--memory", "1MiB", "--in-flight", "4")
    assert printed == json.loads(json.dumps(expected))
    assert printed["in_flight"] == 4
    assert printed["micro_batch_size"] == BATCH // 4


@pytest.mark.parametrize("in_flight", [1, 4])
def test_a_picture(capsys, tmp_path, in_flight):
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "plan.png"
    how = "--memory", "250KiB", "--no-verify", "--plot", str(path), "--in-flight", str(in_flight)
    assert run("wrapped", *how) == 0
    assert f"drawn: {path}" in capsys.readouterr().err
    pixels = torch.from_numpy(image.imread(path)[..., :3].copy())
    for colour in ("#F0E442", "#009E73", "#0072B2"):  # activations, optimizer, accumulators
        wanted = torch.tensor([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        assert ((pixels - wanted).abs().amax(-1) < 0.01).sum() > 1000, colour


def test_a_peak_above_the_budget_fails(monkeypatch, capsys):
    monkeypatch.setattr("fusedacc.planner.prediction.Predictor.measured_peak", lambda *_: (2**40, ""))
    assert run("wrapped", "--memory", "1MiB", "--json") == command.WRONG


def test_an_interrupt_has_its_own_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(command, "plan", mock.Mock(side_effect=KeyboardInterrupt))
    assert run("wrapped", "--memory", "1MiB") == command.STOPPED


@pytest.mark.parametrize(
    ("name", "told", "options"),
    [
        ("absent", "has no function 'absent'", ROOM),
        ("number", "has no function 'number'", ROOM),
        ("two", "two() must return (model, optimizer, sample_batch), optionally with", ROOM),
        ("nothing", "it returned NoneType", ROOM),
        ("swapped", "the model that swapped() returned is AccumulatingOptimizer", ROOM),
        ("fails", "fails() failed: OSError: no such file, at test_command.py:", ROOM),
        ("no_loss", "loss_fn=None calls model(**sample_batch).loss", ROOM),
        ("wrong_shapes", "at a micro-batch of 1", ROOM),
        ("asks", "find_micro_batch_size", ROOM),
        ("wrapped", "less than one sample takes", ("--memory", "100KiB")),
        ("wrapped", "in_flight=65 is more than the 64 samples", (*ROOM, "--in-flight", "65")),
        ("wrapped", "allowed: the name of a GPU, or --memory too", ("--device", "cuda")),
        ("wrapped", "allowed: package.module:factory", ("--model", "nowhere")),
        ("wrapped", "ModuleNotFoundError", ("--model", "no.such.module:make")),
    ],
)
def test_a_mistake_is_reported_in_one_line(monkeypatch, capsys, name, told, options):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(name, *options) == command.MISUSED
    (error,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("[")]
    assert error.startswith("python -m fusedacc plan: error: ")
    assert told in error


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--memory", "many"], "'many'"),
        (["--memory", "0"], "at least 1"),
        (["--world", "0"], "integers of at least 1"),
        (["--in-flight", "0"], "integers of at least 1"),
        (["--batch", "2.5"], "integers of at least 1"),
        (["--device", "abacus"], "h200"),
        (["--plot", "no/such/folder/plan.png"], "not in an existing folder"),
        (["--plot", "plan.abc"], "is not a picture format"),
    ],
)
def test_options_are_refused_before_anything_runs(monkeypatch, capsys, options, told):
    if options[0] == "--plot":
        pytest.importorskip("matplotlib")
    monkeypatch.setattr(command, "load", lambda _: pytest.fail("the factory was called"))
    with pytest.raises(SystemExit) as stop:
        run("wrapped", *options)
    assert stop.value.code == 2
    assert told in capsys.readouterr().err
