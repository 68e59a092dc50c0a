"""The micro-batch that the planner chooses, against the largest that really runs under a hard limit.

Each size is tried in a new process whose address space is limited to what it holds after torch is loaded plus
the budget (`fusedacc.planner.find_micro_batch_size`, without its margin). This is done twice: with memory
mapped and returned block by block (goal: within one sample), and with the C library's defaults. These keep
gaps between freed blocks below 32 MiB, more with every update, which the planner does not foresee.
"""

import functools
import os
from collections.abc import Callable
from unittest import mock

import torch
from torch import nn

import fusedacc
from fusedacc.commands.measuring.records import Case, Results, reached, row
from fusedacc.planner import find_micro_batch_size, plan
from fusedacc.planner.prediction import Batch

from .. import harness
from ..harness import progress
from ..machines import zoo

#: A model, and the budget.
CELLS = {
    "gpt": (functools.partial(zoo.gpt, "gpt", 5000, 256, 2, 256), "400MiB"),
    "vit": (functools.partial(zoo.vit, 384, 16, 192, 2), "300MiB"),
    "lstm": (functools.partial(zoo.lstm, 256, 512), "160MiB"),
    "conv": (functools.partial(zoo.conv, 32, 96), "300MiB"),
    "unet": (functools.partial(zoo.unet, 32, 96), "300MiB"),
    "t5": (functools.partial(zoo.t5, 4096, 192, 192, 192), "300MiB"),
}
QUICK = {"mlp": (functools.partial(zoo.mlp, "mlp", 256, 8), "60MiB")}
#: Variables of the C library.
MAPPED = "memory mapped"
ALLOCATORS = {MAPPED: {"MALLOC_MMAP_THRESHOLD_": str(2**17)}, "defaults": {}}
#: More samples than any of these budgets holds.
MOST = 4096
#: Updates for which the size that was found must run.
UPDATES = {"quick": 3, "short": 6, "full": 100}
OURS, LARGEST = "fusedacc.planner.plan", "largest that runs"


def training(make: Callable[[], zoo.Entry]) -> tuple[zoo.Entry, nn.Module, torch.optim.Optimizer, zoo.Batch]:
    """Return the model, the wrapper that trains it, and a batch."""
    torch.manual_seed(0)
    entry = make()
    model = entry.model()
    inner = torch.optim.AdamW(model.parameters(), fused=True)
    sample = entry.batch(torch.Generator().manual_seed(0))
    return entry, model, fusedacc.AccumulatingOptimizer(inner, 2), sample


def step(make: Callable[[], zoo.Entry]) -> Callable[[int], None]:
    """Return what a process tries: an update of two micro-batches."""
    entry, model, optimizer, sample = training(make)
    batch = Batch(sample)

    def run(size: int) -> None:
        for _ in range(2):
            inputs, targets = batch.drawn(size)
            entry.loss(model(*inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def chosen(make: Callable[[], zoo.Entry], budget: str) -> int:
    entry, model, optimizer, sample = training(make)
    how = {"loss_fn": lambda model, batch: entry.loss(model(*batch[0]), batch[1]), "verify": False}
    found = plan(model, optimizer, sample, global_batch_size=MOST, memory_budget=budget, **how)
    return found.micro_batch_size


def largest(make: Callable[[], zoo.Entry], budget: str, start: int, updates: int) -> int:
    how = {"memory_budget": budget, "margin": 0.0, "steps": updates, "progress": False}
    found = find_micro_batch_size(functools.partial(step, make), start=start, maximum=MOST, **how)
    return found.micro_batch_size


def figures(results: Results, effort: str) -> None:
    for name, (make, budget) in progress((QUICK if effort == "quick" else CELLS).items(), "planner", "model"):
        size = chosen(make, budget)
        for mode, variables in ALLOCATORS.items():
            case = Case("planner limit", name, mode, f"{make().shapes}; {budget}")
            with mock.patch.dict(os.environ, variables):
                most = results.attempt(case, [OURS], largest, make, budget, size, UPDATES[effort])
            if most is None:
                continue
            held = {"against": LARGEST, "speedup": size / most}
            if mode == MAPPED:
                held |= {"goal": 1.0, "reached": reached(float(abs(size - most) <= 1), 1.0)}
            figure = {"metric": "micro-batch", "unit": "samples"}
            results.add([row(case, LARGEST, **figure, median=most)])
            results.add([row(case, OURS, **figure, median=size, **held)])


if __name__ == "__main__":
    harness.run(figures, harness.arguments(__doc__).parse_args())
