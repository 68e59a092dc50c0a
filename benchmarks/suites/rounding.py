"""The figures of docs/rounding.md: bfloat16 sums with stochastic rounding, to nearest, and float32 sums.

- training: of the demo with bfloat16 parameters, three ways from the same weights on the same text: losses
  for each seed, and how far they are above those with float32 sums;
- sums: the same gradients added up in three ways, compared with float32, by the number of micro-batches;
- statistics: many small additions to 1.0, all of which rounding to nearest loses;
- speed: one addition to 64 Mi elements beside a copy and a triad, and to the parameter lists of models;
- memory: the peak of a training window, by kind.

`at` is the update, the number of micro-batches or additions, or a value. `k`: micro-batches per update.
Rows go to benchmarks/results/rounding.csv; `make rounding-figures` draws the newest.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import statistics as of_values
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from examples.demo.measure import batches
from examples.demo.model import load_text, micro_batch
from fusedacc.functional import prepare, scale_accumulate_

from .. import harness, records
from ..contestants import model_shapes
from ..contestants.loops import Demo, Loop, LoopVariant, Wrapped
from ..harness import BF16, F32, ONE_THREAD, RESULTS, measure, processes, progress
from ..records import Case, Goal, Results, Variant, cannot_run, count
from .kernels import triad

FLOAT32, NEAREST, STOCHASTIC = "float32 sums", "bfloat16 sums, to nearest", "bfloat16 sums, stochastic"
STOCK = "stock, bfloat16 sums"
DTYPES = {FLOAT32: F32, NEAREST: BF16, STOCHASTIC: BF16}
#: Bytes at the end of the text that are not trained on, and how many windows of them the loss is a mean of.
UNSEEN, WINDOWS = 400_000, 512
#: Micro-batches from this number on are in no training.
APART = 10**9


class ToNearest(Wrapped):
    """The wrapper with sums of half the size."""

    def options(self) -> dict[str, Any]:
        return {**super().options(), "accumulate_dtype": BF16}


class Stochastic(ToNearest):
    """The same with stochastic rounding."""

    def options(self) -> dict[str, Any]:
        return {**super().options(), "rounding": "stochastic", "seed": self.task.seed}


VARIANTS = tuple(map(LoopVariant, DTYPES, (Wrapped, ToNearest, Stochastic)))
#: With stock's loop for bfloat16 parameters and sums.
WITH_STOCK = (*VARIANTS, LoopVariant(STOCK, Loop))


def train(variant: LoopVariant, config: Demo, text: Tensor, updates: int) -> tuple[nn.Module, list[float]]:
    """Return a model after so many updates, and the loss of each of them."""
    loop = variant.make(config)
    losses = [loop.update(batches(text[:-UNSEEN], config, update)).item() for update in range(updates)]
    loop.close()
    return loop.model, losses


@torch.no_grad()
def unseen_loss(model: nn.Module, config: Demo, text: Tensor, size: int = 32) -> float:
    """Return the mean over windows that are the same for every model."""
    losses = []
    for index in range(WINDOWS // size):
        given = micro_batch(text[-UNSEEN:], APART + index, config.device, size, config.context)
        losses.append(config.loss(model, *given).item())
    return sum(losses) / len(losses)


def sums_of(
    model: nn.Module, config: Demo, text: Tensor, counts: Sequence[int]
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Add up the same gradients in each way. Yield each sum as a float64 vector after these micro-batches."""
    parameters = list(model.parameters())
    sums = {name: [torch.zeros_like(each, dtype=d) for each in parameters] for name, d in DTYPES.items()}
    size = (config.micro_batch_size, config.context)
    for index in range(max(counts)):
        given = micro_batch(text[:-UNSEEN], APART + index, config.device, *size)
        gradients = torch.autograd.grad(config.loss(model, *given), parameters)
        for name, totals in sums.items():
            how: dict[str, Any] = {"overwrite": index == 0}
            if name == STOCHASTIC:
                how |= {"rounding": "stochastic", "seed": config.seed, "offset": index}
            scale_accumulate_(totals, gradients, 1.0, **how)
        if index + 1 in counts:
            found = {name: torch.cat([e.flatten().double() for e in totals]) for name, totals in sums.items()}
            yield index + 1, found


