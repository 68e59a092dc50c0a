"""Parameter lists, and the ways to run a window. No test checks times."""

import pytest
import torch
from bench_setup import ROOT

from benchmarks.contestants import model_shapes as lists
from benchmarks.contestants import windows
from benchmarks.contestants.windows import Memory

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


# The ways


def sgd(parameters, lr: float, fused: bool | None) -> torch.optim.Optimizer:
    """SGD shows the scale of gradients, unlike Adam. Fused SGD is wrong for bfloat16 on a CPU."""
    return torch.optim.SGD(parameters, lr=0.5)


def after(variant, setting: str, steps: int, clip: bool, count: int = 2) -> list[torch.Tensor]:
    """Return the weights after `count` windows."""
    memory = Memory(SHAPES, setting, "cpu", steps, clip, kind=sgd)
    loop = variant.make(memory)
    for _ in range(count):
        loop.window([()] * steps)
    loop.close()
    return memory.weights


def expected(setting: str, steps: int, clip: bool, count: int = 2) -> list[torch.Tensor]:
    """Return the weights of a plain loop in float64."""
    weights = [weight.double() for weight in Memory(SHAPES, setting, "cpu").weights]
    for window in range(count):
        gradients = []
        for index, weight in enumerate(weights):
            numbers = range(window * steps + 1, window * steps + steps + 1)
            values = [((3 * index + 5 * number) % 17 - 7.5) / 64 for number in numbers]
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
    # bfloat16 gradients of a divided loss are rounded, and so are bfloat16 weights and casts.
    rtol, atol = {"float32": (1e-6, 1e-7), "autocast": (1e-3, 1e-4), "bfloat16": (8e-3, 5e-4)}[setting]
    ways = [way for way in windows.VARIANTS if setting in way.settings]
    ways = [way for way in ways if way.role not in ("inexact", "floor")]
    assert len(ways) == (5 if setting == "bfloat16" else 4)
    for way in ways:
        found = after(way, setting, steps, clip)
        for got, want in zip(found, reference, strict=True):
            torch.testing.assert_close(
                got.double(), want, rtol=rtol, atol=atol, msg=lambda text, way=way: f"{way.name}: {text}"
            )
