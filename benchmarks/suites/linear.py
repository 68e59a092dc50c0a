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
    """Weights, their float32 sums, inputs and the outputs' gradients.

    Args:
        shapes: (outputs, inputs) of each layer.
        tokens: rows of every input.
        weight: the weights' dtype.
        operand: dtype of inputs and of the outputs' gradients.
    """

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
        self.outputs = [F.linear(x, w.to(operand)) for x, w in zip(self.inputs, self.weights, strict=True)]

    @property
    def elements(self) -> int:
        return sum(weight.numel() for weight in self.weights)

    @property
    def operand_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.inputs, *self.gradients))


def stock_autograd(layers: Layers, first: bool):
    def add(weight: nn.Parameter, total: Tensor) -> None:
        if first:
            total.copy_(weight.grad)
        else:
            total.add_(weight.grad)
        weight.grad = None

    for weight, total in zip(layers.weights, layers.sums, strict=True):
        if weight.dtype != total.dtype:
            weight.register_post_accumulate_grad_hook(lambda w, total=total: add(w, total))

    def run() -> None:
        for weight, total, output, gradient in zip(
            layers.weights, layers.sums, layers.outputs, layers.gradients, strict=True
        ):
            if weight.dtype == total.dtype:
                weight.grad = None if first else total
            output.backward(gradient, retain_graph=True)

    return run


def product_and_add(layers: Layers, first: bool):
    def run() -> None:
        for index, (gradient, x) in enumerate(zip(layers.gradients, layers.inputs, strict=True)):
            product = gradient.t() @ x
            if not first:
                layers.sums[index].add_(product)
            elif product.dtype == F32:
                layers.sums[index] = product
            else:
                layers.sums[index].copy_(product)

    return run


def fused(layers: Layers, first: bool):
    keep = 0.0 if first else 1.0

    def run() -> None:
        for total, gradient, x in zip(layers.sums, layers.gradients, layers.inputs, strict=True):
            matmul.gemm_accumulate_(total, gradient, x, 1.0, keep)

    return run


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
