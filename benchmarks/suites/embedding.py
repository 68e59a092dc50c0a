"""An embedding's weight gradient: the rows that were looked up, against stock's whole table.

    python -m benchmarks.suites.embedding [--quick | --full] [--device cuda]

Stock makes a dense gradient of the table's size and adds it to the sum. `index_add_` is the best that plain
torch has where the gradient need not exist by itself; on a GPU it adds in any order, by atomics. Tokens are
distributed as in text (the k-th most frequent has a share of about 1/k). Bytes are counted by a TrafficMeter;
those of a call vary with its tokens, and the first set's are given. Several sets of tokens and gradients take
turns, so that no call finds its own in a near cache.

Mode "accumulate" calls our operator. Modes "clip and update" and "window k=2" train an `nn.Embedding` with
torch's fused optimizers: the first is what stands between the last backward and the end of the update, the
second all of a window. The optimizers move the whole table in every update, whatever few rows have a
gradient, in stock and in ours alike: what can differ is the gradient's part. The ways that are "not clipped"
show by difference what norm and clipping cost.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fusedacc.commands.bench.layers import text_like
from fusedacc.commands.measuring.records import Case, Goal, Results, Variant, cannot_run, first_line
from fusedacc.commands.measuring.timing import timer_for
from fusedacc.kernels import rows

from .. import harness
from ..contestants.loops import InsideBackward, Loop, Task, share_moments
from ..harness import counted, measure
from .update import LIMIT, timed

#: (rows, columns) of the table, and the numbers of tokens.
SIZES = {
    "quick": [((1000, 64), (128,))],
    "short": [((50_257, 768), (1024,))],
    "full": [((50_257, 768), (64, 256, 1024, 4096, 16_384)), ((128_256, 4096), (1024, 8192))],
}
ROUNDS = {"quick": 3, "short": 15, "full": 25}
SETS = 4
DTYPES = ((torch.float32, torch.float32), (torch.bfloat16, torch.float32))
#: The goal for a micro-batch of 1,024 tokens on a CPU.
GOAL_TOKENS, AT_LEAST = 1024, 50.0
#: Micro-batches of a window, which share its tokens; rounds of windows.
STEPS = 2
WINDOWS = {"quick": 2, "short": 5, "full": 15}
OPTIMIZERS = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}
#: The goals on a CPU, at least what passes over the table give: stock's clipping makes 3, ours reads once;
#: AdamW makes 7 and SGD 3 (in ours one more where it clips); stock's two gradients and their sum are 5, and
#: ours zeroes once.
UPDATE_GOALS = {"AdamW": 1.15, "SGD": 1.3}
WINDOW_GOALS = {"AdamW": 1.5, "SGD": 2.0}


# Operators


@dataclasses.dataclass
class Lookups:
    """A sum, and sets of tokens and gradients that take turns."""

    sums: Tensor
    tokens: list[Tensor]
    gradients: list[Tensor]

    def __post_init__(self) -> None:
        self.turn_back()

    def turn_back(self) -> None:
        """The first set is next."""
        self._turns = itertools.cycle(zip(self.tokens, self.gradients, strict=True))

    def next(self) -> tuple[Tensor, Tensor]:
        return next(self._turns)


def work(size: tuple[int, int], count: int, dtypes: tuple[torch.dtype, torch.dtype], device) -> Lookups:
    height, columns = size
    return Lookups(
        torch.zeros(size, dtype=dtypes[1], device=device),
        [text_like(count, height, device) for _ in range(SETS)],
        [torch.randn(count, columns, device=device).to(dtypes[0]) for _ in range(SETS)],
    )


def variant(name: str, run: Callable[[], object], goals: tuple[Goal, ...] = ()) -> Variant:
    meter = counted(run)
    return Variant(name, run, meter.total_bytes, goals, meter.calls)


def accumulations(own: Lookups, size: tuple[int, int], count: int) -> list[Variant]:
    height, _ = size

    def stock() -> None:
        tokens, gradients = own.next()
        dense = torch.ops.aten.embedding_dense_backward(gradients, tokens, height, -1, False)
        own.sums.add_(dense)

    def index_add() -> None:
        tokens, gradients = own.next()
        own.sums.index_add_(0, tokens, gradients.to(own.sums.dtype))

    def ours() -> None:
        rows.accumulate_rows_(own.sums, *own.next())

    wanted = AT_LEAST if own.sums.device.type == "cpu" and count == GOAL_TOKENS and height > 50_000 else 0.0
    return [
        variant("stock", stock),
        variant("index_add_", index_add),
        variant("fusedacc", ours, (Goal("stock", wanted), Goal("index_add_"))),
    ]


# Windows


class Table(Task):
    """An `nn.Embedding` whose weight and Adam's moments all loops share."""

    def __init__(
        self, kind: type[torch.optim.Optimizer], weight: Tensor, moments: tuple[Tensor, Tensor], clip: bool
    ) -> None:
        self.kind, self.weight, self.moments = kind, weight, moments
        self.steps, self.device, self.max_grad_norm = STEPS, weight.device, LIMIT if clip else None

    def model(self) -> nn.Module:
        return nn.Embedding.from_pretrained(self.weight, freeze=False)

    def optimizer(self, parameters: list[nn.Parameter], fused: bool | None) -> torch.optim.Optimizer:
        optimizer = self.kind(parameters, lr=1e-6, fused=fused)
        if self.kind is torch.optim.AdamW:
            share_moments(optimizer, [self.moments])
        return optimizer

    def loss(self, model: nn.Module, *micro_batch: Tensor) -> Tensor:
        tokens, gradient = micro_batch
        return _Handed.apply(model(tokens), gradient)


