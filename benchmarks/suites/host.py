"""The host's time that the wrapper adds to a micro-batch: networks so small that nothing else counts.

Of each size the CPU time of one thread for a window of eight micro-batches of one row, with its update (SGD,
fused): per micro-batch, and beyond stock's.

    python -m benchmarks.suites.host [--quick | --full]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import nn

import fusedacc
from fusedacc.commands.measuring.records import Case, Results, at_most, row, spread
from fusedacc.commands.measuring.timing import take_turns

from .. import harness
from ..contestants.loops import window
from ..harness import one_thread, rounds
from .gradients import thread_time

STEPS = 8
STOCK, WRAPPED, INSIDE = "stock", "fusedacc", "fusedacc, model="
LAYERS = {"quick": (1,), "short": (1, 3, 8), "full": (1, 3, 8, 24)}
ROUNDS = {"quick": 3, "short": 101, "full": 301}
#: Windows in a round.
CALLS = 4
#: The goal, in microseconds: for the micro-batch, and for each Linear in it.
AT_MOST, AT_MOST_EACH = 40.0, 1.0


def policy(layers: int) -> nn.Module:
    """A policy network of so many Linears."""
    torch.manual_seed(0)
    widths = [4, *[64] * (layers - 1), 2]
    parts = [(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*itertools.chain(*parts))


def window_of(way: str, layers: int) -> Callable[[], None]:
    model = policy(layers)
    given, wanted = torch.randn(1, 4), torch.randn(1, 2)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    if way != STOCK:
        optimizer = fusedacc.AccumulatingOptimizer(optimizer, STEPS, model=model if way == INSIDE else None)
    return window(optimizer, lambda index: nn.functional.mse_loss(model(given), wanted), STEPS)


def figures(results: Results, effort: str) -> None:
    """On the CPU."""
    with one_thread():
        for layers in LAYERS[effort]:
            runs = {way: window_of(way, layers) for way in (STOCK, WRAPPED, INSIDE)}
            shapes = f"{layers} Linears of up to 64 x 64, 1 row, k={STEPS}"
            case = Case("host", f"policy of {layers} Linears", "micro-batch", shapes, "float32")
            times = take_turns(runs, rounds(ROUNDS[effort], case.case), thread_time, CALLS)
            each = {way: [seconds / STEPS for seconds in own] for way, own in times.items()}
            rows = [row(case, way, **spread(own, 1e6)) for way, own in each.items()]
            for way in (WRAPPED, INSIDE):
                added = [own - base for own, base in zip(each[way], each[STOCK], strict=True)]
                found = spread(added, 1e6)
                held = at_most(AT_MOST + AT_MOST_EACH * layers, found["median"], "limit, us")
                rows.append(row(case, way, metric="time beyond stock", **found, **held))
            results.add(rows)


if __name__ == "__main__":
    harness.run(figures, harness.arguments(__doc__).parse_args())
