"""Parameter lists, the ways to run a window, and models.py. No time is asserted."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("tqdm", reason="the benchmarks show progress by tqdm")
BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
SHAPES = [(5, 7), (3,), (64, 33), (1, 1, 8)]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch):
    """Imports a module of benchmarks/."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


@pytest.fixture
def lists(benchmark) -> ModuleType:
    return benchmark("parameter_lists")


@pytest.fixture
def windows(benchmark) -> ModuleType:
    return benchmark("windows")


# The lists

KNOWN = {
    "resnet50": (161, 25_557_032),
    "vit_b_16": (152, 86_567_656),
    "bert_base": (199, 109_482_240),
    "gpt2": (148, 124_439_808),
    "gpt2_xl": (580, 1_557_611_200),
    "llama3_8b": (291, 8_030_261_248),
    "mixtral_8x7b": (995, 46_702_792_704),
}


@pytest.mark.parametrize("name", KNOWN)
def test_lists_have_the_published_number_of_parameters(lists: ModuleType, name: str) -> None:
    parameters = lists.load(name)
    assert (len(parameters), lists.elements(parameters)) == KNOWN[name]
    assert len({name for name, _ in parameters}) == len(parameters)


def test_the_names_are_those_of_the_files(lists: ModuleType) -> None:
    assert (
        set(lists.NAMES)
        == {path.stem for path in (BENCHMARKS / "parameter_lists").glob("*.csv")}
        == set(KNOWN)
    )


def test_an_unknown_model_lists_what_is_allowed(lists: ModuleType) -> None:
    with pytest.raises(
        ValueError, match=r"unknown model 'gpt3'; allowed: resnet50, vit_b_16, .*mixtral_8x7b"
    ):
        lists.load("gpt3")


