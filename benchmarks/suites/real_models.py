"""Training of real models on this machine: a window of each of our loops, against the best of plain PyTorch.

The models are those of contestants/zoo. A window is up to 8 micro-batches, a clip to norm 1, and AdamW. The
first rounds find the fastest of PyTorch's exact loops; it alone takes turns with ours. `keep_casts=True` is
compared with `model=` alone. `make bench` leaves the suite out: it takes about a quarter of an hour.

    python -m benchmarks.suites.real_models [--models mlp,vit] [--precisions float32]
"""

import dataclasses
import gc
import statistics
import time
import warnings

import torch

from fusedacc.commands.timing import Run, ratio, take_turns

from .. import harness, records
from ..contestants import loops, zoo
from ..contestants.zoo.training import (
    KEPT,
    MODEL,
    PLAIN,
    PRECISIONS,
    STOCK_VARIANTS,
    Training,
    ours,
    turn,
)
from ..harness import Names, progress, rounds
from ..records import Case, Goal, Results, Row

#: The least speed relative to the baseline.
LEAST_SPEED = 0.98
#: A peak may exceed the baseline's by the larger of these bytes and this share.
PEAK_BYTES, PEAK_SHARE = 1_000_000, 0.01
#: Seconds of timing per model and precision.
SECONDS = {"quick": 0.2, "short": 8.0, "full": 30.0}
#: The least and the most timed rounds. With fewer than six rounds there is no 95 % interval.
LEAST_ROUNDS, MOST_ROUNDS = 7, 101


def micro_batches(training: Training, seconds: float) -> int:
    """Return the micro-batches per window: a half or a quarter of all if the rounds would take too long."""
    model = training.model()
    parameters = list(model.parameters())
    for batch in training.window(0)[:2]:
        start = time.perf_counter()
        torch.autograd.grad(training.loss(model, *batch), parameters)
        took = time.perf_counter() - start
    steps = training.steps
    loops_in_turn = 1 + len(ours(training.precision))
    while steps > 2 and took * steps * loops_in_turn * LEAST_ROUNDS > 2 * seconds:
        steps //= 2
    return steps


def fastest_of_pytorch(
    training: Training, runs: dict[str, Run], what: str
) -> tuple[loops.LoopVariant, float]:
    """Return the fastest of PyTorch's exact loops, and the median of its times."""
    variants = STOCK_VARIANTS[training.precision]
    first_rounds = rounds(3 if len(variants) > 1 else 1, f"{what}, first rounds")
    times = take_turns({variant.name: runs[variant.name] for variant in variants}, first_rounds)
    medians = {name: statistics.median(of_loop) for name, of_loop in times.items()}
    best = min(variants, key=lambda variant: medians[variant.name])
    return best, medians[best.name]


def measure(entry: zoo.Entry, precision: str, seconds: float) -> list[Row]:
    """Time the loops in turns for about so many seconds, then record their peaks."""
    what = f"{entry.name}, {precision}"
    training = Training(entry, precision)
    training = dataclasses.replace(training, steps=micro_batches(training, seconds))
    runs = {way.name: turn(way, training) for way in (*STOCK_VARIANTS[precision], *ours(precision))}
    for run in progress(runs.values(), f"{what}, first windows", "loop"):
        run()  # compiles and allocates before anything is timed
    end = time.perf_counter() + seconds
    best, median = fastest_of_pytorch(training, runs, what)
    ways = (best, *ours(precision))
    runs = {way.name: runs[way.name] for way in ways}
    gc.collect()
    count = int((end - time.perf_counter()) / (len(runs) * median)) - 1
    times = take_turns(runs, rounds(min(max(count, LEAST_ROUNDS), MOST_ROUNDS), what))
    del runs
    gc.collect()

    baselines = {PLAIN: best.name, MODEL: best.name, KEPT: MODEL}
    baselines = {name: against for name, against in baselines.items() if name in times}
    case = Case("real_models", entry.name, "window", f"{entry.shapes}; k={training.steps}", precision)
    goals = {name: (Goal(against, LEAST_SPEED),) for name, against in baselines.items()}
    rows = []
    for row in records.timed_rows(case, times, goals):
        if row.against:
            low, high = interval_of_ratio(times[row.against], times[row.provider])
            # A loop is too slow if the whole interval is.
            reached = records.reached(high, LEAST_SPEED)
            row = dataclasses.replace(row, reached=reached, note=f"{low:.3f} to {high:.3f}")
        rows.append(row)

    short = dataclasses.replace(training, steps=2)
    windows = [short.window(number) for number in range(2)]
    peaks = {way.name: sum(way.peak(short, windows).values()) for way in ways}
    limits = {
        name: (peaks[against] + max(PEAK_BYTES, PEAK_SHARE * peaks[against]), against)
        for name, against in baselines.items()
    }
    return rows + records.value_rows(case, "peak memory", "bytes", peaks, limits)


def interval_of_ratio(over: list[float], under: list[float]) -> tuple[float, float]:
    _, low, high = ratio(over, under)
    return low, high


def figures(results: Results, effort: str, *, models: Names = None, precisions: Names = None) -> None:
    # U-Net has no layer that `model=` accepts. Its rows show that nothing is lost.
    warnings.filterwarnings("ignore", message="model= was given, but")
    entries = zoo.entries(effort == "quick")
    for name in progress(models or list(entries), "real models", "model"):
        for precision in precisions or PRECISIONS:
            case = Case("real_models", name, "window", entries[name].shapes, precision)
            rows = results.attempt(case, [PLAIN, MODEL], measure, entries[name], precision, SECONDS[effort])
            results.add(rows or [])
            gc.collect()


def main() -> None:
    options, chosen = harness.parsed(
        harness.arguments(__doc__), models=tuple(zoo.entries(True)), precisions=PRECISIONS
    )
    harness.run(figures, options, **chosen)


if __name__ == "__main__":
    main()
