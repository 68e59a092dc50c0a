"""Whole models in the cases that depend on the CPU: AVX2 in float32, and bfloat16 as the CPU multiplies it.

- float32, with every library limited to AVX2 (`machines/emulated.py`): convolutions, an LSTM and an MLP.
- bfloat16 parameters and float32 sums on the real CPU: an MLP, and a GPT of 256 tokens. With `model=` weight
  gradients are added in the backward, which must not be slower than two passes.

Both loops of fusedacc are compared with PyTorch's fastest exact loop, and in bfloat16 `model=` also with
fusedacc without it. A window is four micro-batches, clipping and AdamW. Times are CPU time of one thread.

    python -m benchmarks.suites.processors [--quick | --full]
"""

import statistics
import tempfile
from pathlib import Path

from fusedacc.commands.measuring.records import Case, Goal, Results, Row, Variant, cannot_run, rows_of
from fusedacc.commands.measuring.timing import take_turns, thread_time

from .. import harness
from ..harness import ONE_THREAD, ROOT, processes, rounds
from ..machines.child import Turn
from ..machines.emulated import KINDS, effects
from ..machines.loops import MODEL, PLAIN, STOCK_VARIANTS, Training, ours
from ..machines.zoo import entries

STEPS = 4
#: The models and the precision of each machine.
MODELS = {"avx2-1": (("conv", "lstm", "mlp"), "float32"), "native-1": (("mlp", "gpt-256"), "bfloat16")}
ROUNDS = {"quick": 2, "short": 31, "full": 101}
#: The least speed relative to PyTorch's best loop, and to the wrapper without `model=`.
AT_LEAST = 0.98


def cell(model: str, precision: str, machine: str, effort: str) -> list[Row]:
    entry = entries(effort == "quick")[model]
    training = Training(entry, precision, STEPS)
    stock = [way.name for way in STOCK_VARIANTS[precision]]
    turns = {way.name: Turn(way, training) for way in (*STOCK_VARIANTS[precision], *ours(precision))}
    case = Case("processors", f"{model}, {machine}", "window", f"{entry.shapes}; k={STEPS}", precision)
    times = take_turns(turns, rounds(ROUNDS[effort], case.case), thread_time)
    best = Goal(min(stock, key=lambda name: statistics.median(times[name])), AT_LEAST)
    own = (Goal(PLAIN, AT_LEAST),) if precision == "bfloat16" else ()
    goals = {PLAIN: (best,), MODEL: (best, *own)}
    return rows_of(case, [Variant(name, goals=goals.get(name, ())) for name in turns], times)


def measured_here(machine: str, effort: str) -> list[Row]:
    models, precision = MODELS[machine]
    return [each for model in models for each in cell(model, precision, machine, effort)]


def measured_as(machine: str, effort: str) -> list[Row]:
    """The same, or one row with the reason if this process is not that machine."""
    wrong = KINDS[machine].wrong(effects())
    if wrong:
        case = Case("processors", machine, "window", dtypes=MODELS[machine][1])
        return [cannot_run(case, PLAIN, f"settings took no effect: {wrong}")]
    return measured_here(machine, effort)


def measured_apart(machine: str, effort: str) -> list[Row]:
    """The same, in a process that is started as that machine."""
    with tempfile.TemporaryDirectory() as folder:
        caches = Path(folder) if effort == "quick" else ROOT / "build" / "machines"
        settings = KINDS[machine].environment(caches, "processors") | ONE_THREAD
        with processes(settings, 1) as pool:
            return pool.submit(measured_as, machine, effort).result()


def figures(results: Results, effort: str) -> None:
    for machine in MODELS:
        results.add(measured_apart(machine, effort))


if __name__ == "__main__":
    harness.run(figures, harness.arguments(__doc__).parse_args())
