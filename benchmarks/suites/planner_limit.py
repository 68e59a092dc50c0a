"""The micro-batch that the planner chooses, against the largest that really runs under a hard limit.

Each size is tried in a process of its own whose address space is limited to what it holds once torch is
loaded, plus the budget (`fusedacc.planner.find_micro_batch_size`, without its margin). Twice: with memory
mapped and given back block by block, and with the C library's defaults, which keep gaps between freed blocks
below 32 MiB, more of them with every update: those the planner does not foresee.

Goal: with memory mapped, within one sample.

    python -m benchmarks.suites.planner_limit [--quick]
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor, nn

import fusedacc
from fusedacc.commands.measuring.records import Case, Results, cannot_run, first_line, reached, row
from fusedacc.planner import find_micro_batch_size, plan
from fusedacc.planner.training import Batch

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
#: What the C library reads as a process starts.
MAPPED = "memory mapped"
ALLOCATORS = {MAPPED: {"MALLOC_MMAP_THRESHOLD_": str(2**17)}, "defaults": {}}
#: Samples that no budget here holds.
MOST = 4096
#: Updates that the size found has to run for.
UPDATES = {"quick": 3, "short": 6, "full": 100}
OURS, LARGEST = "fusedacc.planner.plan", "largest that runs"


def training(make: Callable[[], zoo.Entry]) -> tuple[zoo.Entry, nn.Module, torch.optim.Optimizer, zoo.Batch]:
    """The model, the wrapper that trains it, and a batch."""
    torch.manual_seed(0)
    entry = make()
    model = entry.model()
    inner = torch.optim.AdamW(model.parameters(), fused=True)
    sample = entry.batch(torch.Generator().manual_seed(0))
    return entry, model, fusedacc.AccumulatingOptimizer(inner, 2), sample


def step(make: Callable[[], zoo.Entry]) -> Callable[[int], None]:
    """What a process tries: an update of two micro-batches."""
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
    """The planner's micro-batch."""
    entry, model, optimizer, sample = training(make)

    def loss(model: nn.Module, batch: zoo.Batch) -> Tensor:
        return entry.loss(model(*batch[0]), batch[1])

    found = plan(
        model, optimizer, sample, global_batch_size=MOST, memory_budget=budget, loss_fn=loss, verify=False
    )
    return found.micro_batch_size


def figures(results: Results, effort: str) -> None:
    for name, (make, budget) in progress((QUICK if effort == "quick" else CELLS).items(), "planner", "model"):
        size = chosen(make, budget)
        for mode, variables in ALLOCATORS.items():
            case = Case("planner limit", name, mode, f"{make().shapes}; {budget}")
            try:
                with mock.patch.dict(os.environ, variables):
                    found = find_micro_batch_size(
                        functools.partial(step, make),
                        start=size,
                        maximum=MOST,
                        memory_budget=budget,
                        margin=0.0,
                        steps=UPDATES[effort],
                        progress=False,
                    )
            except Exception as error:
                results.add([cannot_run(case, OURS, first_line(error))])
                continue
            largest = found.micro_batch_size
            near = reached(1.0 if abs(size - largest) <= 1 else 0.0, 1.0)
            held = {"against": LARGEST, "speedup": size / largest}
            if mode == MAPPED:
                held |= {"goal": 1.0, "reached": near}
            results.add(
                [
                    row(case, LARGEST, metric="micro-batch", unit="samples", median=largest),
                    row(case, OURS, metric="micro-batch", unit="samples", median=size, **held),
                ]
            )


if __name__ == "__main__":
    harness.run(figures, harness.arguments(__doc__).parse_args())
