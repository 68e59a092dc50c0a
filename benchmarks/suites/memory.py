"""What docs/memory.md shows: memory and time against the micro-batch, on real models.

- grows: memory by kind at a few micro-batches of a batch of 64, as `fusedacc.planner` predicts it;
- halves: 64 samples at once and as 2 x 32: the recorded peak, the time, and how far the gradients are apart;
- per_sample: the time of a sample's forward and backward against the micro-batch;
- norms: BatchNorm and GroupNorm where a batch of 64 comes in smaller parts.

Rows go to benchmarks/results/memory.csv; `make memory-figures` draws the newest.

    python -m benchmarks.suites.memory [--quick] [--only grows,halves,per_sample,norms]
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import fusedacc
from fusedacc.commands.measuring.records import Results, spread
from fusedacc.commands.measuring.timing import take_turns
from fusedacc.commands.plan import Training, curve
from fusedacc.planner.allocations import TEMPORARIES, recorded_peak

from .. import harness
from ..contestants import normed
from ..contestants.loops import InsideBackward, Loop, Task, Wrapped
from ..harness import RESULTS, progress, rounds
from ..machines.zoo import Entry, entries

MEMORY = RESULTS.with_name("memory.csv")
BATCH = 64
CPU = torch.device("cpu")
MIB = 2**20
#: Models by what they show. Those of halves have no norm over samples.
GROWS = ("gpt-64", "vit", "conv", "unet")
HALVES = ("gpt-64", "vit", "unet", "lstm")
PER_SAMPLE = ("gpt-64", "vit", "conv", "unet", "mlp")
#: Micro-batches of the batch in which norms are tried.
NORM_SIZES = (64, 8, 2)
#: The whole batch with its samples in another order: as far as rounding alone moves a gradient.
SHUFFLED = "stock, 1 x 64, shuffled"


@dataclasses.dataclass(frozen=True)
class Row:
    """A figure: a line of the CSV. `case`: the model; `provider`: the loop; `median` is in `unit`."""

    benchmark: str
    case: str
    provider: str
    batch: int
    micro_batch: int
    metric: str
    unit: str
    median: float
    p20: float | None = None
    p80: float | None = None
    rounds: int | None = None
    note: str = ""


COLUMNS = tuple(field.name for field in dataclasses.fields(Row))


class Gradients(torch.optim.Optimizer):
    """Updates nothing, and keeps what it would update by."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.found: list[Tensor] = []

    def step(self, closure: Any = None) -> None:
        given = [p.grad for group in self.param_groups for p in group["params"]]
        self.found = [grad.detach().clone() for grad in given if grad is not None]


def batch_of(entry: Entry, size: int) -> Any:
    """So many different samples: the arguments, and the targets."""
    generator = torch.Generator().manual_seed(0)
    parts = [entry.batch(generator)]
    while len(parts) * len(parts[0][1]) < size:
        parts.append(entry.batch(generator))
    whole = tree_map(lambda *leaves: torch.cat(leaves), *parts)
    return tree_map(lambda leaf: leaf[:size], whole)


def model_of(entry: Entry) -> nn.Module:
    torch.manual_seed(0)
    return entry.model()


