"""The host's time that the wrapper adds to a micro-batch, with networks so small that nothing else counts.

CPU time of one thread for a window of eight micro-batches of one row and its update (fused SGD): per
micro-batch, and beyond stock's. On a GPU it includes the launches of kernels, and there are no goals.
"""

import itertools
from collections.abc import Callable

import torch
from torch import nn

from fusedacc.commands.timing import Run, synchronize, take_turns

from .. import harness
from ..contestants.loops import window
from ..harness import INSIDE, STOCK, WRAPPED, one_thread, rounds, thread_time
from ..records import Case, Results, at_most, row, spread

STEPS = 8
LAYERS = {"quick": (1,), "short": (1, 3, 8), "full": (1, 3, 8, 24)}
ROUNDS = {"quick": 3, "short": 101, "full": 301}
#: Windows per round.
CALLS = 4
#: Goal in microseconds: for the micro-batch, and for each Linear in it.
AT_MOST, AT_MOST_EACH = 40.0, 1.0


def window_of(way: str, layers: int, device: torch.device) -> Callable[[], None]:
    """Return a window of a policy network with so many Linears."""
    torch.manual_seed(0)
    widths = itertools.pairwise([4, *[64] * (layers - 1), 2])
    model = nn.Sequential(*itertools.chain(*((nn.Linear(a, b), nn.Tanh()) for a, b in widths)))
    model.to(device)
    given = torch.randn(1, 4, device=device)
    wanted = torch.randn(1, 2, device=device)
    optimizer = harness.wrap(way, torch.optim.SGD(model.parameters(), lr=1e-3, fused=True), STEPS, model)
    return window(optimizer, lambda index: nn.functional.mse_loss(model(given), wanted), STEPS)


def figures(results: Results, effort: str) -> None:
    def issue_time(run: Run, calls: int) -> float:
        synchronize(results.device)  # the queue is empty, so that nothing waits for the GPU
        return thread_time(run, calls)

    with one_thread():
        for layers in LAYERS[effort]:
            runs = {way: window_of(way, layers, results.device) for way in (STOCK, WRAPPED, INSIDE)}
            shapes = f"{layers} Linears of up to 64 x 64, 1 row, k={STEPS}"
            case = Case("host", f"policy of {layers} Linears", "micro-batch", shapes, "float32")
            times = take_turns(runs, rounds(ROUNDS[effort], case.case), issue_time, CALLS)
            each = {way: [seconds / STEPS for seconds in times_of_way] for way, times_of_way in times.items()}
            rows = [row(case, way, **spread(times_of_way, 1e6)) for way, times_of_way in each.items()]
            for way in (WRAPPED, INSIDE):
                found = spread([a - b for a, b in zip(each[way], each[STOCK], strict=True)], 1e6)
                goal = {}
                if results.device.type == "cpu":
                    goal = at_most(AT_MOST + AT_MOST_EACH * layers, found["median"], "limit, us")
                rows.append(row(case, way, metric="time beyond stock", **found, **goal))
            results.add(rows)


if __name__ == "__main__":
    harness.run(figures, harness.arguments(__doc__).parse_args())
