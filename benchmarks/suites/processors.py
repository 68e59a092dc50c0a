"""Whole models in the cases that depend on the CPU: AVX2 in float32, and bfloat16 as the CPU multiplies it.

- float32, with every library limited to AVX2 (`machines/emulated.py`): convolutions, an LSTM and an MLP.
- bfloat16 parameters and float32 sums on the real CPU: an MLP, and a GPT of 256 tokens. With `model=` weight
  gradients are added in the backward, which must not be slower than two passes.

Both loops of fusedacc are compared with PyTorch's fastest exact loop, and in bfloat16 `model=` also with
fusedacc without it. A window is four micro-batches, clipping and AdamW. Times are CPU time of one thread.
Each model is timed in several processes, and ratios have the 95 % interval of these processes.

    python -m benchmarks.suites.processors [--quick | --full]
"""

import dataclasses
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fusedacc.commands.measuring.records import (
    Case,
    Goal,
    Results,
    Row,
    Variant,
    cannot_run,
    reached,
    rows_of,
)
from fusedacc.commands.measuring.timing import interval, ratio, take_turns, thread_time

from .. import harness
from ..harness import ONE_THREAD, ROOT, processes, rounds
from ..machines.child import Turn
from ..machines.emulated import KINDS, effects
from ..machines.loops import MODEL, PLAIN, STOCK_VARIANTS, Training, ours
from ..machines.zoo import entries

STEPS = 4
#: The models and the precision of each machine.
MODELS = {"avx2-1": (("conv", "lstm", "mlp"), "float32"), "native-1": (("mlp", "gpt-256"), "bfloat16")}
#: How many processes time a model, and the rounds of each. Fewer than six give no 95 % interval.
LAUNCHES = {"quick": 1, "short": 6, "full": 15}
ROUNDS = {"quick": 2, "short": 5, "full": 15}
#: What was timed, and the seconds of each round by variant.
Sample = tuple[Case, dict[str, list[float]]]
#: The least speed relative to PyTorch's best loop, and to the wrapper without `model=`.
AT_LEAST = 0.98


class WrongMachineError(RuntimeError):
    """The settings of an emulated machine took no effect."""


def sample(model: str, machine: str, effort: str) -> Sample:
    precision = MODELS[machine][1]
    entry = entries(effort == "quick")[model]
    training = Training(entry, precision, STEPS)
    turns = {way.name: Turn(way, training) for way in (*STOCK_VARIANTS[precision], *ours(precision))}
    case = Case("processors", f"{model}, {machine}", "window", f"{entry.shapes}; k={STEPS}", precision)
    return case, take_turns(turns, rounds(ROUNDS[effort], case.case), thread_time)


def samples_here(machine: str, effort: str) -> list[Sample]:
    return [sample(model, machine, effort) for model in MODELS[machine][0]]


def samples_as(machine: str, effort: str) -> list[Sample]:
    """The same; raise WrongMachineError if this process is not that machine."""
    wrong = KINDS[machine].wrong(effects())
    if wrong:
        raise WrongMachineError(f"settings took no effect: {wrong}")
    return samples_here(machine, effort)


def samples_apart(machine: str, effort: str) -> list[Sample]:
    """The same, in a new process that is started as that machine."""
    with tempfile.TemporaryDirectory() as folder:
        caches = Path(folder) if effort == "quick" else ROOT / "build" / "machines"
        settings = KINDS[machine].environment(caches, "processors") | ONE_THREAD
        with processes(settings, 1) as pool:
            return pool.submit(samples_as, machine, effort).result()


def rows_over(launches: Sequence[Sample]) -> list[Row]:
    """Return the rows of one model that was timed in several processes.

    Tensors lie at other addresses in each process, and at the same ones in all its rounds. So the rounds of a
    process are not independent. A goal is judged by the median of the processes' medians, and the note has
    their 95 % interval.
    """
    case, first = launches[0]
    times = {name: [each for _, found in launches for each in found[name]] for name in first}
    stock = [way.name for way in STOCK_VARIANTS[case.dtypes]]
    best = Goal(min(stock, key=lambda name: statistics.median(times[name])), AT_LEAST)
    own = (Goal(PLAIN, AT_LEAST),) if case.dtypes == "bfloat16" else ()
    goals = {PLAIN: (best,), MODEL: (best, *own)}
    rows = rows_of(case, [Variant(name, goals=goals.get(name, ())) for name in times], times)
    return [over_launches(row, launches) if row.goal else row for row in rows]


def over_launches(row: Row, launches: Sequence[Sample]) -> Row:
    """Judge a row by the ratios of its processes."""
    assert row.goal is not None
    ratios = [ratio(found[row.against], found[row.provider])[0] for _, found in launches]
    low, high = interval(ratios)
    note = f"{low:.3f} to {high:.3f} in {len(ratios)} processes"
    speedup = statistics.median(ratios)
    return dataclasses.replace(row, speedup=speedup, reached=reached(speedup, row.goal), note=note)


def measured(machine: str, effort: str) -> list[Row]:
    """The rows of a machine, or one with the reason if it cannot be emulated."""
    try:
        launches = [samples_apart(machine, effort) for _ in range(LAUNCHES[effort])]
    except WrongMachineError as error:
        case = Case("processors", machine, "window", dtypes=MODELS[machine][1])
        return [cannot_run(case, PLAIN, str(error))]
    return [row for of_one in zip(*launches, strict=True) for row in rows_over(of_one)]


def figures(results: Results, effort: str) -> None:
    for machine in MODELS:
        results.add(measured(machine, effort))


if __name__ == "__main__":
    harness.run(figures, harness.arguments(__doc__).parse_args())
