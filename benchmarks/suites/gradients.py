"""Windows of unusual gradients: sparse ones, and those of a gradient penalty.

- "sparse": an `nn.Embedding(sparse=True)`. The wrapper concatenates its gradients, and autograd
  also merges some of their rows.
- "penalty": a critic whose loss contains the norm of its gradient with respect to the input
  (`create_graph=True`), as in WGAN-GP.

Times are CPU time of one thread, so that other programs do not count.
"""

import itertools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from .. import harness
from ..contestants.loops import window
from ..harness import INSIDE, STOCK, WRAPPED, measure, one_thread, thread_time
from ..records import Case, Goal, Results, Variant

STEPS = 4
#: (rows, columns, tokens) of a table; (width, rows of a micro-batch) of a critic.
TABLES = {"quick": ((100, 8, 16),), "short": ((50_257, 256, 1024),)}
TABLES["full"] = (*TABLES["short"], (50_257, 768, 4096))
CRITICS = {"quick": ((8, 4),), "short": ((512, 128),), "full": ((512, 128), (1024, 256))}
ROUNDS = {"quick": 3, "short": 21, "full": 51}
OPTIMIZERS = {"SGD": torch.optim.SGD, "SparseAdam": torch.optim.SparseAdam}
#: Goals: at most 1.1 and 1.05 times stock's time.
SPARSE_AT_LEAST, PENALTY_AT_LEAST = 1 / 1.1, 1 / 1.05


def variants(
    ways: Iterable[str],
    make: Callable[[], nn.Module],
    kind: type[torch.optim.Optimizer],
    loss: Callable[[nn.Module, int], Tensor],
    at_least: float,
) -> Iterable[Variant]:
    """Yield the windows of a module's copies. `loss(module, index)` is that of a micro-batch."""
    for way in ways:
        torch.manual_seed(0)
        module = make()
        optimizer = harness.wrap(way, kind(module.parameters(), lr=1e-6), STEPS, module)
        run = window(optimizer, lambda index, module=module: loss(module, index), STEPS)
        yield Variant(way, run, goals=() if way == STOCK else (Goal(STOCK, at_least),))


def sparse(results: Results, effort: str) -> None:
    for (height, columns, count), name in itertools.product(TABLES[effort], OPTIMIZERS):
        generator = torch.Generator().manual_seed(0)
        tokens = [torch.randint(0, height, (count,), generator=generator) for _ in range(STEPS)]
        weights = torch.randn(count, columns, generator=generator)
        ways = variants(
            (STOCK, WRAPPED),
            lambda size=(height, columns): nn.Embedding(*size, sparse=True),
            OPTIMIZERS[name],
            lambda table, index, tokens=tokens, weights=weights: (table(tokens[index]) * weights).mean(),
            SPARSE_AT_LEAST,
        )
        size = f"{height} x {columns}, {count} tokens"
        case = Case("gradients", size, f"sparse, {name}", f"{name}, k={STEPS}", "float32")
        results.add(measure(case, list(ways), ROUNDS[effort], timer=thread_time))


def critic(width: int) -> nn.Module:
    hidden = [layer for _ in range(2) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(width, 1))


def penalised(model: nn.Module, given: Tensor) -> Tensor:
    """Return the critic's score, plus how far the norm of its gradient is from 1."""
    point = given.detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(point).sum(), point, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean() + model(given).mean()


def penalties(results: Results, effort: str) -> None:
    for width, count in CRITICS[effort]:
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(count, width, generator=generator) for _ in range(STEPS)]
        ways = variants(
            (STOCK, WRAPPED, INSIDE),
            lambda width=width: critic(width),
            torch.optim.SGD,
            lambda model, index, inputs=inputs: penalised(model, inputs[index]),
            PENALTY_AT_LEAST,
        )
        size = f"critic of width {width}, {count} rows"
        case = Case("gradients", size, "penalty", f"SGD, k={STEPS}", "float32")
        results.add(measure(case, list(ways), ROUNDS[effort], timer=thread_time))


def figures(results: Results, effort: str) -> None:
    with one_thread():
        sparse(results, effort)
        penalties(results, effort)


if __name__ == "__main__":
    harness.run(figures, harness.arguments(__doc__).parse_args())
