"""The figures of docs/memory.md: memory and time against the micro-batch, on real models.

- grows: memory by kind at a few micro-batches of a batch of 64, as `fusedacc.planner` predicts it;
- halves: 64 samples at once and as 2 x 32: the recorded peak, the time, and the difference of the gradients;
- per_sample: the time of a sample's forward and backward against the micro-batch;
- norms: BatchNorm and GroupNorm with a batch of 64 in smaller parts.

Rows go to benchmarks/results/memory.csv; `make memory-figures` draws the newest.
"""

import copy
import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

import fusedacc
from fusedacc.commands.plan import Training, curve
from fusedacc.commands.timing import take_turns
from fusedacc.planner.allocations import TEMPORARIES, recorded_peak

from .. import harness
from ..contestants.loops import InsideBackward, Loop, Wrapped
from ..contestants.zoo import Entry, entries
from ..contestants.zoo.training import CPU
from ..contestants.zoo.training import Training as TrainingTask
from ..harness import RESULTS, progress, rounds
from ..records import Results, spread

MEMORY = RESULTS.with_name("memory.csv")
BATCH = 64
MIB = 2**20
#: The models of each part. Those of halves have no norm over samples.
GROWS = ("gpt-64", "vit", "conv", "unet")
HALVES = ("gpt-64", "vit", "unet", "lstm")
PER_SAMPLE = ("gpt-64", "vit", "conv", "unet", "mlp")
#: The micro-batches with which norms are tried.
NORM_SIZES = (64, 8, 2)
#: The whole batch in another order, which shows how much rounding alone changes a gradient.
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
    """Updates nothing, and keeps the gradients of the update."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.found: list[Tensor] = []

    def step(self, closure: Any = None) -> None:
        given = [p.grad for group in self.param_groups for p in group["params"]]
        self.found = [grad.detach().clone() for grad in given if grad is not None]


def batch_of(entry: Entry, size: int) -> Any:
    """Return the arguments and the targets of so many different samples."""
    generator = torch.Generator().manual_seed(0)
    parts = [entry.batch(generator)]
    while len(parts) * len(parts[0][1]) < size:
        parts.append(entry.batch(generator))
    return tree_map(lambda *leaves: torch.cat(leaves)[:size], *parts)


def loss_of(task: TrainingTask, model: nn.Module, batch: Any) -> Tensor:
    return task.loss(model, *batch)


def grows(results: Results, effort: str) -> None:
    for name in progress(GROWS, "memory by kind", "model"):
        entry = entries(effort == "quick")[name]
        reach = 3 if effort == "quick" else BATCH // 2
        task = TrainingTask(entry, "float32")
        model = task.model()
        adamw = torch.optim.AdamW(model.parameters())
        given = Training(model, adamw, batch_of(entry, 2), functools.partial(loss_of, task))
        for loop, training in (("fusedacc", given.ours()), ("stock", given)):
            found = curve(loop, training, BATCH, None, reach, CPU, lambda size: None)
            for size, kinds in {**found.by_size, BATCH: found.full}.items():
                row = functools.partial(Row, "grows", name, loop, BATCH, size, note=entry.shapes)
                results.add([row(kind, "MiB", count / MIB) for kind, count in kinds.items()])
            if loop == "fusedacc":
                training.stock()  # closes the wrapper


@dataclasses.dataclass(frozen=True)
class OfEntry(TrainingTask):
    """A model of the zoo. `make(parameters)` returns its optimizer."""

    max_grad_norm: float | None = None
    make: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW

    def optimizer(self, parameters: list[nn.Parameter], fused: bool | None) -> torch.optim.Optimizer:
        return self.make(parameters)


@dataclasses.dataclass
class BatchVariant:
    name: str
    size: int
    kind: type[Loop] = Loop
    shuffled: bool = False

    def prepare(self, entry: Entry, batch: Any, make: Callable[[Any], Any]) -> tuple[Loop, Callable[[], Any]]:
        """Return a loop, and a function that makes one update of it."""
        if self.shuffled:
            order = torch.randperm(BATCH, generator=torch.Generator().manual_seed(1))
            batch = tree_map(lambda leaf: leaf[order], batch)
        starts = range(0, BATCH, self.size)
        parts = [tree_map(lambda leaf, at=at: leaf[at : at + self.size], batch) for at in starts]
        loop = self.kind(OfEntry(entry, "float32", len(parts), make=make))
        return loop, lambda: loop.window(parts)


LOOPS = (
    BatchVariant("stock, 1 x 64", BATCH),
    BatchVariant(SHUFFLED, BATCH, shuffled=True),
    BatchVariant("stock, 2 x 32", BATCH // 2),
    BatchVariant("fusedacc, 2 x 32", BATCH // 2, Wrapped),
    BatchVariant("fusedacc model=, 2 x 32", BATCH // 2, InsideBackward),
)


def halves(results: Results, effort: str) -> None:
    """Record the peaks, time the loops in turns, and compare the gradients."""
    adamw = functools.partial(torch.optim.AdamW, lr=1e-4)
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
            if not loop.shuffled:
                results.add([row("peak", "MiB", peak_of(loop, entry, batch, adamw) / MIB)])
                runs[loop.name] = loop.prepare(entry, batch, adamw)[1]
        times = take_turns(runs, rounds(1 if effort == "quick" else 7, name))
        base = times[LOOPS[0].name]
        for loop in (loop for loop in LOOPS if loop.name in times):
            row = functools.partial(Row, "halves", name, loop.name, BATCH, loop.size)
            results.add(timed(row, times[loop.name], base))


def timed(row: Callable[..., Row], times: Sequence[float], base: Sequence[float]) -> list[Row]:
    """Return rows of the seconds of each round, and of their share of the base's in the same round."""
    shares = [seconds / first for seconds, first in zip(times, base, strict=True)]
    return [row("time", "ms", **spread(times, 1e3)), row("time, share", "relative", **spread(shares))]