@pytest.mark.parametrize(
    ("name", "layers"),
    [("resnet50", 16), ("vit_b_16", 12), ("bert_base", 12), ("gpt2", 12), ("gpt2_xl", 48), ("llama3_8b", 32)],
)
def test_lists_are_scaled_down_by_whole_layers(lists: ModuleType, name: str, layers: int) -> None:
    whole = lists.load(name)
    total = lists.elements(whole)
    assert lists.layers(whole) == layers
    assert lists.fitting(whole, total) == whole
    half = lists.fitting(whole, 2 * total // 3)
    assert 0 < lists.elements(half) <= 2 * total // 3
    assert f": {lists.layers(half)} of {layers} layers" in lists.describe(half, whole)
    # What repeats is cut, whole layers at a time, and what does not repeat stays.
    assert lists.first_layers(whole, 0) == lists.first_layers(half, 0)
    assert half == [parameter for parameter in whole if parameter in half]
    assert lists.fitting(whole, 1000) == []


def test_a_list_in_full_is_described_without_layers(lists: ModuleType) -> None:
    whole = lists.load("resnet50")
    assert lists.describe(whole, whole) == "161 parameters, 25.6 M elements"


# The ways


def sgd(parameters, lr: float, fused: bool | None) -> torch.optim.Optimizer:
    """Unlike Adam it shows by how much gradients are scaled. Fused SGD is wrong for bfloat16 on a CPU."""
    return torch.optim.SGD(parameters, lr=0.5)


def after(
    windows: ModuleType, way, setting: str, steps: int, clip: bool, count: int = 2
) -> list[torch.Tensor]:
    """The weights after `count` windows."""
    memory = windows.Memory(SHAPES, setting, "cpu")
    window = way(memory, steps, clip=clip, optimizer=sgd)
    for _ in range(count):
        window.run()
    window.close()
    return memory.weights


def expected(windows: ModuleType, setting: str, steps: int, clip: bool, count: int = 2) -> list[torch.Tensor]:
    """The same by hand, in float64."""
    weights = [weight.double() for weight in windows.Memory(SHAPES, setting, "cpu").weights]
    for window in range(count):
        gradients = []
        for index, weight in enumerate(weights):
            values = [
                ((3 * index + 5 * (window * steps + step + 1)) % 17 - 7.5) / 64 for step in range(steps)
            ]
            gradients.append(torch.full_like(weight, sum(values) / steps))
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()
        factor = min(1.0, windows.MAX_NORM / norm) if clip else 1.0
        for weight, gradient in zip(weights, gradients, strict=True):
            weight -= 0.5 * factor * gradient
    return weights


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("steps", [1, 3, 8])
@pytest.mark.parametrize("setting", ["float32", "autocast", "bfloat16"])
def test_all_exact_ways_end_with_the_same_weights(
    windows: ModuleType, setting: str, steps: int, clip: bool
) -> None:
    reference = expected(windows, setting, steps, clip)
    # bfloat16 gradients of a divided loss are rounded; so are bfloat16 weights and what is cast for them.
    rtol, atol = {"float32": (1e-6, 1e-7), "autocast": (1e-3, 1e-4), "bfloat16": (8e-3, 5e-4)}[setting]
    ways = [way for way in windows.ways(setting) if way.role not in ("inexact", "floor")]
    assert len(ways) == (5 if setting == "bfloat16" else 4)
    for way in ways:
        found = after(windows, way, setting, steps, clip)
        for got, want in zip(found, reference, strict=True):
            torch.testing.assert_close(
                got.double(), want, rtol=rtol, atol=atol, msg=lambda text, way=way: f"{way.name}: {text}"
            )


@pytest.mark.parametrize("setting", ["float32", "autocast", "bfloat16"])
def test_adamw_as_the_benchmark_uses_it_agrees_too(windows: ModuleType, setting: str) -> None:
    ends = {}
    for way in windows.ways(setting):
        if way.role not in ("inexact", "floor"):
            memory = windows.Memory(SHAPES, setting, "cpu")
            window = way(memory, 8)
            for _ in range(3):
                window.run()
            ends[way.role] = memory.weights
    start = windows.Memory(SHAPES, setting, "cpu").weights
    for role, weights in ends.items():
        for got, want, begin in zip(weights, ends["as written"], start, strict=True):
            assert (got - begin).abs().max() > 1e-3, role
            torch.testing.assert_close(got, want, rtol=1e-5 if setting != "bfloat16" else 2e-2, atol=1e-5)


def test_ways_share_weights_and_leave_each_other_alone(windows: ModuleType) -> None:
    """In turns on one memory: each does what it does alone, whatever the one before has left behind."""
    memory = windows.Memory(SHAPES, "bfloat16", "cpu")
    ways = [way for way in windows.ways("bfloat16") if way.role not in ("inexact", "floor")]
    live = [way(memory, 3, optimizer=sgd) for way in ways]
    start = [weight.clone() for weight in memory.weights]
    ends = []
    for _ in range(2):
        for window in live:
            for weight, begin in zip(memory.weights, start, strict=True):
                weight.copy_(begin)
            window.source.micro_batches = 0
            window.run()
            assert all(parameter.grad is None for parameter in window.parameters)
            ends.append([weight.clone() for weight in memory.weights])
    for window in live:
        window.close()
    for end in ends[1:]:
        for got, want in zip(end, ends[0], strict=True):
            torch.testing.assert_close(got, want, rtol=8e-3, atol=5e-4)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("setting", ["float32", "autocast", "bfloat16"])
def test_the_layers_of_model_get_the_same_gradients(windows: ModuleType, setting: str, clip: bool) -> None:
    shapes = [(5, 7), (64, 33)]
    ends = []
    for way in (windows.Fusedacc, windows.Linears):
        memory = windows.Memory(shapes, setting, "cpu")
        window = way(memory, 3, clip=clip, optimizer=sgd)
        for _ in range(2):
            window.run()
        assert ("gemm" in window.wrapper.explain()) == (way is windows.Linears)
        window.close()
        ends.append(memory.weights)
    rtol, atol = (1e-5, 1e-6) if setting == "float32" else (1e-2, 1e-3)
    for got, want in zip(*ends, strict=True):
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


def test_inexact_ways_and_the_floor_say_so(windows: ModuleType) -> None:
    for setting in windows.SETTINGS:
        for way in windows.ways(setting):
            assert ("inexact" in way.note) == (way.role == "inexact")
        roles = [way.role for way in windows.ways(setting)]
        assert [roles.count(role) for role in ("as written", "best stock", "ours", "floor")] == [1, 1, 1, 1]


def test_the_floor_makes_gradients_and_leaves_weights_alone(windows: ModuleType) -> None:
    memory = windows.Memory(SHAPES, "float32", "cpu")
    before = [weight.clone() for weight in memory.weights]
    window = windows.Floor(memory, 3)
    window.run()
    assert window.source.micro_batches == 3
    assert all(torch.equal(a, b) for a, b in zip(before, memory.weights, strict=True))
    assert all(parameter.grad is None for parameter in window.parameters)


def test_adam_states_are_one_memory_for_all_ways(windows: ModuleType) -> None:
    memory = windows.Memory(SHAPES, "float32", "cpu")
    first, second = windows.AsWritten(memory, 3), windows.Fused(memory, 3)
    first.run()
    second.run()
    mean = memory.moments()[0][0]
    assert mean.count_nonzero() == mean.numel()
    for window in (first, second):
        assert window.optimizer.state[window.parameters[0]]["exp_avg"] is mean


def test_gradients_are_made_in_groups_of_a_size(windows: ModuleType) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (4, 4, 4, 100, 4)]
    one_each = windows.Source(parameters, torch.float32, 0)
    assert [list(group) for group in one_each.groups] == [[0], [1], [2], [3], [4]]
    grouped = windows.Source(parameters, torch.float32, 32)
    assert [list(group) for group in grouped.groups] == [[0, 1], [2], [3], [4]]
    grouped.loss().backward()
    one_each.micro_batches = 0
    before = [parameter.grad.clone() for parameter in parameters]
    one_each.loss().backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(parameters, before, strict=True))
    assert len({gradient[0].item() for gradient in before}) == 5