def additions(count: int, step: float, times: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield so many elements of 1.0 after each addition of `step`, to nearest and stochastically."""
    sums = {name: [torch.ones(count, dtype=BF16)] for name in (NEAREST, STOCHASTIC)}
    added = [torch.full((count,), step, dtype=BF16)]
    for number in range(times):
        scale_accumulate_(sums[NEAREST], added)
        scale_accumulate_(sums[STOCHASTIC], added, rounding="stochastic", seed=seed, offset=number)
        yield {name: totals[0] for name, totals in sums.items()}


ROUNDING = RESULTS.with_name("rounding.csv")
CPU = torch.device("cpu")
#: The demo's transformer, with a micro-batch of one sequence of 32 bytes.
SMALL = Demo("bfloat16", CPU, width=64, layers=2, heads=2, context=32, micro_batch_size=1)
LARGE = dataclasses.replace(SMALL, steps=2, width=256, layers=3, heads=4)
TINY = {"width": 16, "layers": 1, "heads": 1, "context": 8}
#: Updates by the micro-batches of each. Losses are recorded as means over STRETCHES parts of them.
UPDATES = {8: 256, 256: 32}
STRETCHES, SEEDS = 16, 5
#: Of `sums`: micro-batch sizes, updates of the model before, and numbers of micro-batches that are recorded.
SIZES, BEFORE = (1, 8), (0, 200)
COUNTS = tuple(2**power for power in range(12))
#: Of `statistics`.
ELEMENTS, STEP, TIMES, LOOKS = 4096, 2.0**-10, 4096, 64
#: Of `speed`.
BANDWIDTH = 0.9
MODELS = {"quick": ("resnet50",), "short": model_shapes.NAMES[:4], "full": model_shapes.NAMES}
SCALE = 0.125
#: Goal: bytes per parameter by which the peak is below that with float32 sums.
SAVED = 2
Losses = dict[str, list[float]]


@dataclasses.dataclass(frozen=True)
class Row(records.Row):
    seed: int | None = None
    k: int | None = None
    at: float | None = None


COLUMNS = tuple(field.name for field in dataclasses.fields(Row))


def row_of(case: Case, provider: str, **columns: Any) -> Row:
    return Row(**dataclasses.asdict(case), provider=provider, **columns)


def side_by_side(job: Callable, arguments: Sequence[tuple], here: bool) -> Iterator[tuple[tuple, Any]]:
    """Yield arguments with what `job` returns for them, from a process per core; from this one if `here`."""
    if here:
        yield from ((given, job(*given)) for given in arguments)
        return
    with processes(ONE_THREAD) as pool:
        started = {pool.submit(job, *given): given for given in arguments}
        for done in concurrent.futures.as_completed(started):
            yield started[done], done.result()


def training(kept: Results, effort: str) -> None:
    """Train each seed in a process of one thread. Nothing is timed."""
    quick = effort == "quick"
    updates, seeds, stretches = ({2: 4, 4: 4}, 2, 2) if quick else (UPDATES, SEEDS, STRETCHES)
    config = dataclasses.replace(SMALL, **TINY) if quick else SMALL
    each = itertools.product(sorted(updates, reverse=True), range(seeds))
    jobs = [(dataclasses.replace(config, steps=k, seed=seed), updates[k]) for k, seed in each]
    done = progress(side_by_side(losses_of, jobs, quick), "training", "seed", len(jobs))
    for (config_of_seed, _), losses in done:
        kept.add(training_rows(config_of_seed, losses, stretches))


def losses_of(config: Demo, updates: int) -> Losses:
    """Return the loss of each update and, last, that on unseen text, by way."""
    text = load_text()
    found = {}
    for way in VARIANTS:
        model, losses = train(way, config, text, updates)
        found[way.name] = [*losses, unseen_loss(model, config, text)]
    return found


def training_rows(config: Demo, found: Losses, stretches: int) -> list[Row]:
    """Return the curve as means over stretches of updates, and the difference from float32 sums.

    The CSV has five digits, which would hide the difference.
    """
    updates = len(found[FLOAT32]) - 1
    shapes = f"{config.layers} blocks of width {config.width}; {config.micro_batches}, {updates} updates"
    case = Case("training", f"demo, k = {config.steps}", "training", shapes, "bfloat16 parameters")
    length = updates // stretches
    rows = []
    for name, losses in found.items():
        row_with = functools.partial(row_of, case, name, seed=config.seed, k=config.steps, unit="nats")
        curves = {"": losses}
        if name != FLOAT32:
            pairs = zip(losses, found[FLOAT32], strict=True)
            curves[" above float32 sums"] = [loss - base for loss, base in pairs]
        for metric, values in curves.items():
            for end in range(length, updates + 1, length):
                mean = of_values.mean(values[end - length : end])
                rows.append(row_with(metric=f"loss{metric}", at=end, median=mean))
            rows.append(row_with(metric=f"unseen loss{metric}", at=updates, median=values[-1]))
    return rows


def sums(kept: Results, effort: str) -> None:
    """Compare sums with the sum in float32: the relative difference, and the share that they hold."""
    quick = effort == "quick"
    config = dataclasses.replace(SMALL, **TINY) if quick else SMALL
    each = itertools.product(sorted(SIZES, reverse=True), (0, 1) if quick else BEFORE)
    jobs = [(dataclasses.replace(config, micro_batch_size=size), before, quick) for size, before in each]
    found_of = side_by_side(errors_of, jobs, quick)
    for (config, before, _), found in progress(found_of, "sums", "case", len(jobs)):
        size = f"{config.micro_batch_size} x {config.context} bytes"
        case = Case("sums", f"{size}, after {before} updates", "accumulate", dtypes="bfloat16 gradients")
        for at, name, apart, share in found:
            row_with = functools.partial(row_of, case, name, unit="relative", seed=config.seed, at=at)
            kept.add([row_with(metric="apart", median=apart), row_with(metric="share kept", median=share)])


def errors_of(config: Demo, before: int, quick: bool) -> list[tuple[int, str, float, float]]:
    """Return micro-batches, way, relative difference, and the component along the float32 sum."""
    text = load_text()
    model, _ = train(VARIANTS[0], dataclasses.replace(config, micro_batch_size=1), text, before)
    found = []
    for at, by_way in sums_of(model, config, text, COUNTS[:4] if quick else COUNTS):
        exact = by_way[FLOAT32]
        for name in (NEAREST, STOCHASTIC):
            apart = ((by_way[name] - exact).norm() / exact.norm()).item()
            found.append((at, name, apart, (by_way[name].dot(exact) / exact.dot(exact)).item()))
    return found


def statistics(kept: Results, effort: str) -> None:
    """Add the mean over elements, its standard error and range, and at the end how many have which value."""
    times = 64 if effort == "quick" else TIMES
    text = f"{ELEMENTS} elements of 1, {times} additions of 2^{torch.tensor(STEP).log2().int().item()}"
    case = Case("statistics", text, "accumulate", dtypes="bfloat16 into bfloat16")
    looks = enumerate(additions(ELEMENTS, STEP, times, seed=0), 1)
    for number, found in progress(looks, "statistics", "addition", times):
        if number % (times // LOOKS):
            continue
        for name, values in found.items():
            row_with = functools.partial(row_of, case, name, unit="value", seed=0, at=number)
            kept.add(statistics_rows(row_with, values.double(), 1 + number * STEP))
            if number == times:
                row_with = functools.partial(row_of, case, name, metric="elements", unit="elements", seed=0)
                kept.add(
                    [row_with(at=value, median=n) for value, n in sorted(Counter(values.tolist()).items())]
                )


def statistics_rows(row_with: Callable[..., Row], values: Tensor, exact: float) -> list[Row]:
    """Return the rows of elements that should be `exact`."""
    mean = values.mean().item()
    error = values.std().item() / len(values) ** 0.5
    low, high = values.quantile(torch.tensor([0.2, 0.8], dtype=values.dtype)).tolist()
    rows = [
        row_with(metric="mean", median=mean, p20=low, p80=high),
        row_with(metric="standard error", median=error),
    ]
    rows.append(row_with(metric="share kept", unit="relative", median=(mean - 1) / (exact - 1)))
    if error:
        rows.append(row_with(metric="off by", unit="standard errors", median=(mean - exact) / error))
    return rows


def speed(kept: Results, effort: str) -> None:
    """Time one large tensor beside the machine's bandwidth, and models' lists."""
    quick = effort == "quick"
    size, rounds = (2**16, 3) if quick else (2**26, 41)
    case = Case("speed", f"{count(size)} elements", "accumulate", "one tensor", "bfloat16 gradients")
    kept.add(timed(case, [(size,)], rounds, bandwidth=True))
    for name in progress(MODELS[effort], "lists", "model"):
        whole = model_shapes.load(name, quick)
        # Gradients, and the sums of each way.
        parameters = model_shapes.fitting_memory(whole, 2 + 4 + 2 + 2, CPU)
        shapes = model_shapes.describe(parameters or whole, whole)
        case = Case("lists", name, "accumulate", shapes, "bfloat16 gradients")
        if parameters:
            kept.add(timed(case, model_shapes.shapes(parameters), rounds))
        else:
            kept.add([cannot_run(case, STOCHASTIC, model_shapes.NO_MEMORY)])


def timed(
    case: Case, shapes: Sequence[tuple[int, ...]], rounds: int, bandwidth: bool = False
) -> list[records.Row]:
    """Time one addition in each way with prepared plans. bandwidth: also a float32 copy and triad."""
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=generator).to(BF16) for shape in shapes]
    goals = [Goal(FLOAT32, 1.0), Goal(NEAREST)]
    variants = []
    if bandwidth:
        total = torch.zeros(shapes[0])
        yardsticks = {"copy": functools.partial(torch.zeros_like(total).copy_, total)}
        yardsticks["triad"] = triad(total.numel(), CPU)
        for passes, (name, run) in enumerate(yardsticks.items(), 2):
            variants.append(Variant(name, run, passes * total.nbytes))
            goals.append(Goal(name, BANDWIDTH, by_bandwidth=True))
    for name, dtype in DTYPES.items():
        totals = [torch.zeros(shape, dtype=dtype) for shape in shapes]
        how = {"rounding": "stochastic", "seed": 0} if name == STOCHASTIC else {}
        plan = functools.partial(prepare(totals, **how), gradients, SCALE)
        moved = sum(2 * total.nbytes + each.nbytes for total, each in zip(totals, gradients, strict=True))
        variants.append(Variant(name, plan, moved, tuple(goals) if name == STOCHASTIC else ()))
    return measure(case, variants, rounds)


def memory(kept: Results, effort: str) -> None:
    """Add the bytes per parameter at the peak of two windows, and their kinds."""
    config = dataclasses.replace(LARGE, **TINY) if effort == "quick" else LARGE
    parameters = config.parameters
    shapes = f"{parameters / 1e6:.2f} M parameters, {config.layers} blocks; {config.micro_batches}"
    case = Case("memory", f"demo, width {config.width}", "training", shapes, "bfloat16 parameters")
    data = [batches(load_text()[:-UNSEEN], config, update) for update in range(2)]
    found = {
        way.name: {kind: size / parameters for kind, size in way.peak(config, data).items()}
        for way in progress(WITH_STOCK, "memory", "way")
    }
    total = {name: sum(kinds.values()) for name, kinds in found.items()}
    limits = {f"{FLOAT32} less {SAVED} B/param": total[FLOAT32] - SAVED, STOCK: total[STOCK]}
    for name, kinds in found.items():
        goals = [(limit, against) for against, limit in limits.items()] if name == STOCHASTIC else [(None,)]
        for goal in goals:
            kept.add(records.value_rows(case, "peak memory", "B/param", {name: total[name]}, {name: goal}))
        for kind, size in kinds.items():
            kept.add(records.value_rows(case, f"peak memory: {kind}", "B/param", {name: size}))


PARTS = {"training": training, "sums": sums, "statistics": statistics, "speed": speed, "memory": memory}


main = functools.partial(harness.run_parts, __doc__, PARTS, ROUNDING, COLUMNS)


if __name__ == "__main__":
    main()
