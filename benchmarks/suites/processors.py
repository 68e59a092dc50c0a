"""Whole models in the cases that depend on the CPU: AVX2 in float32, and bfloat16 as the CPU multiplies it.

- float32, with every library limited to AVX2 (`machines/emulated.py`): convolutions, an LSTM and an MLP.
- bfloat16 parameters and float32 sums on the real CPU: an MLP, and a GPT of 256 tokens. With `model=` weight
  gradients are added in the backward, which must not be slower than two passes.

Both loops of fusedacc are compared with PyTorch's fastest exact loop, and in bfloat16 `model=` also with
fusedacc without it. A window is four micro-batches, clipping and AdamW. Times are CPU time of one thread.
Each model is timed in several processes, and ratios have the 95 % interval of these processes.
"""

import dataclasses
import statistics
from collections.abc import Sequence

from fusedacc.commands.measuring import records
from fusedacc.commands.measuring.records import Case, Goal, Results, Row
from fusedacc.commands.measuring.timing import interval, ratio, take_turns, thread_time

from .. import harness
from ..harness import ROOT, rounds
from ..machines.emulated import WrongMachineError, measured_as
from ..machines.loops import MODEL, PLAIN, STOCK_VARIANTS, Training, ours, turn
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


def samples_here(machine: str, effort: str) -> list[Sample]:
    names, precision = MODELS[machine]
    samples = []
    for model in names:
        entry = entries(effort == "quick")[model]
        training = Training(entry, precision, STEPS)
        turns = {way.name: turn(way, training) for way in (*STOCK_VARIANTS[precision], *ours(precision))}
        case = Case("processors", f"{model}, {machine}", "window", f"{entry.shapes}; k={STEPS}", precision)
        samples.append((case, take_turns(turns, rounds(ROUNDS[effort], case.case), thread_time)))
    return samples


def samples_apart(machine: str, effort: str) -> list[Sample]:
    """The same, in a new process that is started as that machine."""
    caches = None if effort == "quick" else ROOT / "build" / "machines"
    return measured_as(machine, caches, "processors", samples_here, machine, effort)


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
    rows = records.timed_rows(case, times, {PLAIN: (best,), MODEL: (best, *own)})
    for index, row in enumerate(rows):
        if row.goal:
            ratios = [ratio(found[row.against], found[row.provider])[0] for _, found in launches]
            speedup, (low, high) = statistics.median(ratios), interval(ratios)
            judged = {"speedup": speedup, "reached": records.reached(speedup, row.goal)}
            note = f"{low:.3f} to {high:.3f} in {len(ratios)} processes"
            rows[index] = dataclasses.replace(row, **judged, note=note)
    return rows


def measured(machine: str, effort: str) -> list[Row]:
    """The rows of a machine, or one with the reason if it cannot be emulated."""
    try:
        launches = [samples_apart(machine, effort) for _ in range(LAUNCHES[effort])]
    except WrongMachineError as error:
        case = Case("processors", machine, "window", dtypes=MODELS[machine][1])
        return [records.cannot_run(case, PLAIN, str(error))]
    return [row for of_one in zip(*launches, strict=True) for row in rows_over(of_one)]


def figures(results: Results, effort: str) -> None:
    for machine in MODELS:
        results.add(measured(machine, effort))


if __name__ == "__main__":
    harness.run(figures, harness.arguments(__doc__).parse_args())
