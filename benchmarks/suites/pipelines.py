"""A window of a pipeline on two ranks: an attached optimizer with `model=` against plain PyTorch.

Two processes of one thread each, gloo over loopback. A window is two `schedule.step()`s and an update by
AdamW. Plain PyTorch has the loop that is right: `scale_grads=False`, and the loss divided. Loops take turns.

- CPU time: of both processes for a window.
- allocations: of a weight's size or more in a `schedule.step()`, by weight and micro-batch, on the first
  rank.
- gradient error: of all gradients of both ranks before the update, relative to float64.

    python -m benchmarks.suites.pipelines [--quick | --full]
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

import fusedacc
from fusedacc.commands.measuring import records
from fusedacc.commands.measuring.timing import Run, take_turns

from .. import harness
from ..harness import progress
from . import data_parallel

#: Schedules, with the stages that a rank has.
KINDS = {"Schedule1F1B": 1, "ScheduleInterleaved1F1B": 2, "ScheduleZBVZeroBubble": 2}
STOCK, OURS = "stock", "fusedacc, attached, model="
STEPS, CHUNKS = 2, 8
NAMES = {"float32": "float32", "bfloat16": "bfloat16 into float32"}


def figures(results: records.Results, effort: str) -> None:
    """All rows, of each schedule and dtype."""
    width, rows, rounds = {"quick": (16, 2, 3), "short": (384, 32, 21), "full": (384, 32, 41)}[effort]
    for kind in progress(KINDS, "pipelines", "schedule"):
        for dtype, name in NAMES.items():
            shapes = (
                f"{width} x {4 * width} blocks, {KINDS[kind]} stages on each of 2 ranks, gloo over loopback; "
            )
            shapes += f"{CHUNKS} micro-batches of {rows} rows in each of {STEPS} schedule steps"
            case = records.Case("pipelines", kind, f"window k={STEPS}", shapes, name)
            if results.device.type != "cpu":
                why = "two ranks need two GPUs, or --device cpu"
                results.add([records.cannot_run(case, OURS, why)])
                continue
            try:
                found = data_parallel.on_all_ranks(measure_rank, kind, dtype, width, rows, rounds)
            except Exception as error:
                results.add([records.cannot_run(case, OURS, records.first_line(error))])
                continue
            seconds, allocated, errors = found
            ways = [records.Variant(STOCK), records.Variant(OURS, goals=(records.Goal(STOCK),))]
            results.add(records.rows_of(case, ways, seconds))
            for way in (STOCK, OURS):
                counts = {"metric": "allocations", "unit": "of a weight's size"}
                results.add([records.row(case, way, median=allocated[way], **counts)])
                results.add([records.row(case, way, metric="gradient error", unit="", median=errors[way])])


class Loop:
    """One way to train a pipeline; `window()` is a window of it."""

    def __init__(self, way: str, kind: str, dtype: torch.dtype, width: int, rows: int) -> None:
        rank, self.rows, self.width, self.attached = dist.get_rank(), rows, width, way == OURS
        many = KINDS[kind] == 2
        v_shaped = kind == "ScheduleZBVZeroBubble"
        self.count = 2 * KINDS[kind]
        self.mine = (rank,) if not many else (rank, 3 - rank) if v_shaped else (rank, rank + 2)
        torch.manual_seed(0)
        self.net = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width))
            for _ in range(self.count)
        ).to(dtype)
        self.own = nn.ModuleList(self.net[i] for i in self.mine)
        device = torch.device("cpu")
        stages = [pipelining.PipelineStage(self.net[i], i, self.count, device) for i in self.mine]
        self.schedule = getattr(pipelining, kind)(
            stages if many else stages[0], CHUNKS, loss_fn=self.loss, scale_grads=self.attached
        )
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.own.parameters(), lr=1e-4)
        if self.attached:
            self.optimizer = fusedacc.AccumulatingOptimizer(self.optimizer, STEPS, model=self.own)
            self.optimizer.attach(self.schedule)

    def loss(self, output: Tensor, wanted: Tensor) -> Tensor:
        loss = (output.float() - wanted.float()).pow(2).mean()
        return loss if self.attached else loss / (STEPS * CHUNKS)

    def batch(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(CHUNKS * self.rows, self.width, generator=generator).to(
            self.net[0][0].weight.dtype
        )

    def window(self, look: Callable[[], None] = lambda: None) -> None:
        for index in range(STEPS):
            self.step(index)
            if index == STEPS - 1:
                look()
            if self.attached or index == STEPS - 1:
                self.optimizer.step()
                self.optimizer.zero_grad()

    def step(self, index: int) -> None:
        """One `step()` of the schedule."""
        x = self.batch(index)
        target = x if self.count - 1 in self.mine else None
        self.schedule.step(*([x] if 0 in self.mine else []), target=target, return_outputs=False)

    def error(self) -> float:
        """Of the gradients of a window, before its update, over both ranks."""
        exact, parts = copy.deepcopy(self.net).double(), []
        params = list(exact.parameters())
        sums = [torch.zeros_like(p) for p in params]
        for index in range(STEPS):
            x = output = self.batch(index).double()
            for part in exact:
                output = part(output)
            for total, gradient in zip(
                sums, torch.autograd.grad((output - x).pow(2).mean(), params), strict=True
            ):
                total += gradient / STEPS
        wanted = dict(zip(self.net.parameters(), sums, strict=True))

        def look() -> None:
            parts.extend((p.grad.double() - wanted[p]).pow(2).sum() for p in self.own.parameters())

        self.window(look)
        squares = torch.stack(
            [torch.stack(parts).sum(), sum(wanted[p].pow(2).sum() for p in self.own.parameters())]
        )
        dist.all_reduce(squares)
        return float((squares[0] / squares[1]).sqrt())

    def allocations(self) -> float:
        """Of a weight's size or more, in a weight and micro-batch of the second `step()` of a window."""
        self.step(0)
        if self.attached:
            self.optimizer.step()
        cpu = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(profile_memory=True, activities=cpu) as seen:
            self.step(1)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "trace.json")
            seen.export_chrome_trace(path)
            with open(path) as file:
                events = json.load(file)["traceEvents"]
        least = self.net[0][0].weight.nbytes
        sizes = [event["args"]["Bytes"] for event in events if event.get("name") == "[memory]"]
        return sum(size >= least for size in sizes) / (2 * len(self.mine) * CHUNKS)


def measure_rank(
    kind: str, dtype: str, width: int, rows: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, float], dict[str, float]]:
    """By way: CPU seconds of each round's window, allocations, and the gradients' error."""
    loops = {way: Loop(way, kind, getattr(torch, dtype), width, rows) for way in (STOCK, OURS)}
    errors = {way: loop.error() for way, loop in loops.items()}

    def of_both(run: Run, calls: int) -> float:
        dist.barrier()
        start = time.process_time()
        run()
        spent = torch.tensor(time.process_time() - start, dtype=torch.float64)
        dist.all_reduce(spent)
        return spent.item()

    seconds = take_turns({way: loop.window for way, loop in loops.items()}, range(-2, rounds), of_both)
    return seconds, {way: loop.allocations() for way, loop in loops.items()}, errors


def main() -> None:
    harness.run(figures, harness.arguments(__doc__).parse_args())


if __name__ == "__main__":
    main()