def apart(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the norm of the difference as a share of the norm of the exact gradients."""
    pairs = list(zip(found, exact, strict=True))
    off = sum((a.double() - b.double()).square().sum() for a, b in pairs)
    return float((off / sum(b.double().square().sum() for _, b in pairs)).sqrt())


def peak_of(loop: BatchVariant, entry: Entry, batch: Any, make: Callable[[Any], Any]) -> int:
    """Return the peak of two updates with parameters and optimizer, but without the batch."""

    def train(look: Callable[[Any], None]) -> None:
        _, update = loop.prepare(entry, batch, make)
        update()
        update()

    return recorded_peak(train, CPU, TEMPORARIES).bytes


def per_sample(results: Results, effort: str) -> None:
    """Time a micro-batch within a window: forward, backward, accumulation. Sizes take turns."""
    sizes = [2**power for power in range(2 if effort == "quick" else 9)]
    for name in progress(PER_SAMPLE, "time per sample", "model"):
        entry = entries(effort == "quick")[name]
        task = TrainingTask(entry, "float32")
        batch = batch_of(entry, max(sizes))
        model = task.model()
        optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), 2**30)

        def run(size: int, task: Any = task, batch: Any = batch, trained: Any = (model, optimizer)) -> None:
            model, optimizer = trained
            task.loss(model, *tree_map(lambda leaf: leaf[:size], batch)).backward()
            optimizer.step()
            optimizer.zero_grad()

        runs = {str(size): functools.partial(run, size) for size in sizes}
        times = take_turns(runs, rounds(1 if effort == "quick" else 9, name))
        each = {size: [seconds / size for seconds in times[str(size)]] for size in sizes}
        for size in sizes:
            row = functools.partial(Row, "per_sample", name, "fusedacc", BATCH, size)
            results.add(timed(row, each[size], each[max(sizes)]))
        optimizer.close()


#: Norms over the samples of a micro-batch, and over groups of a sample's channels.
NORMS = {"BatchNorm": nn.BatchNorm2d, "GroupNorm": lambda channels: nn.GroupNorm(4, channels)}
UNSEEN = 297
LR = 3e-3


def net(norm: str, width: int, seed: int) -> nn.Module:
    """Return a small convolutional net of images [batch, 1, 8, 8] to logits [batch, 10]."""
    torch.manual_seed(seed)
    made = NORMS[norm]
    return nn.Sequential(
        nn.Conv2d(1, width, 3, 1, 1, bias=False),
        made(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False),
        made(2 * width),
        nn.ReLU(),
        nn.Conv2d(2 * width, 2 * width, 3, 1, 1, bias=False),
        made(2 * width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )


def digits() -> tuple[Tensor, Tensor]:
    """Return images, float32 [1797, 1, 8, 8], and labels. The last `UNSEEN` are not trained on."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)


def gradient(model: nn.Module, images: Tensor, labels: Tensor, size: int) -> Tensor:
    """Return the mean's gradient as a vector, from micro-batches of `size`. The model does not change."""
    copied = copy.deepcopy(model)
    parts = list(zip(images.split(size), labels.split(size), strict=True))
    for x, y in parts:
        (functional.cross_entropy(copied(x), y) / len(parts)).backward()
    return torch.cat([p.grad.flatten() for p in copied.parameters()])


def losses(norm: str, width: int, size: int, batch: int, epochs: int, seed: int) -> Iterator[float]:
    images, labels = digits()
    model = net(norm, width, seed)
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.AdamW(model.parameters(), lr=LR), batch // size)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(images) - UNSEEN, generator=generator)
        order = order[: len(order) // batch * batch]
        for chosen in order.split(size):
            functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model.eval()
            yield functional.cross_entropy(model(images[-UNSEEN:]), labels[-UNSEEN:]).item()
            model.train()


def norms(results: Results, effort: str) -> None:
    """Compare the first gradients with the whole batch's, and the loss on unseen digits by epoch."""
    width, epochs, seeds = (4, 1, 1) if effort == "quick" else (16, 12, 3)
    images, labels = (each[:BATCH] for each in digits())
    for norm in progress(NORMS, "norms", "norm"):
        model = net(norm, width, 0)
        whole = gradient(model, images, labels, BATCH)
        for size in NORM_SIZES:
            row = functools.partial(Row, "norms", norm, f"{norm}, {BATCH // size} x {size}", BATCH, size)
            off = apart([gradient(copy.deepcopy(model), images, labels, size)], [whole])
            results.add([row("gradients apart", "relative", off)])
            runs = [list(losses(norm, width, size, BATCH, epochs, seed)) for seed in range(seeds)]
            for epoch, seen in enumerate(zip(*runs, strict=True), 1):
                ends = (min(seen), max(seen))
                note = f"epoch {epoch}; the range of {seeds} seeds"
                results.add([row("loss", "nats", statistics.median(seen), *ends, seeds, note=note)])


PARTS = {"grows": grows, "halves": halves, "per_sample": per_sample, "norms": norms}


if __name__ == "__main__":
    harness.run_parts(__doc__, PARTS, MEMORY, COLUMNS)
