"""An embedding's weight gradient: only the rows that were looked up, against stock's whole table.

Stock makes a dense gradient as large as the table and adds it to the sum. `index_add_` is the best that plain
PyTorch has if the gradient itself is not needed. Several sets take turns, so that no call finds its data in a
near cache. Mode "accumulate" calls our operator. Modes "clip and update" and "window k=2" train an
`nn.Embedding` with torch's fused optimizers: the first is the time from the last backward to the end of the
update. The optimizers move the whole table in every loop, so only the gradient's part can differ.
"""

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fusedacc.commands.bench.cases import Pair
from fusedacc.commands.timing import Run, rotated, timer_for
from fusedacc.kernels.lists import accumulate_rows_

from .. import harness
from ..contestants.loops import Handed, InsideBackward, Loop, Task, share_moments
from ..contestants.tokens import text_like
from ..harness import BF16, F32, INSIDE, STOCK, measure
from ..records import Case, Goal, Results, Row, Variant, counted_variant
from .update import LIMIT, timed

#: (rows, columns) of the table, and the numbers of tokens.
SIZES = {
    "quick": [((1000, 64), (128,))],
    "short": [((50_257, 768), (1024,))],
    "full": [((50_257, 768), (64, 256, 1024, 4096, 16_384)), ((128_256, 4096), (1024, 8192))],
}
ROUNDS = {"quick": 3, "short": 15, "full": 25}
SETS = 4
DTYPES = ((F32, F32), (BF16, F32))
#: The goal for a micro-batch of 1,024 tokens on a CPU.
GOAL_TOKENS, AT_LEAST = 1024, 50.0
#: Micro-batches of a window, which share its tokens; rounds of windows.
STEPS = 2
WINDOWS = {"quick": 2, "short": 5, "full": 15}
OPTIMIZERS = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}
#: Goals on a CPU, from the passes over the table. Stock's clipping makes 3, ours reads once. AdamW makes 7
#: and SGD 3, and with our clipping one more. Stock's two gradients and their sum are 5, and ours zeroes once.
UPDATE_GOALS = {"AdamW": 1.15, "SGD": 1.3}
WINDOW_GOALS = {"AdamW": 1.5, "SGD": 2.0}


class Lookups:
    """A table of sums of this size, and sets of `count` tokens with their gradients."""

    def __init__(self, size: tuple[int, int], count: int, dtypes: Pair, device: torch.device) -> None:
        height, columns = size
        self.sums = torch.zeros(size, dtype=dtypes[1], device=device)
        self.tokens = [text_like(count, height, device) for _ in range(SETS)]
        self.gradients = [torch.randn(count, columns, device=device).to(dtypes[0]) for _ in range(SETS)]

    def each(self, add: Callable[[Tensor, Tensor], object]) -> Run:
        """Return a function that calls `add(tokens, gradients)` with the next set each time."""
        sets = zip(self.tokens, self.gradients, strict=True)
        return rotated([functools.partial(add, *both) for both in sets])


def accumulations(lookups: Lookups, size: tuple[int, int], count: int) -> list[Variant]:
    height, _ = size
    sums = lookups.sums
    dense = torch.ops.aten.embedding_dense_backward
    large = sums.device.type == "cpu" and count == GOAL_TOKENS and height > 50_000
    goals = (Goal(STOCK, AT_LEAST if large else 0.0), Goal("index_add_"))
    stock = lookups.each(lambda tokens, g: sums.add_(dense(g, tokens, height, -1, False)))
    index_add = lookups.each(lambda tokens, g: sums.index_add_(0, tokens, g.to(sums.dtype)))
    ours = counted_variant(
        "fusedacc", lookups.each(lambda tokens, g: accumulate_rows_(sums, tokens, g)), goals
    )
    return [counted_variant(STOCK, stock), counted_variant("index_add_", index_add), ours]


def operators(results: Results, effort: str) -> None:
    for size, counts in SIZES[effort]:
        for count, dtypes in itertools.product(counts, DTYPES):
            names = " into ".join(str(dtype)[6:] for dtype in dtypes)
            name = f"{size[0]} x {size[1]}, {count} tokens"
            case = Case("embedding", name, "accumulate", f"{SETS} sets in turns", names)

            def timed_rows(case=case, size=size, count=count, dtypes=dtypes) -> list[Row]:
                ways = accumulations(Lookups(size, count, dtypes, results.device), size, count)
                return measure(case, ways, ROUNDS[effort], SETS, timer_for(results.device))

            results.add(results.attempt(case, ["all"], timed_rows) or [])