def test_windows_say_what_is_allowed(windows: ModuleType) -> None:
    with pytest.raises(ValueError, match="unknown setting 'float16'; allowed: float32, autocast, bfloat16"):
        windows.Memory(SHAPES, "float16", "cpu")
    with pytest.raises(ValueError, match="steps must be at least 1; got 0"):
        windows.Fused(windows.Memory(SHAPES, "float32", "cpu"), 0)


# models.py


@pytest.fixture
def models(benchmark) -> ModuleType:
    return benchmark("models")


@pytest.fixture
def common(benchmark) -> ModuleType:
    return benchmark("common")


#: Bytes per parameter of one window of 8 with clipping and AdamW, by hand: reads and writes per element.
COUNTED = {
    ("float32", "stock fused AdamW"): {
        "weight gradients": 8 * 4,
        "accumulate": 7 * 12,  # the first gradient is taken as it is
        "update: clip": 4 + 8,
        "update: optimizer": 4 + 3 * 8,
    },
    ("autocast", "stock fused AdamW"): {
        "forward": 8 * 6,
        "weight gradients": 8 * 2,
        "cast": 8 * 6,
        "accumulate": 7 * 12,
        "update: clip": 4 + 8,
        "update: optimizer": 4 + 3 * 8,
    },
    ("bfloat16", "stock by hand"): {
        "weight gradients": 8 * 2,
        "cast": 8 * 6,
        "accumulate": 8 * (8 + 12),
        "first touch": 4,
        "update: cast": 6,
        "update: clip": 2 + 4,
        # Torch's loop on a CPU: decay, lerp_, mul_, addcmul_, sqrt, div, add_, addcdiv_.
        "update: optimizer": 4 + 6 + 4 + 6 + 4 + 4 + 4 + 8,
    },
    ("bfloat16", "stock grad_dtype"): {
        "weight gradients": 8 * 2,
        "cast": 8 * 6,
        "accumulate": 7 * 12,
        "update: cast": 6,
        "update: clip": 2 + 4,
        "update: optimizer": 2 + 3 * 4,
    },
    ("bfloat16", "stock mixed add_"): {
        "weight gradients": 8 * 2,
        "accumulate": 6 + 7 * 10,
        "update: cast": 6,
        "update: clip": 2 + 4,
        "update: optimizer": 2 + 3 * 4,
    },
    ("float32", "fusedacc"): {
        "weight gradients": 8 * 4,
        "accumulate": 7 * 12,
        "update: clip": 4,
        "update: optimizer": 8 + 3 * 8,  # the kernel clips, and writes what it has clipped
    },
    ("float32", "fusedacc manual loop"): {
        "weight gradients": 8 * 4,
        "accumulate": 7 * 12,
        "update: clip": 4,
        "update: optimizer": 8 + 3 * 8,
    },
    ("bfloat16", "fusedacc"): {
        "weight gradients": 8 * 2,
        "accumulate": 6 + 7 * 10,
        "update: clip": 4,
        "update: cast": 6,
        "update: optimizer": 2 + 3 * 4,
    },
    ("bfloat16", "fusedacc manual loop"): {
        "weight gradients": 8 * 2,
        "accumulate": 6 + 7 * 10,
        "update: cast": 6,
        "update: clip": 4,
        "update: optimizer": 2 + 3 * 4,
    },
    ("bfloat16", "stock bfloat16 sums"): {
        "weight gradients": 8 * 2,
        "accumulate": 7 * 6,
        "update: clip": 2 + 4,
        "update: optimizer": 2 + 3 * 4,
    },
    ("float32", "floor"): {"weight gradients": 8 * 4},
    ("float32", "fusedacc model="): {
        "accumulate": 4 + 7 * 8,
        "update: clip": 4,
        "update: optimizer": 8 + 3 * 8,
    },
    ("autocast", "fusedacc model="): {
        "forward": 8 * 6,
        "accumulate": 4 + 7 * 8,
        "update: clip": 4,
        "update: optimizer": 8 + 3 * 8,
    },
    ("bfloat16", "fusedacc model="): {
        "accumulate": 4 + 7 * 8,
        "update: clip": 4,
        "update: cast": 6,
        "update: optimizer": 2 + 3 * 4,
    },
}


