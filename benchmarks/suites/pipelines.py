"""A window of a pipeline on two ranks: an attached optimizer with `model=` against plain PyTorch.

A window is two `schedule.step()`s and an update by
AdamW. Plain PyTorch has the loop that is correct: `scale_grads=False`, and a divided loss. Loops take turns.

- allocations: of a weight's size or more in a `schedule.step()`, per weight and micro-batch, on rank 0.
- gradient error: of all gradients of both ranks before the update, relative to float64.
"""

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

import fusedacc
from fusedacc.commands.timing import take_turns

from .. import harness, records
from ..harness import STOCK, progress
from .data_parallel import NAMES, UNTIMED, cpu_seconds, on_ranks

#: Schedules, and the stages of a rank.
KINDS = {"Schedule1F1B": 1, "ScheduleInterleaved1F1B": 2, "ScheduleZBVZeroBubble": 2}
OURS = "fusedacc, attached, model="
STEPS, CHUNKS = 2, 8


def figures(results: records.Results, effort: str) -> None:
    width, rows, rounds = {"quick": (16, 2, 3), "short": (384, 32, 21), "full": (384, 32, 41)}[effort]
    for kind in progress(KINDS, "pipelines", "schedule"):
        for dtype, name in NAMES.items():
            shapes = f"{width} x {4 * width} blocks, {KINDS[kind]} stages on each of 2 ranks, gloo over "
            shapes += f"loopback; {CHUNKS} micro-batches of {rows} rows in each of {STEPS} schedule steps"
            case = records.Case("pipelines", kind, f"window k={STEPS}", shapes, name)
            found = on_ranks(results, case, [OURS], measure_rank, kind, dtype, width, rows, rounds)
            if not found:
                continue
            seconds, allocated, errors = found
            results.add(records.timed_rows(case, seconds, {OURS: [records.Goal(STOCK)]}))
            results.add(records.value_rows(case, "allocations", "of a weight's size", allocated))
            results.add(records.value_rows(case, "gradient error", "", errors))


class Loop:
    """One way to train a pipeline, one window at a time."""

    def __init__(self, way: str, kind: str, dtype: torch.dtype, width: int, rows: int) -> None:
        rank = dist.get_rank()
        self.rows = rows
        self.width = width
        self.attached = way == OURS
        many = KINDS[kind] == 2
        last = 3 - rank if kind == "ScheduleZBVZeroBubble" else rank + 2
        self.count = 2 * KINDS[kind]
        self.mine = (rank, last) if many else (rank,)
        torch.manual_seed(0)
        self.net = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width))
            for _ in range(self.count)
        ).to(dtype)
        self.stages = nn.ModuleList(self.net[i] for i in self.mine)
        device = torch.device("cpu")
        stages = [pipelining.PipelineStage(self.net[i], i, self.count, device) for i in self.mine]
        self.schedule = getattr(pipelining, kind)(
            stages if many else stages[0], CHUNKS, loss_fn=self.loss, scale_grads=self.attached
        )
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.stages.parameters(), lr=1e-4)
        if self.attached:
            self.optimizer = fusedacc.AccumulatingOptimizer(self.optimizer, STEPS, model=self.stages)
            self.optimizer.attach(self.schedule)

    def loss(self, output: Tensor, wanted: Tensor) -> Tensor:
        loss = (output.float() - wanted.float()).pow(2).mean()
        return loss if self.attached else loss / (STEPS * CHUNKS)

    def batch(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        drawn = torch.randn(CHUNKS * self.rows, self.width, generator=generator)
        return drawn.to(self.net[0][0].weight.dtype)

    def window(self, look: Callable[[], None] = lambda: None) -> None:
        for index in range(STEPS):
            self.step(index)
            if index == STEPS - 1:
                look()
            if self.attached or index == STEPS - 1:
                self.optimizer.step()
                self.optimizer.zero_grad()

    def step(self, index: int) -> None:
        x = self.batch(index)
        target = x if self.count - 1 in self.mine else None
        self.schedule.step(*([x] if 0 in self.mine else []), target=target, return_outputs=False)

    def error(self) -> float:
        """Return the relative error of the gradients of a window on both ranks, before its update."""
        exact = copy.deepcopy(self.net).double()
        params = list(exact.parameters())
        for index in range(STEPS):
            x = output = self.batch(index).double()
            for part in exact:
                output = part(output)
            ((output - x).pow(2).mean() / STEPS).backward()
        wanted = {copied: p.grad for copied, p in zip(self.net.parameters(), params, strict=True)}
        squares = torch.zeros(2, dtype=torch.float64)

        def look() -> None:
            for p in self.stages.parameters():
                squares[0] += (p.grad.double() - wanted[p]).pow(2).sum()
                squares[1] += wanted[p].pow(2).sum()

        self.window(look)
        dist.all_reduce(squares)
        return float((squares[0] / squares[1]).sqrt())

    def allocations(self) -> float:
        """Count large allocations per weight and micro-batch, in the second `step()` of a window."""
        self.step(0)
        if self.attached:
            self.optimizer.step()
        cpu = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(profile_memory=True, activities=cpu) as seen:
            self.step(1)
        events = seen.profiler.kineto_results.events()
        sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
        least = self.net[0][0].weight.nbytes
        return sum(size >= least for size in sizes) / (2 * len(self.mine) * CHUNKS)


def measure_rank(
    kind: str, dtype: str, width: int, rows: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, float], dict[str, float]]:
    """Return the CPU seconds of each round's window, allocations, and the gradients' error, by way."""
    loops = {way: Loop(way, kind, getattr(torch, dtype), width, rows) for way in (STOCK, OURS)}
    errors = {way: loop.error() for way, loop in loops.items()}
    runs = {way: loop.window for way, loop in loops.items()}
    seconds = take_turns(runs, range(-UNTIMED, rounds), cpu_seconds)
    return seconds, {way: loop.allocations() for way, loop in loops.items()}, errors


if __name__ == "__main__":
    harness.run(figures, harness.arguments(__doc__).parse_args())
