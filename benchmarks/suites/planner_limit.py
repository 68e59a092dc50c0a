"""The micro-batch that the planner chooses, against the largest that runs on a GPU under the same limit.

`fusedacc.planner.find_micro_batch_size` tries sizes without its margin. Goal: the planner's micro-batch runs.
On a CPU no size can be tried, and each row says so.
"""

import functools
from collections.abc import Callable

import torch
from torch import nn

import fusedacc
from fusedacc.planner import find_micro_batch_size, plan
from fusedacc.planner.prediction import Batch

from .. import harness
from ..contestants import zoo
from ..harness import progress
from ..records import Case, Results, at_most, row

#: A model, and the budget.
CELLS = {
    "gpt": (functools.partial(zoo.gpt, "gpt", 5000, 256, 2, 256), "3200MiB"),
    "vit": (functools.partial(zoo.vit, 384, 16, 192, 2), "2400MiB"),
    "lstm": (functools.partial(zoo.lstm, 256, 512), "1280MiB"),
    "conv": (functools.partial(zoo.conv, 32, 96), "2400MiB"),
    "unet": (functools.partial(zoo.unet, 32, 96), "2400MiB"),
    "t5": (functools.partial(zoo.t5, 4096, 192, 192, 192), "2400MiB"),
}
QUICK = {"mlp": (functools.partial(zoo.mlp, "mlp", 256, 8), "60MiB")}
#: More samples than any of these budgets holds.
MOST = 4096
#: Updates for which the size that was found must run.
UPDATES = {"quick": 3, "short": 6, "full": 100}
#: Micro-batches per update.
STEPS = 2
PLANNED, LARGEST = "fusedacc.planner.plan", "largest that runs"


class Training:
    """A model on a device, the wrapper that trains it, and a batch."""

    def __init__(self, make: Callable[[], zoo.Entry], device: torch.device) -> None:
        torch.manual_seed(0)
        self.entry = make()
        self.model = self.entry.model().to(device)
        inner = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.optimizer = fusedacc.AccumulatingOptimizer(inner, STEPS)
        inputs, targets = self.entry.batch(torch.Generator().manual_seed(0))
        self.sample = tuple(x.to(device) for x in inputs), targets.to(device)

    def loss(self, model: nn.Module, batch: zoo.Batch) -> torch.Tensor:
        inputs, targets = batch
        return self.entry.loss(model(*inputs), targets)


def planned_size(make: Callable[[], zoo.Entry], budget: str, device: torch.device) -> int:
    training = Training(make, device)
    found = plan(
        training.model,
        training.optimizer,
        training.sample,
        global_batch_size=MOST,
        memory_budget=budget,
        loss_fn=training.loss,
        verify=False,
    )
    return found.micro_batch_size


def largest_size(
    make: Callable[[], zoo.Entry], budget: str, device: torch.device, start: int, updates: int
) -> int:
    def step() -> Callable[[int], None]:
        training = Training(make, device)
        batch = Batch(training.sample)
        optimizer = training.optimizer

        def run(size: int) -> None:
            optimizer.discard()  # the update before may have run out of memory
            for _ in range(STEPS):
                training.loss(training.model, batch.drawn(size)).backward()
                optimizer.step()
                optimizer.zero_grad()

        return run

    found = find_micro_batch_size(
        step,
        start=start,
        maximum=MOST,
        memory_budget=budget,
        device=device,
        steps=updates,
        margin=0.0,
        progress=False,
    )
    return found.micro_batch_size


def figures(results: Results, effort: str) -> None:
    cells = QUICK if effort == "quick" else CELLS
    for name, (make, budget) in progress(cells.items(), "planner", "model"):
        case = Case("planner limit", name, f"k={STEPS}", f"{make().shapes}; {budget}")
        size = planned_size(make, budget, results.device)
        largest = results.attempt(
            case, [PLANNED], largest_size, make, budget, results.device, size, UPDATES[effort]
        )
        if largest is None:
            continue
        figure = {"metric": "micro-batch", "unit": "samples"}
        results.add([row(case, LARGEST, **figure, median=largest)])
        results.add([row(case, PLANNED, **figure, median=size, **at_most(largest, size, LARGEST))])


if __name__ == "__main__":
    harness.run(figures, harness.arguments(__doc__).parse_args())
