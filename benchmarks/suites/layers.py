"""Linear and Embedding layers through autograd and the wrapper: stock, wrapped, and wrapped with `model=`.

The window never ends; "first" is its first micro-batch.

- "weight gradients": the backward of four Linears of GPT-2's widths with the wrapper's `step()`, minus the
  backward of frozen weights in the same round. "forward and backward" is the whole. "bytes: weights" are
  those per weight, minus those of frozen weights and of the products' operands.
- "lookup": the backward of GPT-2's table for tokens distributed as in text.
- "host": microseconds per layer of a chain of tiny Linears on one thread.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusedacc.commands.timing import synchronize, take_turns

from .. import harness, records
from ..contestants.tokens import text_like
from ..harness import BF16, F32, INSIDE, STOCK, WRAPPED, measure, one_thread
from ..records import Case, Row
from .embedding import AT_LEAST, SETS
from .linear import DTYPES, FEW, MOST, SHAPES, words

WAYS = (STOCK, WRAPPED, INSIDE)
FROZEN = "frozen weights"
#: Tokens of a micro-batch; SHORT: those of the short sweep for other dtypes than float32.
TOKENS = {"quick": (4,), "short": (64, 128, 512, 1024), "full": (64, 128, 512, 1024, 4096)}
SHORT = (64,)
#: (rows, columns, tokens) of the lookup; (layers, width) of the chain.
TABLES = {"quick": (1000, 64, 128), "short": (50_257, 768, 1024), "full": (50_257, 768, 1024)}
CHAIN = {"quick": (4, 8), "short": (40, 8), "full": (40, 8)}
#: Rounds of the Linears, the lookup and the chain. With more tokens than ALL_ROUNDS the Linears have fewer.
ROUNDS = {"quick": (3, 3, 3), "short": (15, 5, 201), "full": (41, 15, 1001)}
ALL_ROUNDS = 128
#: Micro-batches of the endless window: a power of two, so that scaling is exact.
ENDLESS = 2**20


class EndlessWindow:
    """A model trained in one of WAYS, or with frozen weights, one micro-batch at a time.

    `forward` runs the model and returns its outputs, which get the given gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        way: str,
        forward: Callable[[nn.Module], Sequence[Tensor]],
        gradients: Sequence[Tensor],
    ) -> None:
        self.model = model
        self.forward = forward
        self.gradients = gradients
        self.optimizer: Any = None
        self.sums: list[Tensor] | None = None  # of hooks
        self.device = gradients[0].device
        for parameter in model.parameters():
            if way == FROZEN and parameter.dim() == 2:
                parameter.requires_grad_(False)
            elif way in (STOCK, FROZEN) and parameter.dtype == BF16:
                parameter.grad_dtype = F32
        if way in (WRAPPED, INSIDE):
            self.optimizer = harness.wrap(way, torch.optim.SGD(model.parameters(), lr=0.0), ENDLESS, model)

    def backward(self, outputs: Sequence[Tensor]) -> None:
        torch.autograd.backward(outputs, self.gradients)
        if self.optimizer is not None:
            self.optimizer.step()

    def run(self) -> tuple[float, float]:
        """Return the seconds of a forward and of its backward."""
        start = self._now()
        outputs = self.forward(self.model)
        middle = self._now()
        self.backward(outputs)
        return middle - start, self._now() - middle

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()

    def bytes(self) -> int:
        outputs = self.forward(self.model)
        return records.counted(lambda: self.backward(outputs), self.model).total_bytes


def linears(
    shapes: Sequence[tuple[int, int]], tokens: int, dtypes: str, device: torch.device, way: str
) -> EndlessWindow:
    """Return a Linear for each shape (outputs, inputs), side by side."""
    torch.manual_seed(0)
    weight, operand = DTYPES[dtypes]
    model = nn.ModuleList(nn.Linear(inputs, outputs) for outputs, inputs in shapes).to(device, weight)
    inputs = [torch.randn(tokens, inputs, device=device).to(operand) for _, inputs in shapes]
    gradients = [torch.randn(tokens, outputs, device=device).to(operand) for outputs, _ in shapes]

    def forward(model: nn.Module) -> list[Tensor]:
        needing = [x.detach().requires_grad_() for x in inputs]
        with torch.autocast(device.type, BF16, enabled=dtypes.startswith("autocast")):
            return [layer(x) for layer, x in zip(model, needing, strict=True)]

    return EndlessWindow(model, way, forward, gradients)


