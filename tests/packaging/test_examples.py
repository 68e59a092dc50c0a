"""The examples, run as users run them."""

import importlib
import json
import re
import runpy

import pytest
import sweeps
import torch
from example_scripts import EXAMPLES, output_of, output_on_ranks, run_here, updates_and_accuracy

matplotlib = pytest.importorskip("matplotlib", reason="the examples draw with matplotlib")
pytest.importorskip("sklearn", reason="the examples read scikit-learn's digits")
pytest.importorskip("tqdm", reason="the examples show progress by tqdm")


@pytest.mark.parametrize(
    ("script", "ranks", "updates", "epochs"),
    [
        ("ddp.py", 2, 24, 20),
        ("process_group.py", 2, 24, 20),
        ("pipeline.py", 2, 23, 10),  # 1,500 images are 46 batches of 32 and one of 28
        ("fsdp2.py", 2, 12, 10),  # 750 images of a rank are 23 micro-batches of 32 and one of 14
    ],
)
def test_examples_with_ranks_learn_digits(script, ranks, updates, epochs):
    """Only `make test-full` runs all epochs, in processes that torchrun starts."""
    fewer = {f"epoch in range({epochs})": "epoch in range(3)"}
    printed = output_of(script, ranks=ranks) if sweeps.FULL else output_on_ranks(script, ranks, fewer)
    assert printed.count("\n") == 1
    found, accuracy = updates_and_accuracy(printed)
    assert found == (epochs if sweeps.FULL else 3) * updates
    assert accuracy > (85 if sweeps.FULL else 50)


def test_the_digits_example_equals_stock_accumulation():
    """Scaling by 2 and 1/2 is exact, so weights are equal bit for bit."""
    epochs = 20 if sweeps.FULL else 5
    found, printed = run_here("digits.py", {"range(20)": f"range({epochs})"})
    updates, accuracy = updates_and_accuracy(printed)
    assert updates == epochs * 24  # 47 micro-batches are 23 windows of two, and one of one
    assert accuracy > (85 if sweeps.FULL else 70)
    torch.manual_seed(0)
    train = torch.utils.data.DataLoader(found["train"].dataset, batch_size=32, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for index, (x, y) in enumerate(train):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            (loss if index == 46 else loss / 2).backward()
            if index % 2 or index == 46:
                optimizer.step(), optimizer.zero_grad()
    for mine, stock, before in zip(found["model"].parameters(), model.parameters(), start, strict=True):
        assert torch.equal(mine, stock)
        assert not torch.equal(stock, before)


def test_the_scheduler_example_resumes_inside_a_window():
    _, printed = run_here("scheduler.py")
    steps, accuracy, same = re.search(r"(\d+) steps .*accuracy ([\d.]+)%, .*: (\w+)", printed).groups()
    assert (int(steps), same) == (300, "True")
    assert float(accuracy) > 85


def test_the_planner_example_trains_with_the_planned_sizes(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr("sys.argv", ["plan.py", "3"])
    found = runpy.run_path(str(EXAMPLES / "plan.py"))
    size, planned, losses = found["batch_size"], found["found"], found["losses"]
    assert 1 < size < sum(planned.micro_batch_sizes) == 64
    assert found["optimizer"].num_updates == len(losses) == 3
    assert losses[-1] < losses[0] - 0.5
    assert planned.measured_peak_bytes == pytest.approx(planned.peak_bytes, rel=0.05)
    printed = capsys.readouterr().out
    assert printed.startswith(f"micro_batch_size={size}, ")
    assert f"batch_size={size}: 3 updates of 64 samples, loss {losses[0]:.2f} -> {losses[-1]:.2f}" in printed


@pytest.mark.parametrize("dtype", ["bfloat16", *(["float32", "autocast"] if sweeps.FULL else [])])
def test_the_demo_trains_equally_with_all_loops(monkeypatch, dtype, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    demo = importlib.import_module("where_it_pays")
    # The demo's default text, Python's own sources, takes seconds. This one exceeds the vocabulary too.
    text = tmp_path / "text"
    text.write_text("to be or not to be, that\n" * 9000 + " ".join(f"w{n}" for n in range(33_000)))
    arguments = ["--dtype", dtype, "--updates", "4", "--steps", "2", "--width", "32"]
    arguments += [] if sweeps.FULL else ["--text", str(text)]
    result = demo.main([*arguments, "--device", "cpu", "--out", str(tmp_path)])
    by_bytes, by_words = result.models
    assert (by_bytes.vocabulary, by_words.vocabulary) == (256, 32_768)

    for model in result.models:
        # Scaling by 1/2 is exact, so both loops do the same arithmetic in the same order.
        assert model.losses["fusedacc"] == model.losses["stock"]
        # A product added in place is rounded once less, and AdamW divides tiny gradients by their own size.
        inside = model.losses["fusedacc, model="]
        assert inside[0] == model.losses["stock"][0]
        assert inside == pytest.approx(model.losses["stock"], rel=1e-5 if dtype == "float32" else 1e-2)
        assert model.difference("fusedacc") == 0
        assert len(model.losses["stock"]) == 4
        assert model.losses["stock"][-1] < model.losses["stock"][0] - 0.1
        assert {len(seconds) for seconds in model.times.values()} == {2}  # two are not timed

        # On a CPU each gradient is added when it arrives.
        assert model.calls["fusedacc"] <= model.calls["stock"]
        parameter_bytes = model.parameters * (2 if dtype == "bfloat16" else 4)
        assert min(model.peaks.values()) > 4 * parameter_bytes  # parameters, sums and AdamW's two states
        assert model.peaks["fusedacc"] <= 1.01 * model.peaks["stock"]
        # The indices of looked-up rows are kept through a window, with 8 bytes per token.
        assert model.peaks["fusedacc, model="] <= model.peaks["fusedacc"] + 4 * 8 * 64 * 8
        # A gradient that is never written saves 4 bytes per parameter in each micro-batch but the first.
        assert model.bytes("fusedacc, model=") < model.bytes("stock") - 3 * model.parameters
    assert 2 * by_bytes.share_of_gradients() < by_words.share_of_gradients()

    shown, shown_while_running = capsys.readouterr()
    # Of each of six loops: four updates, one whose bytes are counted, and two for the peak of its memory.
    assert shown_while_running.splitlines()[-1].startswith("42 of 42 updates: words: memory")
    rows = ("loss of update 4", "bit for bit", "fusedacc, model=", "time per", "peak memory", "bytes moved")
    assert all(shown.count(row) >= 2 for row in rows)
    numbers = json.loads((tmp_path / f"where_it_pays-{dtype}.json").read_text())
    assert [model["losses"] for model in numbers["models"]] == [model.losses for model in result.models]
    pixels = matplotlib.image.imread(tmp_path / f"where_it_pays-{dtype}.png")
    assert pixels.shape[1] >= 1000
    assert (pixels[..., :3].reshape(-1, 3) != 1).any(axis=1).mean() > 0.02, "the plot is blank"
