"""The weight gradients of a transformer block's Linears: one product into the sum, or product and addition.

Mode "add": each of the four weights already has a sum; "first": the first micro-batch of a window. "bytes:
weights" are those without the operands of the products. "stock autograd" runs torch's engine; with bfloat16
weights a post-accumulate hook adds into a float32 sum. "product and add_" does the same without the engine,
the best that stock can do. "fusedacc" is `kernels.matmul`, also without an engine.
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusedacc.commands.timing import timer_for
from fusedacc.kernels import matmul

from .. import harness
from ..contestants.loops import HookSums
from ..harness import BF16, F32, measure
from ..records import Case, Goal, Results, counted_variant, value_rows

SHAPES = {"quick": [(24, 8), (8, 8)], "short": [(2304, 768), (768, 768), (3072, 768), (768, 3072)]}
SHAPES["full"] = SHAPES["short"]
TOKENS = {"quick": (4,), "short": (64, 1024), "full": (64, 128, 512, 1024, 4096)}
ROUNDS = {"quick": 3, "short": 15, "full": 41}
#: Bytes per parameter: the sum is read and written, or only written.
MOST = {"add": 8.0, "first": 4.0}
#: With this number of tokens the sums' bytes weigh most; from a thousand on, the products.
FEW = 64
#: By the column `dtypes`: those of the weights and of the products' operands.
DTYPES = {
    "float32": (F32, F32),
    "autocast bfloat16 into float32": (F32, BF16),
    "bfloat16 into float32": (BF16, BF16),
}


def words(shapes: list[tuple[int, int]]) -> str:
    return ", ".join(f"{outputs} x {inputs}" for outputs, inputs in shapes)


class Layers:
    """Weights, their float32 sums, inputs and the gradients of the outputs."""

    def __init__(self, shapes: list[tuple[int, int]], tokens: int, dtypes: str, device: torch.device) -> None:
        weight, operand = DTYPES[dtypes]
        self.weights = [nn.Parameter(torch.zeros(shape, dtype=weight, device=device)) for shape in shapes]
        self.sums = [torch.zeros(shape, device=device) for shape in shapes]
        self.inputs = [torch.randn(tokens, inputs, device=device).to(operand) for _, inputs in shapes]
        self.gradients = [torch.randn(tokens, outputs, device=device).to(operand) for outputs, _ in shapes]
        self.elements = sum(weight.numel() for weight in self.weights)
        self.operand_bytes = sum(tensor.nbytes for tensor in (*self.inputs, *self.gradients))

    def each(self, step: Callable[[int, Tensor, Tensor], object]) -> Callable[[], None]:
        """Return a function that calls `step(number, output gradient, input)` for each layer."""

        def run() -> None:
            for index, (gradient, x) in enumerate(zip(self.gradients, self.inputs, strict=True)):
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
    add = matmul.gemm_accumulate_
    sums = layers.sums
    beta = 0.0 if first else 1.0
    return layers.each(lambda index, gradient, x: add(sums[index], gradient, x, 1.0, beta))


WAYS = {"stock autograd": stock_autograd, "product and add_": product_and_add, "fusedacc": fused}


def one_case(results: Results, effort: str, dtypes: str, mode: str, tokens: int) -> None:
    shapes = SHAPES[effort]
    case = Case("linear", f"GPT-2 block, {tokens} tokens", mode, words(shapes), dtypes)
    least = 1.4 if (mode, dtypes) == ("add", "float32") and tokens <= FEW else 1.0
    two_passes = 1.0 if DTYPES[dtypes][1] is BF16 and mode == "add" else 0.0
    goals = (Goal("stock autograd", least), Goal("product and add_", two_passes))
    variants = []
    moved = {}
    for name, way in WAYS.items():
        layers = Layers(shapes, tokens, dtypes, results.device)
        run = way(layers, mode == "first")
        run()
        made = counted_variant(name, run, goals if way is fused else (), layers.weights)
        moved[name] = (made.bytes - layers.operand_bytes) / layers.elements
        variants.append(made)
    limits = {"fusedacc": (MOST[mode], "limit", 0.001)}
    results.add(value_rows(case, "bytes: weights", "B/param", moved, limits))
    results.add(measure(case, variants, ROUNDS[effort], timer=timer_for(results.device)))


def figures(results: Results, effort: str) -> None:
    for dtypes, mode, tokens in itertools.product(DTYPES, ("add", "first"), TOKENS[effort]):
        one_case(results, effort, dtypes, mode, tokens)


if __name__ == "__main__":
    harness.run(figures, harness.arguments(__doc__).parse_args())