class _Handed(torch.autograd.Function):
    """A scalar whose backward hands the output its gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None]:
        as_it_is = scale.device.type == "cpu" and scale.item() == 1  # on a GPU the host must not wait
        return ctx.gradient if as_it_is else ctx.gradient * scale, None


class Training:
    """A loop's window: `run()` is what is timed, after `ready()`; `whole`: with its micro-batches."""

    def __init__(self, loop: Loop, batches: list[tuple[Tensor, Tensor]], whole: bool) -> None:
        self.loop, self.batches, self.whole = loop, batches, whole
        self.parameters = loop.parameters

    def ready(self) -> None:
        if not self.whole:
            self.loop.accumulate_all(self.batches)

    def run(self) -> None:
        if self.whole:
            self.loop.accumulate_all(self.batches)
        self.loop.step()

    def close(self) -> None:
        """`run` has cleared the gradients."""


def window_ways(name: str, own: Lookups, moments: tuple[Tensor, Tensor], whole: bool) -> list[Variant]:
    """Both ways, and without clipping where only the update is timed."""
    batches = list(zip(own.tokens[0].chunk(STEPS), own.gradients[0].chunk(STEPS), strict=True))
    goals = WINDOW_GOALS if whole else UPDATE_GOALS
    large = own.sums.device.type == "cpu" and own.sums.shape[0] > 50_000
    variants = []
    for clip in (True,) if whole else (True, False):
        suffix = "" if clip else ", not clipped"
        for label, kind in (("stock", Loop), ("fusedacc, model=", InsideBackward)):
            way = Training(kind(Table(OPTIMIZERS[name], own.sums, moments, clip)), batches, whole)
            for _ in range(2):  # the first one makes sums and state
                way.ready()
                meter = counted(way.run, way.parameters)
            against = ()
            if kind is InsideBackward:
                against = (Goal(f"stock{suffix}", goals[name] if large and clip else 0.0),)
            variants.append(Variant(label + suffix, way.run, meter.total_bytes, against, meter.calls))
    return variants


def trainings(results: Results, effort: str) -> None:
    size, counts = SIZES[effort][0]
    count = GOAL_TOKENS if GOAL_TOKENS in counts else counts[0]
    own = work(size, count, (torch.float32, torch.float32), results.device)
    moments = torch.zeros_like(own.sums), torch.zeros_like(own.sums)
    table = f"{size[0]} x {size[1]}, {count} tokens"
    for name, whole in itertools.product(OPTIMIZERS, (False, True)):
        mode = f"window k={STEPS}" if whole else "clip and update"
        case = Case("embedding", table, mode, f"{name}(fused=True), {STEPS} micro-batches", "float32")
        results.add(measure(case, window_ways(name, own, moments, whole), WINDOWS[effort], timer=timed))


def figures(results: Results, effort: str) -> None:
    operators(results, effort)
    try:
        trainings(results, effort)
    except RuntimeError as error:  # out of memory, say
        results.add([cannot_run(Case("embedding", "training"), "all", first_line(error))])


def operators(results: Results, effort: str) -> None:
    timer = timer_for(results.device)
    for size, counts in SIZES[effort]:
        for count, dtypes in itertools.product(counts, DTYPES):
            names = " into ".join(str(dtype)[6:] for dtype in dtypes)
            table = f"{size[0]} x {size[1]}"
            case = Case("embedding", f"{table}, {count} tokens", "accumulate", f"{SETS} sets in turns", names)
            try:
                own = work(size, count, dtypes, results.device)
                results.add(measure(case, accumulations(own, size, count), ROUNDS[effort], SETS, timer))
            except RuntimeError as error:  # out of memory, say
                results.add([cannot_run(case, "all", first_line(error))])


if __name__ == "__main__":
    harness.run(figures, harness.arguments(__doc__).parse_args())