def loss_of(entry: Entry, model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return entry.loss(model(*inputs), targets)


def grows(results: Results, effort: str) -> None:
    """Predicted for the wrapped and the stock loop."""
    for name in progress(GROWS, "memory by kind", "model"):
        entry, reach = entries(effort == "quick")[name], 3 if effort == "quick" else BATCH // 2
        model = model_of(entry)
        given = Training(
            model,
            torch.optim.AdamW(model.parameters()),
            batch_of(entry, 2),
            functools.partial(loss_of, entry),
        )
        for loop, training in (("fusedacc", given.ours()), ("stock", given)):
            found = curve(loop, training, BATCH, None, reach, CPU, lambda size: None)
            for size, kinds in {**found.by_size, BATCH: found.full}.items():
                results.add(
                    [
                        Row("grows", name, loop, BATCH, size, kind, "MiB", bytes / MIB, note=entry.shapes)
                        for kind, bytes in kinds.items()
                    ]
                )
            if loop == "fusedacc":
                training.stock()  # closes the wrapper


@dataclasses.dataclass(frozen=True)
class OfEntry(Task):
    """A model of the zoo; `make(parameters)` gives its optimizer."""

    entry: Entry
    steps: int
    make: Callable[[Any], torch.optim.Optimizer]
    device: torch.device = CPU

    def model(self) -> nn.Module:
        return model_of(self.entry)

    def loss(self, model: nn.Module, *batch: Any) -> Tensor:
        return loss_of(self.entry, model, batch)

    def optimizer(self, parameters: list[nn.Parameter], fused: bool | None) -> torch.optim.Optimizer:
        return self.make(parameters)


@dataclasses.dataclass
class BatchVariant:
    """One way to make an update of a batch."""

    name: str
    size: int
    kind: type[Loop] = Loop
    shuffled: bool = False

    def prepare(
        self, entry: Entry, batch: Any, make: Callable[[Any], torch.optim.Optimizer]
    ) -> tuple[Loop, Callable[[], Any]]:
        """A loop, and what makes one update of it."""
        if self.shuffled:
            order = torch.randperm(BATCH, generator=torch.Generator().manual_seed(1))
            batch = tree_map(lambda leaf: leaf[order], batch)
        parts = [
            tree_map(lambda leaf, at=at: leaf[at : at + self.size], batch)
            for at in range(0, BATCH, self.size)
        ]
        loop = self.kind(OfEntry(entry, len(parts), make))
        return loop, lambda: loop.window(parts)


LOOPS = (
    BatchVariant("stock, 1 x 64", BATCH),
    BatchVariant(SHUFFLED, BATCH, shuffled=True),
    BatchVariant("stock, 2 x 32", BATCH // 2),
    BatchVariant("fusedacc, 2 x 32", BATCH // 2, Wrapped),
    BatchVariant("fusedacc model=, 2 x 32", BATCH // 2, InsideBackward),
)


def halves(results: Results, effort: str) -> None:
    """Recorded, timed in turns, and compared."""
    for name in progress(HALVES, "64 and 2 x 32", "model"):
        entry = entries(effort == "quick")[name]
        batch = batch_of(entry, BATCH)
        exact: list[Tensor] = []
        runs = {}
        for loop in LOOPS:
            row = functools.partial(Row, "halves", name, loop.name, BATCH, loop.size, note=entry.shapes)
            made, update = loop.prepare(entry, batch, Gradients)
            update()
            exact = exact or made.inner.found
            results.add([row("gradients apart", "relative", apart(made.inner.found, exact))])
            if loop.shuffled:
                continue
            adamw = functools.partial(torch.optim.AdamW, lr=1e-4)
            results.add([row("peak", "MiB", peak_of(loop, entry, batch, adamw) / MIB)])
            runs[loop.name] = loop.prepare(entry, batch, adamw)[1]
        times = take_turns(runs, rounds(1 if effort == "quick" else 7, name))
        for loop in LOOPS:
            if loop.name in times:
                results.add(
                    timed("halves", name, loop.name, loop.size, times[loop.name], times[LOOPS[0].name])
                )


def timed(
    benchmark: str, case: str, provider: str, size: int, own: Sequence[float], base: Sequence[float]
) -> list[Row]:
    """Rows of seconds by round, and of what they are of the base's in the same round."""
    row = functools.partial(Row, benchmark, case, provider, BATCH, size)
    shares = [seconds / first for seconds, first in zip(own, base, strict=True)]
    return [row("time", "ms", **spread(own, 1e3)), row("time, share", "relative", **spread(shares))]


def apart(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The length of the difference, as a share of the exact one's."""
    pairs = list(zip(found, exact, strict=True))
    off = sum((a.double() - b.double()).square().sum() for a, b in pairs)
    return float((off / sum(b.double().square().sum() for _, b in pairs)).sqrt())


def peak_of(loop: BatchVariant, entry: Entry, batch: Any, make: Callable[[Any], Any]) -> int:
    """Of two updates, parameters and optimizer included; the batch itself was there before."""

    def train(look: Callable[[Any], None]) -> None:
        _, update = loop.prepare(entry, batch, make)
        update()
        update()

    return recorded_peak(train, CPU, TEMPORARIES).bytes


def per_sample(results: Results, effort: str) -> None:
    """A micro-batch in mid-window: forward, backward, accumulation; sizes take turns."""
    sizes = [2**power for power in range(2 if effort == "quick" else 9)]
    for name in progress(PER_SAMPLE, "time per sample", "model"):
        entry = entries(effort == "quick")[name]
        batch, model = batch_of(entry, max(sizes)), model_of(entry)
        optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), 2**30)

        def run(size: int, entry: Any = entry, batch: Any = batch, own: Any = (model, optimizer)) -> None:
            model, optimizer = own
            part = tree_map(lambda leaf: leaf[:size], batch)
            loss_of(entry, model, part).backward()
            optimizer.step()
            optimizer.zero_grad()

        runs = {str(size): functools.partial(run, size) for size in sizes}
        times = take_turns(runs, rounds(1 if effort == "quick" else 9, name))
        each = {size: [seconds / size for seconds in times[str(size)]] for size in sizes}
        for size in sizes:
            results.add(timed("per_sample", name, "fusedacc", size, each[size], each[max(sizes)]))
        optimizer.close()


def norms(results: Results, effort: str) -> None:
    """How far gradients are from the whole batch's at the start, and the loss on unseen digits by epoch."""
    width, epochs, seeds = (4, 1, 1) if effort == "quick" else (16, 12, 3)
    images, labels = (each[:BATCH] for each in normed.digits())
    for norm in progress(normed.NORMS, "norms", "norm"):
        model = normed.net(norm, width, 0)
        whole = normed.gradient(model, images, labels, BATCH)
        for size in NORM_SIZES:
            way = f"{norm}, {BATCH // size} x {size}"
            off = apart([normed.gradient(copy.deepcopy(model), images, labels, size)], [whole])
            results.add([Row("norms", norm, way, BATCH, size, "gradients apart", "relative", off)])
            runs = [list(normed.losses(norm, width, size, BATCH, epochs, seed)) for seed in range(seeds)]
            for epoch, seen in enumerate(zip(*runs, strict=True), 1):
                ends = {"p20": min(seen), "p80": max(seen), "rounds": seeds}
                note = f"epoch {epoch}; the range of {seeds} seeds"
                median = statistics.median(seen)
                results.add([Row("norms", norm, way, BATCH, size, "loss", "nats", median, **ends, note=note)])


PARTS = {"grows": grows, "halves": halves, "per_sample": per_sample, "norms": norms}


def words(rows: Sequence[Row]) -> list[str]:
    return [
        f"{row.benchmark}: {row.case}, {row.provider}, {row.micro_batch}: "
        f"{row.metric} {row.median:.4g} {row.unit}"
        for row in rows
    ]


def main() -> None:
    harness.run_parts(__doc__, PARTS, MEMORY, COLUMNS, words)


if __name__ == "__main__":
    main()