def test_counted_bytes_are_those_of_hand_counts(models: ModuleType, common: ModuleType) -> None:
    results = common.Results(None)
    models.count(results, models.Loop(torch.device("cpu")))
    setting_of = {dtypes: setting for setting, dtypes in models.DTYPES.items()}
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in results.rows:
        assert (row.benchmark, row.case, row.mode) == ("models", "counted", "window k=8")
        if row.median is None:
            assert row.provider == "torch-optimi"
            continue
        assert row.unit == "B/param"
        assert "not counted" not in row.note
        part = row.metric.removeprefix("bytes: ")
        found.setdefault((setting_of[row.dtypes], row.provider), {})[part] = row.median
    for key, parts in found.items():
        total = parts.pop("total")
        assert set(parts) <= set(models.PARTS)
        assert total == pytest.approx(sum(parts.values()), abs=0.01), key
    for key, parts in COUNTED.items():
        assert found[key] == pytest.approx(parts, abs=0.01), key


def test_a_window_without_clipping_says_so_and_has_no_clip(models: ModuleType, common: ModuleType) -> None:
    results = common.Results(None)
    loop = models.Loop(torch.device("cpu"), 2, clip=False)
    models.count(results, loop, settings=["float32"], providers=["stock fused AdamW"])
    by_metric = {row.metric: row.median for row in results.rows}
    assert {row.mode for row in results.rows} == {"window k=2, no clipping"}
    assert "bytes: update: clip" not in by_metric
    assert by_metric["bytes: total"] == pytest.approx(2 * 4 + 12 + 28, abs=0.01)


def test_quick_figures_have_all_ways_and_their_goals(models: ModuleType, common: ModuleType) -> None:
    results = common.Results(None)
    models.figures(results, "quick", settings=["bfloat16"], steps=2)
    times = [row for row in results.rows if row.metric == "time" and row.median is not None]
    window = [row for row in times if row.mode == "window k=2"]
    providers = {row.provider for row in window}
    assert {"stock by hand", "stock mixed add_", "fusedacc", "stock bfloat16 sums", "floor"} <= providers
    ours = {row.against: row.goal for row in window if row.provider == "fusedacc"}
    assert ours == {"stock by hand": None, "stock grad_dtype": None, "stock mixed add_": 1.0}
    assert all(row.bytes and row.launches and row.median > 0 for row in window)
    assert {row.dtypes for row in times if row.mode == "accumulate"} == {
        "bfloat16 into float32",
        "float32 into float32",
    }


