"""The weight gradients of a transformer block's Linears: stock's product and addition, against one product
into the sum.

    python -m benchmarks.suites.linear [--quick | --full] [--device cuda]

Four Linears of GPT-2's widths, by tokens of a micro-batch. Only the gradients of weights are computed: inputs
need none. Rows of benchmark "linear":

mode "add": each weight's sum is there already; "first": a window's first micro-batch. Metric "time", all four
    weights; metric "bytes: weights", B/param counted by a TrafficMeter without the products' operands.

"stock autograd" goes through torch's engine: in float32 and under autocast its AccumulateGrad adds, with
bfloat16 weights a post-accumulate hook adds into a float32 sum. "product and add_" is the same without the
engine, the best that stock can be. "fusedacc" is `kernels.matmul`, without an engine too: what a layer's
autograd function costs comes on top.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusedacc.commands.measuring.records import Case, Goal, Results, Variant, at_most, row
from fusedacc.commands.measuring.timing import timer_for
from fusedacc.kernels import matmul

from .. import harness
from ..contestants.loops import HookSums
from ..harness import counted, measure

SHAPES = {"quick": [(24, 8), (8, 8)], "short": [(2304, 768), (768, 768), (3072, 768), (768, 3072)]}
TOKENS = {"quick": (4,), "short": (64, 1024), "full": (64, 128, 512, 1024, 4096)}
ROUNDS = {"quick": 3, "short": 15, "full": 41}
#: Bytes per parameter: the sum read and written, and written alone.
MOST = {"add": 8.0, "first": 4.0}
#: At this many tokens the sums' bytes weigh most; from a thousand on, the products.
FEW = 64

F32, BF16 = torch.float32, torch.bfloat16


class Layers:
    """Weights, their float32 sums, inputs and the outputs' gradients."""

    def __init__(
        self,
        shapes: list[tuple[int, int]],
        tokens: int,
        weight: torch.dtype,
        operand: torch.dtype,
        device: torch.device,
    ) -> None:
        self.weights = [nn.Parameter(torch.zeros(shape, dtype=weight, device=device)) for shape in shapes]
        self.sums = [torch.zeros(shape, device=device) for shape in shapes]
        self.inputs = [torch.randn(tokens, inputs, device=device).to(operand) for _, inputs in shapes]
        self.gradients = [torch.randn(tokens, outputs, device=device).to(operand) for outputs, _ in shapes]
        self.elements = sum(weight.numel() for weight in self.weights)
        self.operand_bytes = sum(tensor.nbytes for tensor in (*self.inputs, *self.gradients))

    def each(self, step: Callable[[int, Tensor, Tensor], object]) -> Callable[[], None]:
        """A step for each layer: its number, the output's gradient and the input."""
        numbers = range(len(self.weights))

        def run() -> None:
            for index, gradient, x in zip(numbers, self.gradients, self.inputs, strict=True):
                step(index, gradient, x)

        return run


def stock_autograd(layers: Layers, first: bool) -> Callable[[], None]:
    operands = zip(layers.inputs, layers.weights, strict=True)
    outputs = [F.linear(x, weight.to(x.dtype)) for x, weight in operands]
    mixed = layers.weights[0].dtype != F32
    sums = HookSums(layers.weights, layers.sums) if mixed else None

    def backward(index: int, gradient: Tensor, x: Tensor) -> None:
        if sums is None:
            layers.weights[index].grad = None if first else layers.sums[index]
        else:
            sums.touched[index] = not first
        outputs[index].backward(gradient, retain_graph=True)

    return layers.each(backward)


def product_and_add(layers: Layers, first: bool) -> Callable[[], None]:
    def step(index: int, gradient: Tensor, x: Tensor) -> None:
        product = gradient.t() @ x
        if not first:
            layers.sums[index].add_(product)
        elif product.dtype == F32:
            layers.sums[index] = product
        else:
            layers.sums[index].copy_(product)

    return layers.each(step)


def fused(layers: Layers, first: bool) -> Callable[[], None]:
    keep = 0.0 if first else 1.0
    return layers.each(
        lambda index, gradient, x: matmul.gemm_accumulate_(layers.sums[index], gradient, x, 1.0, keep)
    )


WAYS = {"stock autograd": stock_autograd, "product and add_": product_and_add, "fusedacc": fused}
DTYPES = {
    "float32": (F32, F32),
    "autocast bfloat16 into float32": (F32, BF16),
    "bfloat16 into float32": (BF16, BF16),
}


def per_parameter(layers: Layers, run: Callable[[], object]) -> float:
    """Bytes of one run beside its operands."""
    return (counted(run, layers.weights).total_bytes - layers.operand_bytes) / layers.elements


def figures(results: Results, effort: str) -> None:
    shapes = SHAPES.get(effort, SHAPES["short"])
    words = ", ".join(f"{outputs} x {inputs}" for outputs, inputs in shapes)
    for dtypes, (weight, operand) in DTYPES.items():
        for mode in ("add", "first"):
            for tokens in TOKENS[effort]:
                case = Case("linear", f"GPT-2 block, {tokens} tokens", mode, words, dtypes)
                variants = []
                for name, way in WAYS.items():
                    layers = Layers(shapes, tokens, weight, operand, results.device)
                    run = way(layers, mode == "first")
                    run()
                    found = per_parameter(layers, run)
                    held = at_most(MOST[mode], found, tolerance=0.001) if name == "fusedacc" else {}
                    results.add(
                        [row(case, name, metric="bytes: weights", unit="B/param", median=found, **held)]
                    )
                    least = 1.4 if (mode, dtypes) == ("add", "float32") and tokens <= FEW else 1.0
                    two_passes = 1.0 if operand is BF16 and mode == "add" else 0.0
                    goals = (Goal("stock autograd", least), Goal("product and add_", two_passes))
                    moved = round(found * layers.elements) + layers.operand_bytes
                    variants.append(Variant(name, run, moved, goals if name == "fusedacc" else ()))
                results.add(measure(case, variants, ROUNDS[effort], timer=timer_for(results.device)))


if __name__ == "__main__":
    harness.run(figures, harness.arguments(__doc__).parse_args())
