"""What docs/rounding.md shows: sums of bfloat16 that are rounded stochastically, to nearest, and in float32.

- training: the demo's, with bfloat16 parameters, three ways from the same weights on the same text: losses
  for each seed, and how far they are above those with float32 sums;
- sums: the same gradients added up three ways, against float32, by the number of micro-batches;
- statistics: many small additions to 1.0, the case that rounding to nearest loses;
- speed: one addition to 64 Mi elements beside a copy and a triad, and to the parameter lists of models;
- memory: the peak of a training window, by kind.

`at` is the update, the number of micro-batches or additions, or a value. `k`: micro-batches of an update.
Rows go to benchmarks/results/rounding.csv; `make rounding-figures` draws the newest.

    python -m benchmarks.suites.rounding [--quick | --full] [--only training,sums,statistics,speed,memory]
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import statistics as of_values
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from examples.demo.measure import batches
from examples.demo.model import load_text
from fusedacc.commands.measuring import records
from fusedacc.commands.measuring.records import Case, Goal, Results, Variant, at_most, cannot_run, count, row
from fusedacc.functional import prepare

from .. import harness
from ..contestants import model_shapes, rounded
from ..contestants.accumulate import triad
from ..contestants.loops import Demo
from ..contestants.rounded import FLOAT32, NEAREST, STOCHASTIC, STOCK, UNSEEN, VARIANTS, WITH_STOCK
from ..harness import ONE_THREAD, RESULTS, measure, processes, progress

ROUNDING = RESULTS.with_name("rounding.csv")
CPU = torch.device("cpu")
BF16, F32 = torch.bfloat16, torch.float32
#: The demo's transformer, and a micro-batch of one sequence of 32 bytes.
SMALL = Demo("bfloat16", CPU, width=64, layers=2, heads=2, context=32, micro_batch_size=1)
LARGE = dataclasses.replace(SMALL, steps=2, width=256, layers=3, heads=4)
TINY = {"width": 16, "layers": 1, "heads": 1, "context": 8}
#: Updates by the micro-batches of each; losses are recorded as means of so many stretches of them.
UPDATES = {8: 256, 256: 32}
STRETCHES, SEEDS = 16, 5
#: Of `sums`: micro-batches' sizes, updates that the model has made before, and where it is looked.
SIZES, BEFORE = (1, 8), (0, 200)
COUNTS = tuple(2**power for power in range(12))
#: Of `statistics`.
ELEMENTS, STEP, TIMES, LOOKS = 4096, 2.0**-10, 4096, 64
#: Of `speed`.
BANDWIDTH = 0.9
MODELS = {
    "quick": ("resnet50",),
    "short": ("resnet50", "vit_b_16", "bert_base", "gpt2"),
    "full": model_shapes.NAMES,
}
SCALE = 0.125
#: How many bytes a parameter below float32 sums' the peak is to be.
SAVED = 2


@dataclasses.dataclass(frozen=True)
class Row(records.Row):
    """A figure: a line of the CSV."""

    seed: int | None = None
    k: int | None = None
    at: float | None = None


COLUMNS = tuple(field.name for field in dataclasses.fields(Row))


def add(kept: Results, rows: Iterable[records.Row], **own: Any) -> None:
    """Adds rows with these columns of their own."""
    kept.add([Row(**dataclasses.asdict(each) | own) for each in rows])


# What training comes to


Losses = dict[str, list[float]]


def training(kept: Results, effort: str) -> None:
    """Seeds in processes of one thread each: nothing is timed."""
    quick = effort == "quick"
    updates = {2: 4, 4: 4} if quick else UPDATES
    seeds = range(2 if quick else SEEDS)
    config = dataclasses.replace(SMALL, **TINY) if quick else SMALL
    jobs = [
        (dataclasses.replace(config, steps=k, seed=seed), updates[k])
        for k in sorted(updates, reverse=True)
        for seed in seeds
    ]
    stretches = 2 if quick else STRETCHES
    for (own, _), found in progress(side_by_side(losses_of, jobs, quick), "training", "seed", len(jobs)):
        kept.add(training_rows(own, found, stretches))


def losses_of(config: Demo, updates: int) -> Losses:
    """By way: the loss of each update, and last that on text that was not trained on."""
    text = load_text()
    return {way.name: list(rounded.train(way, config, text, updates)) for way in VARIANTS}


def training_rows(config: Demo, found: Losses, stretches: int) -> list[Row]:
    """The curve as means of stretches of updates, and what differs from float32 sums: the CSV has five
    digits, which hide it."""
    updates = len(found[FLOAT32]) - 1
    shapes = f"{config.layers} blocks of width {config.width}; {config.steps} micro-batches of "
    shapes += f"{config.micro_batch_size} x {config.context} bytes, {updates} updates"
    case = Case("training", f"demo, k = {config.steps}", "training", shapes, "bfloat16 parameters")
    length = updates // stretches
    rows = []
    for name, losses in found.items():
        own = functools.partial(row_of, case, name, seed=config.seed, k=config.steps, unit="nats")
        for metric, less in (("", None), (" above float32 sums", found[FLOAT32])):
            off = [loss - base for loss, base in zip(losses, less or [0.0] * len(losses), strict=True)]
            if less is None or name != FLOAT32:
                for end in range(length, updates + 1, length):
                    mean = of_values.mean(off[end - length : end])
                    rows.append(own(metric=f"loss{metric}", at=end, median=mean))
                rows.append(own(metric=f"unseen loss{metric}", at=updates, median=off[-1]))
    return rows


def row_of(case: Case, provider: str, *, metric: str, unit: str, **columns: Any) -> Row:
    return Row(**dataclasses.asdict(case), provider=provider, metric=metric, unit=unit, **columns)


def side_by_side(
    job: Callable[..., Any], arguments: Sequence[tuple], here: bool
) -> Iterator[tuple[tuple, Any]]:
    """Arguments with what `job` returns for them, as it is ready, in as many processes as there are cores.

    here: in this process instead, one by one.
    """
    if here:
        yield from ((given, job(*given)) for given in arguments)
        return
    with processes(ONE_THREAD) as pool:
        started = {pool.submit(job, *given): given for given in arguments}
        for done in concurrent.futures.as_completed(started):
            yield started[done], done.result()


# What the sums are


def sums(kept: Results, effort: str) -> None:
    """Their distance from the sum in float32, as a share of its length, and how much of it they hold."""
    quick = effort == "quick"
    jobs = [
        (dataclasses.replace(SMALL, micro_batch_size=size, **(TINY if quick else {})), before, quick)
        for size in sorted(SIZES, reverse=True)
        for before in ((0, 1) if quick else BEFORE)
    ]
    for (config, before, _), found in progress(
        side_by_side(errors_of, jobs, quick), "sums", "case", len(jobs)
    ):
        size = f"{config.micro_batch_size} x {config.context} bytes"
        case = Case("sums", f"{size}, after {before} updates", "accumulate", dtypes="bfloat16 gradients")
        for at, name, apart, share in found:
            own = functools.partial(row_of, case, name, unit="relative", seed=config.seed, at=at)
            kept.add([own(metric="apart", median=apart), own(metric="share kept", median=share)])


def errors_of(config: Demo, before: int, quick: bool) -> list[tuple[int, str, float, float]]:
    """Micro-batches, way, length of the difference, and the sum's part along the one in float32."""
    text = load_text()
    model = rounded.trained(dataclasses.replace(config, micro_batch_size=1), text, before)
    found = []
    for at, by_way in rounded.sums_of(model, config, text, COUNTS[:4] if quick else COUNTS):
        exact = by_way[FLOAT32]
        for name in (NEAREST, STOCHASTIC):
            own = by_way[name]
            apart = ((own - exact).norm() / exact.norm()).item()
            found.append((at, name, apart, (own.dot(exact) / exact.dot(exact)).item()))
    return found


