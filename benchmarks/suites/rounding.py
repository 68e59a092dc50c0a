"""The figures of docs/rounding.md: bfloat16 sums with stochastic rounding, to nearest, and float32 sums.

- training: of the demo with bfloat16 parameters, three ways from the same weights on the same text: losses
  for each seed, and how far they are above those with float32 sums;
- sums: the same gradients added up in three ways, compared with float32, by the number of micro-batches;
- statistics: many small additions to 1.0, all of which rounding to nearest loses;
- speed: one addition to 64 Mi elements beside a copy and a triad, and to the parameter lists of models;
- memory: the peak of a training window, by kind.

`at` is the update, the number of micro-batches or additions, or a value. `k`: micro-batches per update.
Rows go to benchmarks/results/rounding.csv; `make rounding-figures` draws the newest.

    python -m benchmarks.suites.rounding [--quick | --full] [--only training,sums,statistics,speed,memory]
"""

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
from fusedacc.commands.measuring.records import Case, Goal, Results, Variant, cannot_run, count
from fusedacc.functional import prepare

from .. import harness
from ..contestants import model_shapes, rounded
from ..contestants.accumulate import triad
from ..contestants.loops import Demo
from ..contestants.rounded import DTYPES, FLOAT32, NEAREST, STOCHASTIC, STOCK, UNSEEN, VARIANTS, WITH_STOCK
from ..harness import BF16, ONE_THREAD, RESULTS, measure, processes, progress

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
MODELS = {
    "quick": ("resnet50",),
    "short": ("resnet50", "vit_b_16", "bert_base", "gpt2"),
    "full": model_shapes.NAMES,
}
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


def add(kept: Results, rows: Iterable[records.Row]) -> None:
    kept.add([Row(**dataclasses.asdict(each)) for each in rows])


def row_of(case: Case, provider: str, *, metric: str, unit: str, **columns: Any) -> Row:
    return Row(**dataclasses.asdict(case), provider=provider, metric=metric, unit=unit, **columns)


def side_by_side(
    job: Callable[..., Any], arguments: Sequence[tuple], here: bool
) -> Iterator[tuple[tuple, Any]]:
    """Yield arguments with what `job` returns for them, computed in one process per core.

    here: use this process instead, one job after the other.
    """
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
    jobs = [
        (dataclasses.replace(config, steps=k, seed=seed), updates[k])
        for k in sorted(updates, reverse=True)
        for seed in range(seeds)
    ]
    for (own, _), found in progress(side_by_side(losses_of, jobs, quick), "training", "seed", len(jobs)):
        kept.add(training_rows(own, found, stretches))


def losses_of(config: Demo, updates: int) -> Losses:
    """Return the loss of each update and, last, that on unseen text, by way."""
    text = load_text()
    return {way.name: list(rounded.train(way, config, text, updates)) for way in VARIANTS}


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
        own = functools.partial(row_of, case, name, seed=config.seed, k=config.steps, unit="nats")
        curves = {"": losses}
        if name != FLOAT32:
            pairs = zip(losses, found[FLOAT32], strict=True)
            curves[" above float32 sums"] = [loss - base for loss, base in pairs]
        for metric, values in curves.items():
            for end in range(length, updates + 1, length):
                mean = of_values.mean(values[end - length : end])
                rows.append(own(metric=f"loss{metric}", at=end, median=mean))
            rows.append(own(metric=f"unseen loss{metric}", at=updates, median=values[-1]))
    return rows


def sums(kept: Results, effort: str) -> None:
    """Compare sums with the sum in float32: the relative difference, and the share that they hold."""
    quick = effort == "quick"
    jobs = [
        (dataclasses.replace(SMALL, micro_batch_size=size, **(TINY if quick else {})), before, quick)
        for size in sorted(SIZES, reverse=True)
        for before in ((0, 1) if quick else BEFORE)
    ]
    found_of = side_by_side(errors_of, jobs, quick)
    for (config, before, _), found in progress(found_of, "sums", "case", len(jobs)):
        size = f"{config.micro_batch_size} x {config.context} bytes"
        case = Case("sums", f"{size}, after {before} updates", "accumulate", dtypes="bfloat16 gradients")
        for at, name, apart, share in found:
            own = functools.partial(row_of, case, name, unit="relative", seed=config.seed, at=at)
            kept.add([own(metric="apart", median=apart), own(metric="share kept", median=share)])