class Table(Task):
    def __init__(self, kind: Callable, weight: Tensor, moments: tuple[Tensor, Tensor], clip: bool) -> None:
        self.kind = kind
        self.weight = weight
        self.moments = moments
        self.steps = STEPS
        self.device = weight.device
        self.max_grad_norm = LIMIT if clip else None

    def model(self) -> nn.Module:
        return nn.Embedding.from_pretrained(self.weight, freeze=False)

    def optimizer(self, parameters: list[nn.Parameter], fused: bool | None) -> torch.optim.Optimizer:
        optimizer = self.kind(parameters, lr=1e-6, fused=fused)
        if self.kind is torch.optim.AdamW:
            share_moments(optimizer, [self.moments])
        return optimizer

    def loss(self, model: nn.Module, *micro_batch: Tensor) -> Tensor:
        tokens, gradient = micro_batch

        def make(scale: Tensor) -> list[Tensor]:
            # On a GPU the host must not wait for the number.
            unscaled = scale.device.type == "cpu" and scale.item() == 1
            return [gradient if unscaled else gradient * scale]

        return Handed.apply(make, model(tokens))


class Training:
    """A loop's window: `run()` is timed after `ready()`. `whole`: `run()` includes the micro-batches."""

    def __init__(self, loop: Loop, batches: list[tuple[Tensor, Tensor]], whole: bool) -> None:
        self.loop = loop
        self.batches = batches
        self.whole = whole
        self.parameters = loop.parameters

    def ready(self) -> None:
        if not self.whole:
            self.loop.accumulate_all(self.batches)

    def run(self) -> None:
        if self.whole:
            self.loop.accumulate_all(self.batches)
        self.loop.step()

    def close(self) -> None:
        """Do nothing: `run` has cleared the gradients."""


def window_ways(name: str, lookups: Lookups, moments: tuple[Tensor, Tensor], whole: bool) -> list[Variant]:
    """Return both ways; if only the update is timed, also without clipping."""
    batches = list(zip(lookups.tokens[0].chunk(STEPS), lookups.gradients[0].chunk(STEPS), strict=True))
    goals = WINDOW_GOALS if whole else UPDATE_GOALS
    large = lookups.sums.device.type == "cpu" and lookups.sums.shape[0] > 50_000
    variants = []
    for clip in (True,) if whole else (True, False):
        suffix = "" if clip else ", not clipped"
        for label, kind in ((STOCK, Loop), (INSIDE, InsideBackward)):
            way = Training(kind(Table(OPTIMIZERS[name], lookups.sums, moments, clip)), batches, whole)
            goal = Goal(STOCK + suffix, goals[name] if large and clip else 0.0)
            against = (goal,) if label == INSIDE else ()
            for _ in range(2):  # the first makes sums and state
                way.ready()
                made = counted_variant(label + suffix, way.run, against, way.parameters)
            variants.append(made)
    return variants


def trainings(results: Results, effort: str) -> None:
    size, counts = SIZES[effort][0]
    count = GOAL_TOKENS if GOAL_TOKENS in counts else counts[0]
    lookups = Lookups(size, count, (F32, F32), results.device)
    moments = torch.zeros_like(lookups.sums), torch.zeros_like(lookups.sums)
    table = f"{size[0]} x {size[1]}, {count} tokens"
    for name, whole in itertools.product(OPTIMIZERS, (False, True)):
        mode = f"window k={STEPS}" if whole else "clip and update"
        case = Case("embedding", table, mode, f"{name}(fused=True), {STEPS} micro-batches", "float32")
        results.add(measure(case, window_ways(name, lookups, moments, whole), WINDOWS[effort], timer=timed))


def figures(results: Results, effort: str) -> None:
    operators(results, effort)
    results.attempt(Case("embedding", "training"), ["all"], trainings, results, effort)


if __name__ == "__main__":
    harness.run(figures, harness.arguments(__doc__).parse_args())