def statistics(kept: Results, effort: str) -> None:
    """The mean over elements, its standard error, their range; at the end how many have which value."""
    times = 64 if effort == "quick" else TIMES
    text = f"{ELEMENTS} elements of 1, {times} additions of 2^{torch.tensor(STEP).log2().int().item()}"
    case = Case("statistics", text, "accumulate", dtypes="bfloat16 into bfloat16")
    every = times // LOOKS
    looks = enumerate(rounded.additions(ELEMENTS, STEP, times, seed=0), 1)
    for number, found in progress(looks, "statistics", "addition", times):
        if number % every:
            continue
        for name, values in found.items():
            own = functools.partial(row_of, case, name, unit="value", seed=0, at=number)
            kept.add(statistics_rows(own, values.double(), 1 + number * STEP))
            if number == times:
                counted = Counter(values.tolist())
                kept.add(
                    [
                        own(metric="elements", unit="elements", at=value, median=counted[value])
                        for value in sorted(counted)
                    ]
                )


def statistics_rows(own: Callable[..., Row], values: Tensor, exact: float) -> list[Row]:
    """Of elements that are to be `exact`."""
    error = values.std().item() / len(values) ** 0.5
    off = (values.mean().item() - exact) / error if error else None
    low, high = values.quantile(torch.tensor([0.2, 0.8], dtype=values.dtype)).tolist()
    rows = [
        own(metric="mean", median=values.mean().item(), p20=low, p80=high),
        own(metric="standard error", median=error),
        own(metric="share kept", unit="relative", median=(values.mean().item() - 1) / (exact - 1)),
    ]
    if off is not None:
        rows.append(own(metric="off by", unit="standard errors", median=off))
    return rows


# What it costs