def errors_of(config: Demo, before: int, quick: bool) -> list[tuple[int, str, float, float]]:
    """Return micro-batches, way, relative difference, and the component along the float32 sum."""
    text = load_text()
    model = rounded.trained(dataclasses.replace(config, micro_batch_size=1), text, before)
    found = []
    for at, by_way in rounded.sums_of(model, config, text, COUNTS[:4] if quick else COUNTS):
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
    looks = enumerate(rounded.additions(ELEMENTS, STEP, times, seed=0), 1)
    for number, found in progress(looks, "statistics", "addition", times):
        if number % (times // LOOKS):
            continue
        for name, values in found.items():
            own = functools.partial(row_of, case, name, unit="value", seed=0, at=number)
            kept.add(statistics_rows(own, values.double(), 1 + number * STEP))
            if number == times:
                own = functools.partial(row_of, case, name, metric="elements", unit="elements", seed=0)
                kept.add([own(at=value, median=n) for value, n in sorted(Counter(values.tolist()).items())])


def statistics_rows(own: Callable[..., Row], values: Tensor, exact: float) -> list[Row]:
    """Return the rows of elements that should be `exact`."""
    mean, error = values.mean().item(), values.std().item() / len(values) ** 0.5
    low, high = values.quantile(torch.tensor([0.2, 0.8], dtype=values.dtype)).tolist()
    rows = [
        own(metric="mean", median=mean, p20=low, p80=high),
        own(metric="standard error", median=error),
        own(metric="share kept", unit="relative", median=(mean - 1) / (exact - 1)),
    ]
    if error:
        rows.append(own(metric="off by", unit="standard errors", median=(mean - exact) / error))
    return rows


def speed(kept: Results, effort: str) -> None:
    """Time one large tensor beside the machine's bandwidth, and models' lists."""
    quick = effort == "quick"
    size, rounds = (2**16, 3) if quick else (2**26, 41)
    case = Case("speed", f"{count(size)} elements", "accumulate", "one tensor", "bfloat16 gradients")
    add(kept, timed(case, [(size,)], rounds, bandwidth=True))
    for name in progress(MODELS[effort], "lists", "model"):
        whole = model_shapes.load(name)
        if quick:
            whole = model_shapes.tiny(whole)
        # Gradients, and the sums of each way.
        parameters = model_shapes.fitting_memory(whole, 2 + 4 + 2 + 2, CPU)
        shapes = model_shapes.describe(parameters or whole, whole)
        case = Case("lists", name, "accumulate", shapes, "bfloat16 gradients")
        if parameters:
            add(kept, timed(case, model_shapes.shapes(parameters), rounds))
        else:
            add(kept, [cannot_run(case, STOCHASTIC, model_shapes.NO_MEMORY)])


def timed(
    case: Case, shapes: Sequence[tuple[int, ...]], rounds: int, bandwidth: bool = False
) -> list[records.Row]:
    """Time one addition in each way with prepared plans. bandwidth: also a float32 copy and triad."""
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=generator).to(BF16) for shape in shapes]
    goals, variants = [Goal(FLOAT32, 1.0), Goal(NEAREST)], []
    if bandwidth:
        total = torch.zeros(shapes[0])
        yardsticks = {"copy": functools.partial(torch.zeros_like(total).copy_, total)}
        yardsticks["triad"] = triad(total.numel(), CPU)
        for passes, (name, run) in enumerate(yardsticks.items(), 2):
            variants.append(Variant(name, run, passes * total.nbytes))
            goals.append(Goal(name, BANDWIDTH, by_bandwidth=True))
    for name, dtype in DTYPES.items():
        own = [torch.zeros(shape, dtype=dtype) for shape in shapes]
        how = {"rounding": "stochastic", "seed": 0} if name == STOCHASTIC else {}
        plan = functools.partial(prepare(own, **how), gradients, SCALE)
        moved = sum(2 * total.nbytes + each.nbytes for total, each in zip(own, gradients, strict=True))
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
            add(kept, records.value_rows(case, "peak memory", "B/param", {name: total[name]}, {name: goal}))
        for kind, size in kinds.items():
            add(kept, records.value_rows(case, f"peak memory: {kind}", "B/param", {name: size}))


PARTS = {"training": training, "sums": sums, "statistics": statistics, "speed": speed, "memory": memory}


main = functools.partial(harness.run_parts, __doc__, PARTS, ROUNDING, COLUMNS)


if __name__ == "__main__":
    main()
