"""The figures of a GPU: bandwidth on 1 B elements, and the parameter lists of ResNet-50 and GPT-2.

    python benchmarks/gpu_figures.py [--quick] [--results build/gpu]

Times are CUDA events around several calls, in turns, medians; a loop of launches that the host cannot keep up
with shows as the time it takes. The large tensor exceeds every cache; the models' lists may be in one.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from common import Goal, Row, Variant, measure, report
from torch import Tensor

from fusedacc.functional import prepare, scale_accumulate_

SCALE = 0.125
F32, BF16 = torch.float32, torch.bfloat16
GOAL_BANDWIDTH = 0.92


def resnet50() -> Iterator[tuple[int, ...]]:
    """Shapes of ResNet-50's 161 parameters (He et al. 2015, table 1): 25.6 M elements."""
    yield from ((64, 3, 7, 7), (64,), (64,))
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            layers = [(width, inputs, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            if block == 0:
                layers.append((4 * width, inputs, 1, 1))
            for shape in layers:
                yield from (shape, shape[:1], shape[:1])
            inputs = 4 * width
    yield from ((1000, 2048), (1000,))


def gpt2() -> Iterator[tuple[int, ...]]:
    """Shapes of GPT-2 small's 148 parameters (Radford et al. 2019), head tied: 124.4 M elements."""
    yield from ((50257, 768), (1024, 768))
    for _ in range(12):
        yield from ((768,), (768,), (768, 2304), (2304,), (768, 768), (768,))
        yield from ((768,), (768,), (768, 3072), (3072,), (3072, 768), (768,))
    yield from ((768,), (768,))


MODELS = {"ResNet-50": resnet50, "GPT-2": gpt2}


def event_timer(run: Callable[[], object], calls: int) -> float:
    """Seconds per call on the device, by events. A first call fills the queue, so that the host is ahead."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    run()
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def bandwidth(elements: int, rounds: int) -> list[Row]:
    """One tensor; goals are shares of the copy's bytes per second, in the same rounds."""
    acc, other = torch.zeros(elements, device="cuda"), torch.randn(elements, device="cuda")
    half = other.to(BF16)
    variants = [
        Variant("copy", lambda: acc.copy_(other), 8 * elements),
        Variant("torch float32 a.add_(b, alpha=s)", lambda: acc.add_(other, alpha=SCALE), 12 * elements),
        Variant("torch mixed acc.add_(g, alpha=s)", lambda: acc.add_(half, alpha=SCALE), 10 * elements),
    ]
    goal = (Goal("copy", GOAL_BANDWIDTH, by_bandwidth=True),)
    for backend in ("cuda", "triton"):
        for gradient, size in ((half, 10), (other, 12)):
            variants.append(
                Variant(
                    f"fusedacc {backend}, {str(gradient.dtype)[6:]} into float32",
                    lambda g=gradient, b=backend: scale_accumulate_([acc], [g], SCALE, backend=b),
                    size * elements,
                    goal,
                )
            )
    return measure(f"{elements / 1e9:g} G elements in one tensor", variants, rounds, 3, event_timer)


def model_list(
    name: str, dtype: torch.dtype, rounds: int, copy_bandwidth: float, device: str = "cuda"
) -> list[Row]:
    """A model's parameters at once, against a loop of `add_` and the fastest of the foreach forms."""
    shapes = list(MODELS[name]())
    accumulators = [torch.zeros(shape, device=device) for shape in shapes]
    gradients = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    size = sum(acc.numel() for acc in accumulators) * (8 + dtype.itemsize)

    def loop() -> None:
        for acc, gradient in zip(accumulators, gradients, strict=True):
            acc.add_(gradient, alpha=SCALE)

    def foreach() -> None:
        torch._foreach_add_(accumulators, gradients, alpha=SCALE)

    def foreach_cast() -> None:
        torch._foreach_add_(accumulators, cast(gradients), alpha=SCALE)

    def cast(tensors: list[Tensor]) -> list[Tensor]:
        copies = [torch.empty_like(tensor, dtype=F32) for tensor in tensors]
        torch._foreach_copy_(copies, tensors)
        return copies

    timer = event_timer if device == "cuda" else None
    foreach_forms = {"torch._foreach_add_": foreach}
    if dtype != F32:
        foreach_forms["_foreach_copy_ to float32, _foreach_add_"] = foreach_cast
    best = fastest(foreach_forms, timer)
    variants = [Variant("loop of acc.add_(g, alpha=s)", loop, size)]
    variants += [Variant(form, run, size) for form, run in foreach_forms.items()]
    goals = (Goal("loop of acc.add_(g, alpha=s)", 5.0), Goal(best, 1.5))
    for backend in ("cuda", "triton") if device == "cuda" else ("auto",):
        plan = prepare(accumulators, backend=backend)
        variants.append(Variant(f"fusedacc plan, {backend}", lambda p=plan: p(gradients, SCALE), size, goals))
    case = f"{name}, {len(shapes)} parameters, {str(dtype)[6:]} into float32"
    arguments = {"copy_bandwidth": copy_bandwidth} | ({"timer": timer} if timer else {})
    return measure(case, variants, rounds, 20 if device == "cuda" else 1, **arguments)


def fastest(
    forms: dict[str, Callable[[], object]], timer: Callable[[Callable[[], object], int], float] | None
) -> str:
    """The name of the fastest, by a first look at each."""
    if len(forms) == 1 or timer is None:
        return next(iter(forms))
    return min(forms, key=lambda name: statistics.median(timer(forms[name], 5) for _ in range(5)))


def figures(quick: bool = False) -> list[Row]:
    rows = bandwidth(2**24 if quick else 10**9, 3 if quick else 15)
    copied = next(row.gb_per_s for row in rows if row.variant == "copy")
    for name in MODELS:
        for dtype in (BF16, F32):
            rows += model_list(name, dtype, 3 if quick else 31, 1e9 * copied)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes and few rounds; nothing is recorded"
    )
    parser.add_argument("--results", type=Path, default=Path("build/gpu"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(
            f"gpu_figures.py needs a CUDA GPU, and torch {torch.__version__} sees none. "
            "The CPU figures: python benchmarks/run_all.py"
        )
    report("gpu_figures", figures(options.quick), None if options.quick else options.results, "cuda")


if __name__ == "__main__":
    main()
