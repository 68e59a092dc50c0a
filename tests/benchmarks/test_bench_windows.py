"""Parameter lists, and the ways to run a window. No time is asserted."""

from __future__ import annotations

import pytest
import torch
from bench_setup import ROOT

from benchmarks.contestants import model_shapes as lists
from benchmarks.contestants import windows
from benchmarks.contestants.synthetic_gradients import SETTINGS, Memory, Source

SHAPES = [(5, 7), (3,), (64, 33), (1, 1, 8)]

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
def test_lists_have_the_published_number_of_parameters(name: str) -> None:
    parameters = lists.load(name)
    assert (len(parameters), lists.elements(parameters)) == KNOWN[name]
    assert len({name for name, _ in parameters}) == len(parameters)


def test_the_names_are_those_of_the_files() -> None:
    files = {path.stem for path in (ROOT / "benchmarks" / "contestants" / "shapes").glob("*.csv")}
    assert set(lists.NAMES) == files == set(KNOWN)
    with pytest.raises(ValueError, match=r"unknown model 'gpt3'; allowed: resnet50, .*mixtral_8x7b"):
        lists.load("gpt3")


@pytest.mark.parametrize(
    ("name", "layers"),
    [("resnet50", 16), ("vit_b_16", 12), ("bert_base", 12), ("gpt2", 12), ("gpt2_xl", 48), ("llama3_8b", 32)],
)
def test_lists_are_scaled_down_by_whole_layers(name: str, layers: int) -> None:
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
    assert "layers" not in lists.describe(whole, whole)


# The ways


def sgd(parameters, lr: float, fused: bool | None) -> torch.optim.Optimizer:
    """Unlike Adam it shows by how much gradients are scaled. Fused SGD is wrong for bfloat16 on a CPU."""
    return torch.optim.SGD(parameters, lr=0.5)


def after(way, setting: str, steps: int, clip: bool, count: int = 2) -> list[torch.Tensor]:
    """The weights after `count` windows."""
    memory = Memory(SHAPES, setting, "cpu")
    window = way(memory, steps, clip=clip, optimizer=sgd)
    for _ in range(count):
        window.run()
    window.close()
    return memory.weights


def expected(setting: str, steps: int, clip: bool, count: int = 2) -> list[torch.Tensor]:
    """The same by hand, in float64."""
    weights = [weight.double() for weight in Memory(SHAPES, setting, "cpu").weights]
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
def test_all_exact_ways_end_with_the_same_weights(setting: str, steps: int, clip: bool) -> None:
    reference = expected(setting, steps, clip)
    # bfloat16 gradients of a divided loss are rounded; so are bfloat16 weights and what is cast for them.
    rtol, atol = {"float32": (1e-6, 1e-7), "autocast": (1e-3, 1e-4), "bfloat16": (8e-3, 5e-4)}[setting]
    ways = [way for way in windows.ways(setting) if way.role not in ("inexact", "floor")]
    assert len(ways) == (5 if setting == "bfloat16" else 4)
    for way in ways:
        found = after(way, setting, steps, clip)
        for got, want in zip(found, reference, strict=True):
            torch.testing.assert_close(
                got.double(), want, rtol=rtol, atol=atol, msg=lambda text, way=way: f"{way.name}: {text}"
            )


@pytest.mark.parametrize("setting", ["float32", "autocast", "bfloat16"])
def test_adamw_as_the_benchmark_uses_it_agrees_too(setting: str) -> None:
    ends = {}
    for way in windows.ways(setting):
        if way.role not in ("inexact", "floor"):
            memory = Memory(SHAPES, setting, "cpu")
            window = way(memory, 8)
            for _ in range(3):
                window.run()
            ends[way.role] = memory.weights
    start = Memory(SHAPES, setting, "cpu").weights
    for role, weights in ends.items():
        for got, want, begin in zip(weights, ends["as written"], start, strict=True):
            assert (got - begin).abs().max() > 1e-3, role
            torch.testing.assert_close(got, want, rtol=1e-5 if setting != "bfloat16" else 2e-2, atol=1e-5)


def test_ways_share_weights_and_leave_each_other_alone() -> None:
    """In turns on one memory: each does what it does alone, whatever the one before has left behind."""
    memory = Memory(SHAPES, "bfloat16", "cpu")
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
def test_the_layers_of_model_get_the_same_gradients(setting: str, clip: bool) -> None:
    shapes = [(5, 7), (64, 33)]
    ends = []
    for way in (windows.Fusedacc, windows.Linears):
        memory = Memory(shapes, setting, "cpu")
        window = way(memory, 3, clip=clip, optimizer=sgd)
        for _ in range(2):
            window.run()
        assert ("gemm" in window.wrapper.explain()) == (way is windows.Linears)
        window.close()
        ends.append(memory.weights)
    rtol, atol = (1e-5, 1e-6) if setting == "float32" else (1e-2, 1e-3)
    for got, want in zip(*ends, strict=True):
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


def test_inexact_ways_and_the_floor_say_so() -> None:
    for setting in SETTINGS:
        for way in windows.ways(setting):
            assert ("inexact" in way.note) == (way.role == "inexact")
        roles = [way.role for way in windows.ways(setting)]
        assert [roles.count(role) for role in ("as written", "best stock", "ours", "floor")] == [1, 1, 1, 1]


def test_the_floor_makes_gradients_and_leaves_weights_alone() -> None:
    memory = Memory(SHAPES, "float32", "cpu")
    before = [weight.clone() for weight in memory.weights]
    window = windows.Floor(memory, 3)
    window.run()
    assert window.source.micro_batches == 3
    assert all(torch.equal(a, b) for a, b in zip(before, memory.weights, strict=True))
    assert all(parameter.grad is None for parameter in window.parameters)


def test_adam_states_are_one_memory_for_all_ways() -> None:
    memory = Memory(SHAPES, "float32", "cpu")
    first, second = windows.AsWritten(memory, 3), windows.Fused(memory, 3)
    first.run()
    second.run()
    mean = memory.moments()[0][0]
    assert mean.count_nonzero() == mean.numel()
    for window in (first, second):
        assert window.optimizer.state[window.parameters[0]]["exp_avg"] is mean


def test_gradients_are_made_in_groups_of_a_size() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (4, 4, 4, 100, 4)]
    one_each = Source(parameters, torch.float32, 0)
    assert [list(group) for group in one_each.groups] == [[0], [1], [2], [3], [4]]
    grouped = Source(parameters, torch.float32, 32)
    assert [list(group) for group in grouped.groups] == [[0, 1], [2], [3], [4]]
    grouped.loss().backward()
    one_each.micro_batches = 0
    before = [parameter.grad.clone() for parameter in parameters]
    one_each.loss().backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(parameters, before, strict=True))
    assert len({gradient[0].item() for gradient in before}) == 5


def test_windows_say_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="unknown setting 'float16'; allowed: float32, autocast, bfloat16"):
        Memory(SHAPES, "float16", "cpu")
    with pytest.raises(ValueError, match="steps must be at least 1; got 0"):
        windows.Fused(Memory(SHAPES, "float32", "cpu"), 0)
