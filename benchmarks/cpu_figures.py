"""The list-level kernels on a CPU against torch's own: one tensor beyond any cache, many small ones.

python benchmarks/cpu_figures.py [--quick]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from common import RESULTS, Goal, Row, Variant, measure, report

from fusedacc.functional import prepare, scale_accumulate_

SCALE = 0.125
F32, BF16 = torch.float32, torch.bfloat16


def large(elements: int, rounds: int) -> list[Row]:
    """One tensor that fits in no cache. A copy reads 4 and writes 4 bytes per element, a triad 8 and 4."""
    acc, other, out = torch.zeros(elements), torch.randn(elements), torch.empty(elements)
    half = other.to(BF16)
    return measure(
        f"{elements / 2**20:g} Mi elements in one tensor",
        [
            Variant("copy", lambda: out.copy_(other), 8 * elements),
            Variant("triad", lambda: torch.add(acc, other, alpha=SCALE, out=out), 12 * elements),
            Variant("torch float32 a.add_(b, alpha=s)", lambda: acc.add_(other, alpha=SCALE), 12 * elements),
            Variant("torch mixed acc.add_(g, alpha=s)", lambda: acc.add_(half, alpha=SCALE), 10 * elements),
            Variant(
                "torch acc.add_(g.float(), alpha=s)",
                lambda: acc.add_(half.float(), alpha=SCALE),
                18 * elements,
            ),
            Variant(
                "fusedacc float32",
                lambda: scale_accumulate_([acc], [other], SCALE),
                12 * elements,
                (Goal("torch float32 a.add_(b, alpha=s)"),),
            ),
            Variant(
                "fusedacc bfloat16 into float32",
                lambda: scale_accumulate_([acc], [half], SCALE),
                10 * elements,
                (
                    Goal("torch float32 a.add_(b, alpha=s)", 0.9, by_bandwidth=True),
                    Goal("torch mixed acc.add_(g, alpha=s)", 5.0),
                ),
            ),
        ],
        rounds,
    )


def small(tensors: int, elements: int, rounds: int, calls: int, goals: dict[torch.dtype, float]) -> list[Row]:
    """Many small tensors; `goals` are the prepared plan's; fresh lists may never be slower than foreach."""
    rows = []
    for dtype, goal in goals.items():
        accumulators = [torch.zeros(elements) for _ in range(tensors)]
        gradients = [torch.randn(elements).to(dtype) for _ in range(tensors)]
        plan = prepare(accumulators)
        size = tensors * elements * (8 + dtype.itemsize)
        rows += measure(
            f"{tensors} tensors of {elements}, {str(dtype)[6:]} into float32",
            [
                Variant(
                    "torch._foreach_add_",
                    lambda a=accumulators, g=gradients: torch._foreach_add_(a, g, alpha=SCALE),
                    size,
                ),
                Variant(
                    "fusedacc plan",
                    lambda p=plan, g=gradients: p(g, SCALE),
                    size,
                    (Goal("torch._foreach_add_", goal),),
                ),
                Variant(
                    "fusedacc scale_accumulate_, fresh lists",
                    lambda a=accumulators, g=gradients: scale_accumulate_(list(a), list(g), SCALE),
                    size,
                    (Goal("torch._foreach_add_", 1.0),),
                ),
            ],
            rounds,
            calls,
        )
    return rows


def figures(quick: bool = False) -> list[Row]:
    if quick:
        return large(2**16, 3) + small(20, 100, 3, 2, {BF16: 4.0, F32: 1.5}) + small(10, 4, 3, 2, {F32: 1.0})
    return (
        large(64 * 2**20, 15)
        + small(1000, 1000, 41, 5, {BF16: 4.0, F32: 1.5})
        + small(300, 4, 41, 20, {BF16: 1.0, F32: 1.0})
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to try the script: nothing is recorded"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    report("cpu_figures", figures(options.quick), None if options.quick else options.results)


if __name__ == "__main__":
    main()