def test_a_way_that_raises_is_a_row_that_says_why(
    models: ModuleType, windows: ModuleType, common: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self) -> None:
        raise RuntimeError("no such kernel\nand a long tale")

    monkeypatch.setattr(windows.Fused, "run", fails)
    monkeypatch.setattr(windows.Floor, "obstacle", classmethod(lambda cls: "it is closed today"))
    results = common.Results(None)
    models.figures(results, "quick", settings=["float32"], steps=1)
    assert {row.note for row in results.rows if row.provider == "stock fused AdamW"} == {
        "not run: RuntimeError: no such kernel"
    }
    assert {row.note for row in results.rows if row.provider == "floor"} == {"not run: it is closed today"}
    # What it would have been compared with is left out of the comparison.
    against = {row.against for row in results.rows if row.provider == "fusedacc" and row.metric == "time"}
    assert against == {"stock as written"}


def test_a_model_that_does_not_fit_is_scaled_down_or_says_so(
    models: ModuleType, lists: ModuleType, common: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = [("head", (4, 4)), *((f"layers.{index}.weight", (8, 8)) for index in range(6))]
    device = torch.device("cpu")
    # 16 + 3 * 64 elements of 20 bytes, and 12 for each of the largest one's 64.
    room = (20 * (16 + 3 * 64) + 12 * 64) / lists.SHARE + 1
    monkeypatch.setattr(lists, "available_memory", lambda device: room)
    assert lists.fitting_memory(whole, 20, device) == whole[:4]
    monkeypatch.setattr(lists, "available_memory", lambda device: 1000)
    results = common.Results(None)
    models.model(
        results, "some", whole, "float32", models.ways("float32", ["fusedacc"]), "quick", models.Loop(device)
    )
    (row,) = results.rows
    assert row.note.startswith("not run: no memory for one layer of each stack; the whole model needs")


def test_where_memory_is_short_the_main_ways_go_before_the_others(
    models: ModuleType, windows: ModuleType, lists: ModuleType, common: ModuleType, monkeypatch
) -> None:
    whole = [("head", (64, 64)), *((f"layers.{index}.weight", (16, 16)) for index in range(6))]
    device, of = torch.device("cpu"), models.ways("bfloat16", None)
    main = [way for way in of if way.role in models.MAIN_ROLES]
    room = windows.need("bfloat16", main) * (64 * 64 + 2 * 256) + 12 * 64 * 64
    assert windows.need("bfloat16", main) < windows.need("bfloat16", of)
    monkeypatch.setattr(lists, "available_memory", lambda device: room / lists.SHARE + 1)
    results = common.Results(None)
    models.model(results, "some", whole, "bfloat16", of, "quick", models.Loop(device, 2))
    assert {row.shapes for row in results.rows} == {"3 parameters, 0.00461 M elements: 2 of 6 layers"}
    ran = {row.provider for row in results.rows if row.metric == "time" and row.median is not None}
    assert ran == {way.name for way in main}
    others = {row.provider: row.note for row in results.rows if row.median is None}
    assert set(others) == {way.name for way in of} - ran
    assert set(others.values()) == {"not run: left out, so that more layers fit"}


def test_timing_that_fails_leaves_rows(
    models: ModuleType, common: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args, **kwargs) -> None:
        raise MemoryError("no room\nleft")

    monkeypatch.setattr(models.common, "measure", fails)
    results = common.Results(None)
    of = models.ways("float32", ["fusedacc", "floor"])
    models.model(
        results, "some", [("a", (4, 4))], "float32", of, "quick", models.Loop(torch.device("cpu"), 1)
    )
    notes = {row.provider: row.note for row in results.rows if row.metric == "time"}
    assert notes == dict.fromkeys(("fusedacc", "floor"), "not run: MemoryError: no room")


def test_a_pass_over_a_list_names_what_cannot_run(
    benchmark, lists: ModuleType, common: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_pass, results = benchmark("model_pass"), common.Results(None)
    whole = [("a", (4, 4)), ("b", (7,))]
    one_pass.figures(results, "some", whole, torch.bfloat16, "quick", "cuda")
    if not torch.cuda.is_available():
        assert [row.note[:8] for row in results.rows if row.provider == "fusedacc cuda"] == ["not run:"]
    assert {row.provider: row.bytes for row in results.rows if row.median is not None} == {
        "add_": 23 * 10,
        "torch._foreach_add_": 23 * 10,
        "foreach cast and add": 23 * 18,
    }
    results.rows.clear()
    one_pass.figures(results, "some", whole, torch.float32, "quick", "eager")
    ours = [row for row in results.rows if row.provider == "fusedacc eager"]
    assert [row.against for row in ours] == ["add_", "torch._foreach_add_"]
    assert all(row.goal == 1.0 and row.bytes == 23 * 12 for row in ours)
    results.rows.clear()
    monkeypatch.setattr(lists, "available_memory", lambda device: 10)
    one_pass.figures(results, "some", whole, torch.float32, "quick", "auto")
    assert {row.note for row in results.rows} == {"not run: no memory for one layer of each stack"}


def test_the_short_sweep_has_less_of_long_lists(
    models: ModuleType, common: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    called = {}

    def record(results, name, whole, setting, of, effort, loop) -> None:
        called[name, setting] = [way.role for way in of]

    monkeypatch.setattr(models, "model", record)
    monkeypatch.setattr(models, "count", lambda *args, **kwargs: None)
    monkeypatch.setattr(models.model_pass, "figures", lambda *args: None)
    monkeypatch.setattr("sys.argv", ["models.py", "--device", "cpu", "--results", str(tmp_path / "r.csv")])
    models.main()
    resnet = {("resnet50", setting) for setting in models.SETTINGS}
    assert set(called) == resnet | {("gpt2", "float32"), ("gpt2", "bfloat16")}
    assert called["gpt2", "bfloat16"] == ["as written", "best stock", "ours"]
    assert {"stock", "inexact", "floor"} <= set(called["resnet50", "bfloat16"])
    called.clear()
    models.figures(common.Results(None), "full")
    assert len(called) == 7 * 3
    called.clear()
    models.figures(common.Results(None), "short", models=["gpt2"], providers=["floor"], settings=["autocast"])
    assert called == {("gpt2", "autocast"): ["floor"]}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--models", "gpt5"], r"unknown model 'gpt5'; allowed: resnet50, vit_b_16"),
        (["--settings", "fp8"], r"unknown setting 'fp8'; allowed: float32, autocast, bfloat16"),
        (["--providers", "apex"], r"unknown provider 'apex'; allowed: stock as written, .*floor"),
        (["--k", "0"], r"--k must be at least 1; got 0"),
    ],
)
def test_unknown_names_list_what_is_allowed(
    models: ModuleType, monkeypatch: pytest.MonkeyPatch, option: list[str], message: str
) -> None:
    monkeypatch.setattr("sys.argv", ["models.py", "--quick", *option])
    with pytest.raises(SystemExit, match=message):
        models.main()


def test_counting_is_a_command(
    models: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    path = tmp_path / "results.csv"
    options = ["--count", "--settings", "float32", "--providers", "fusedacc", "--results", str(path)]
    monkeypatch.setattr("sys.argv", ["models.py", "--device", "cpu", *options])
    models.main()
    assert "bytes: total" in capsys.readouterr().out
    header, *lines = path.read_text().splitlines()
    assert header.startswith("benchmark,case,provider")
    assert all(line.startswith("models,counted,fusedacc,window k=8,") for line in lines)


def test_optimi_runs_where_it_is_installed(windows: ModuleType) -> None:
    pytest.importorskip("optimi", reason="torch-optimi is not installed")
    memory = windows.Memory(SHAPES, "bfloat16", "cpu")
    before = [weight.clone() for weight in memory.weights]
    window = windows.Optimi(memory, 3)
    window.run()
    window.close()
    assert all(not torch.equal(a, b) for a, b in zip(before, memory.weights, strict=True))
