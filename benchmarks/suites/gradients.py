"""Windows of gradients that are not plain: sparse ones, and those of a penalty on gradients.

- "sparse": an `nn.Embedding(sparse=True)`, whose gradients autograd and the wrapper put one behind another.
- "penalty": a critic whose loss has the norm of its gradient by the input (`create_graph=True`), as in a
  WGAN-GP: stock, wrapped, and with `model=`.

Times are CPU time on one thread: the work is small, and other programs must not count.

    python -m benchmarks.suites.gradients [--quick | --full]
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import fusedacc
from fusedacc.commands.measuring.records import Case, Goal, Results, Variant

from .. import harness
from ..contestants.loops import window
from ..harness import measure, one_thread

STEPS = 4
STOCK, WRAPPED, INSIDE = "stock", "fusedacc", "fusedacc, model="
#: (rows, columns, tokens) of a table; (width, rows of a micro-batch) of a critic.
TABLES = {
    "quick": ((100, 8, 16),),
    "short": ((50_257, 256, 1024),),
    "full": ((50_257, 256, 1024), (50_257, 768, 4096)),
}
CRITICS = {"quick": ((8, 4),), "short": ((512, 128),), "full": ((512, 128), (1024, 256))}
ROUNDS = {"quick": 3, "short": 21, "full": 51}
OPTIMIZERS = {"SGD": torch.optim.SGD, "SparseAdam": torch.optim.SparseAdam}
#: The goals: at most 1.1 times stock's time, and 1.05.
SPARSE_AT_LEAST, PENALTY_AT_LEAST = 1 / 1.1, 1 / 1.05
#: The loss of the micro-batch with this number.
Loss = Callable[[int], Tensor]


def variant(
    way: str, module: nn.Module, kind: type[torch.optim.Optimizer], loss: Loss, at_least: float
) -> Variant:
    optimizer: torch.optim.Optimizer = kind(module.parameters(), lr=1e-6)
    if way != STOCK:
        model = module if way == INSIDE else None
        optimizer = fusedacc.AccumulatingOptimizer(optimizer, STEPS, model=model)
    goals = () if way == STOCK else (Goal(STOCK, at_least),)
    return Variant(way, window(optimizer, loss, STEPS), goals=goals)


def thread_time(run: Callable[[], object], calls: int) -> float:
    start = time.thread_time()
    for _ in range(calls):
        run()
    return (time.thread_time() - start) / calls


def sparse(results: Results, effort: str) -> None:
    for (height, columns, count), name in itertools.product(TABLES[effort], OPTIMIZERS):
        generator = torch.Generator().manual_seed(0)
        tokens = [torch.randint(0, height, (count,), generator=generator) for _ in range(STEPS)]
        weights = torch.randn(count, columns, generator=generator)
        variants = []
        for way in (STOCK, WRAPPED):
            table = nn.Embedding(height, columns, sparse=True)

            def loss(index: int, table: nn.Embedding = table, tokens=tokens, weights=weights) -> Tensor:
                return (table(tokens[index]) * weights).mean()

            variants.append(variant(way, table, OPTIMIZERS[name], loss, SPARSE_AT_LEAST))
        case = Case(
            "gradients",
            f"{height} x {columns}, {count} tokens",
            f"sparse, {name}",
            f"{name}, k={STEPS}",
            "float32",
        )
        results.add(measure(case, variants, ROUNDS[effort], timer=thread_time))


def critic(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    )


def penalised(model: nn.Module, inputs: list[Tensor]) -> Loss:
    """The critic's score, and how far the norm of its gradient by the input is from 1."""

    def loss(index: int) -> Tensor:
        point = inputs[index].detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(point).sum(), point, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean() + model(inputs[index]).mean()

    return loss


def penalties(results: Results, effort: str) -> None:
    for width, count in CRITICS[effort]:
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(count, width, generator=generator) for _ in range(STEPS)]
        variants = []
        for way in (STOCK, WRAPPED, INSIDE):
            model = critic(width)
            variants.append(variant(way, model, torch.optim.SGD, penalised(model, inputs), PENALTY_AT_LEAST))
        case = Case(
            "gradients", f"critic of width {width}, {count} rows", "penalty", f"SGD, k={STEPS}", "float32"
        )
        results.add(measure(case, variants, ROUNDS[effort], timer=thread_time))


def figures(results: Results, effort: str) -> None:
    """On the CPU."""
    with one_thread():
        sparse(results, effort)
        penalties(results, effort)


if __name__ == "__main__":
    harness.run(figures, harness.arguments(__doc__).parse_args())