def speed(kept: Results, effort: str) -> None:
    """Ways in turns, on one large tensor with the machine's bandwidth beside it, and on models' lists."""
    quick = effort == "quick"
    size = 2**16 if quick else 2**26
    case = Case("speed", f"{count(size)} elements", "accumulate", "one tensor", "bfloat16 gradients")
    add(kept, timed(case, [(size,)], 3 if quick else 41, bandwidth=True))
    for name in progress(MODELS[effort], "lists", "model"):
        whole = model_shapes.load(name)
        if quick:
            whole = model_shapes.tiny(whole)
        # Gradients, and sums of each way.
        parameters = model_shapes.fitting_memory(whole, 2 + 4 + 2 + 2, CPU)
        shapes = model_shapes.describe(parameters or whole, whole)
        case = Case("lists", name, "accumulate", shapes, "bfloat16 gradients")
        if parameters:
            add(kept, timed(case, model_shapes.shapes(parameters), 3 if quick else 41))
        else:
            add(kept, [cannot_run(case, STOCHASTIC, "no memory for one layer of each stack")])


def timed(
    case: Case, shapes: Sequence[tuple[int, ...]], rounds: int, bandwidth: bool = False
) -> list[records.Row]:
    """One addition by each way, of prepared plans.

    bandwidth: beside a copy and a triad in float32.
    """
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=generator).to(BF16) for shape in shapes]
    sums = {
        name: [torch.zeros(shape, dtype=dtype) for shape in shapes]
        for name, dtype in ((FLOAT32, F32), (NEAREST, BF16), (STOCHASTIC, BF16))
    }
    goals = [Goal(FLOAT32, 1.0), Goal(NEAREST)]
    variants = []
    if bandwidth:
        (total,) = sums[FLOAT32]
        yardsticks = {"copy": functools.partial(torch.zeros_like(total).copy_, total)}
        yardsticks["triad"] = triad(total.numel(), CPU)
        for passes, (name, run) in enumerate(yardsticks.items(), 2):
            variants.append(Variant(name, run, passes * total.nbytes))
            goals.append(Goal(name, BANDWIDTH, by_bandwidth=True))
    for name, own in sums.items():
        how = {"rounding": "stochastic", "seed": 0} if name == STOCHASTIC else {}
        plan = functools.partial(prepare(own, **how), gradients, SCALE)
        held_to = tuple(goals) if name == STOCHASTIC else ()
        moved = sum(2 * total.nbytes + each.nbytes for total, each in zip(own, gradients, strict=True))
        variants.append(Variant(name, plan, moved, held_to))
    return measure(case, variants, rounds)


def memory(kept: Results, effort: str) -> None:
    """Bytes a parameter at the peak of two windows, and of what kinds they were."""
    config = dataclasses.replace(LARGE, **TINY) if effort == "quick" else LARGE
    parameters = sum(p.numel() for p in config.model().parameters())
    shapes = f"{parameters / 1e6:.2f} M parameters, {config.layers} blocks; {config.steps} micro-batches of "
    shapes += f"{config.micro_batch_size} x {config.context} bytes"
    case = Case("memory", f"demo, width {config.width}", "training", shapes, "bfloat16 parameters")
    data = [batches(load_text()[:-UNSEEN], config, update) for update in range(2)]
    found = {
        way.name: {kind: size / parameters for kind, size in way.peak(config, data).items()}
        for way in progress(WITH_STOCK, "memory", "way")
    }
    own = {"metric": "peak memory", "unit": "B/param"}
    total = {name: sum(kinds.values()) for name, kinds in found.items()}
    for name, kinds in found.items():
        goals: list[dict[str, Any]] = [{}]
        if name == STOCHASTIC:
            limits = {f"{FLOAT32} less {SAVED} B/param": total[FLOAT32] - SAVED, STOCK: total[STOCK]}
            goals = [at_most(limit, total[name], against) for against, limit in limits.items()]
        add(kept, [row(case, name, **own, median=total[name], **goal) for goal in goals])
        for kind, size in kinds.items():
            add(kept, [row(case, name, **own | {"metric": f"peak memory: {kind}"}, median=size)])


def line(figure: Row) -> str:
    if figure.median is None:
        return f"{figure.benchmark}: {figure.case}, {figure.provider}: {figure.note}"
    where = [figure.case, figure.provider]
    where += [
        f"{name} {value:g}" for name, value in (("seed", figure.seed), ("at", figure.at)) if value is not None
    ]
    told = f"{figure.benchmark}: {', '.join(where)}: {figure.metric} {figure.median:.5g} {figure.unit}"
    told += f", {figure.percent_of_peak:.0f} % of the bandwidth" if figure.percent_of_peak else ""
    told += f", {figure.speedup:.3f} x {figure.against}" if figure.against else ""
    return told + {"yes": ": goal reached", "no": ": goal MISSED"}.get(figure.reached, "")


PARTS = {"training": training, "sums": sums, "statistics": statistics, "speed": speed, "memory": memory}


def words(rows: Sequence[Row]) -> list[str]:
    """Of curves the end."""
    last = {(r.benchmark, r.case, r.provider, r.metric, r.seed, r.against): r for r in rows}
    return [line(figure) for figure in last.values()]


def main() -> None:
    harness.run_parts(__doc__, PARTS, ROUNDING, COLUMNS, words)


if __name__ == "__main__":
    main()