def weight_gradients(results: records.Results, effort: str) -> None:
    shapes = SHAPES[effort]
    weights = sum(outputs * inputs for outputs, inputs in shapes)
    for dtypes in DTYPES:
        for tokens in TOKENS[effort]:
            if effort == "short" and dtypes != "float32" and tokens not in SHORT:
                continue
            name = f"GPT-2 block, {tokens} tokens"
            case = Case("layers", name, "weight gradients", words(shapes), dtypes)
            work = {way: linears(shapes, tokens, dtypes, results.device, way) for way in (*WAYS, FROZEN)}
            operands = tokens * sum(map(sum, shapes)) * work[STOCK].gradients[0].itemsize
            results.add(linear_bytes(case, work, weights, operands))
            most = ROUNDS[effort][0]
            rounds = max(most // 3, most * ALL_ROUNDS // max(ALL_ROUNDS, tokens))
            results.add(linear_times(case, work, rounds, tokens))


def linear_bytes(case: Case, work: dict[str, EndlessWindow], weights: int, operands: int) -> list[Row]:
    """Return the rows of the first and of a later micro-batch. `work` must not have run before."""
    rows = []
    for mode, which in (("first", "first"), ("add", "later")):
        frozen = work[FROZEN].bytes()
        moved = {way: (work[way].bytes() - frozen - operands) / weights for way in WAYS}
        # Other operators than stock's add the biases: less than 1 % at any width.
        limits = {INSIDE: (MOST[mode], "limit", 0.01)}
        rows += records.value_rows(case, f"bytes: weights, {which}", "B/param", moved, limits)
    return rows


def linear_times(case: Case, work: dict[str, EndlessWindow], rounds: int, tokens: int) -> list[Row]:
    """Return the rows of the weights' part of the backward, and of forward and backward.

    Ratios are of medians, because a difference of two times may be small in one round.
    """
    runs = {name: work_of_way.run for name, work_of_way in work.items()}
    found = take_turns(runs, harness.rounds(rounds, case.case), lambda run, calls: run())
    whole = {}
    part = {}
    for way in WAYS:
        whole[way] = [sum(times) for times in found[way]]
        part[way] = [
            with_weight - less for (_, with_weight), (_, less) in zip(found[way], found[FROZEN], strict=True)
        ]
    least = 1.4 if tokens <= FEW and case.dtypes == "float32" else 1.0
    rows = []
    for mode, times in ((case.mode, part), ("forward and backward", whole)):
        for way in WAYS:
            figure: dict[str, Any] = records.spread(times[way], 1e6)
            if way == INSIDE:
                speedup = 1e6 * statistics.median(times[STOCK]) / figure["median"]
                figure |= {"against": STOCK, "speedup": speedup}
                if mode == case.mode:
                    figure |= {"goal": least, "reached": records.reached(speedup, least)}
            rows.append(records.row(dataclasses.replace(case, mode=mode), way, **figure))
    return rows


def lookup(size: tuple[int, int, int], device: torch.device, way: str) -> EndlessWindow:
    height, columns, count = size
    torch.manual_seed(0)
    model = nn.Embedding(height, columns, device=device)
    gradients = [torch.randn(count, columns, device=device)]
    return EndlessWindow(model, way, lambda model: [model(text_like(count, height, device))], gradients)


def lookups(results: records.Results, effort: str) -> None:
    height, columns, count = size = TABLES[effort]
    shapes = f"means of {SETS} backwards, each of new tokens"
    case = Case("layers", f"{height} x {columns}, {count} tokens", "lookup", shapes, "float32")
    wanted = AT_LEAST if results.device.type == "cpu" and effort != "quick" else 0.0
    variants = []
    for way in WAYS:
        work = lookup(size, results.device, way)
        work.run()  # the first of the window, which makes the sum
        goals = (records.Goal(STOCK, wanted),) if way == INSIDE else ()
        variants.append(records.Variant(way, lambda work=work: work.run()[1], work.bytes(), goals))

    def mean(run: Callable[[], float], calls: int) -> float:
        return statistics.mean(run() for _ in range(calls))

    results.add(measure(case, variants, ROUNDS[effort][1], SETS, mean))


def chain(layers: int, width: int, device: torch.device, way: str) -> EndlessWindow:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(device)
    x, gradient = (torch.randn(4, width, device=device) for _ in range(2))
    return EndlessWindow(model, way, lambda model: [F.relu(model(x))], [gradient])


def host(results: records.Results, effort: str) -> None:
    layers, width = CHAIN[effort]
    work = {way: chain(layers, width, results.device, way) for way in WAYS}
    shapes = f"{layers} Linears of {width} x {width}, 4 tokens, one thread; per layer"
    with one_thread():
        for index, name in enumerate(("forward", "backward")):
            case = Case("layers", f"host, {name}", "host", shapes, "float32")
            rounds = harness.rounds(ROUNDS[effort][2], case.case)
            runs = {way: work_of_way.run for way, work_of_way in work.items()}
            times = take_turns(runs, rounds, lambda run, calls, index=index: run()[index] / layers)
            results.add(records.timed_rows(case, times, {INSIDE: [records.Goal(STOCK, 1.0)]}))


def figures(results: records.Results, effort: str) -> None:
    weight_gradients(results, effort)
    lookups(results, effort)
    host(results, effort)


if __name__ == "__main__":
    harness.run(figures, harness.arguments(__doc__).parse_args())
