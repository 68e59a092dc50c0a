"""Training of a GPT from end to end: time of a micro-batch and peak memory, by way to accumulate.

A GPT in bfloat16 trains with windows of 8 micro-batches and fused AdamW, eager and compiled. The ways are two
loops of plain PyTorch with float32 sums, one with inexact bfloat16 sums, the wrapper, `model=`, and `model=`
with a head that computes the loss without logits.

- "gradient error": of the first window's final gradient, relative to the norm of the first way's. A way whose
  error or losses show that it does not train the same is not timed.
- "peak memory" of live bytes in a window, with weights, sums and optimizer state.
- "time": an eighth of a window, its update included. "time: update": the window's update alone.

Goals for ours relative to each loop of plain PyTorch with float32 sums: no slower, and a peak no higher than
the lower one's, plus the gradients' cast to bfloat16 at the update and, on a GPU, the gradients that may wait
for a launch.

--seconds stops the suite between ways and rounds, so that it can run where time is limited. The cases are in
the order of their importance, and rows are written as soon as they are measured.
"""

import contextlib
import gc
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fusedacc.commands.timing import take_turns

from .. import harness, records
from ..contestants import gpt
from ..contestants.gpt import FUSED, INEXACT, INSIDE, WAYS, WRAPPED, Size, Training
from ..contestants.loops import LoopVariant, MicroBatch
from ..records import Case, Goal, Results, cannot_run, row
from .training import Clock, waiting_megabytes

STEPS = 8
EAGER, COMPILED = "eager", "compiled"
#: By device.
SIZES = {"cuda": Size(8, 2048, 32_768, 512), "cpu": Size(3, 256, 8192, 64)}
QUICK = Size(2, 32, 256, 8)
#: The mode and the tokens of a micro-batch, the most important case first.
CASES = {
    "cuda": tuple(itertools.product((EAGER, COMPILED), (2048, 512, 8192))),
    "cpu": tuple(itertools.product((EAGER, COMPILED), (128, 64, 512))),
}
QUICK_CASES = ((EAGER, 16), (COMPILED, 16))
#: Rounds of the cases in order of their tokens: the more tokens, the less the times differ.
ROUNDS = {"quick": (2, 2, 2), "short": (15, 11, 5), "full": (41, 21, 11)}
#: The most relative error of a gradient. The final gradient is in bfloat16, and because of atomic additions
#: two runs of the same loop differ on a GPU. A lost micro-batch is an error of 0.3.
MOST_ERROR = 2.0**-5
#: The most relative difference of a loss in the first window. Logits are rounded to bfloat16 or not.
MOST_DIFFERENCE = 2.0**-8
METRICS = ("time", "time: update", "peak memory", "gradient error")
#: All ways of a case take turns. Each needs one entry in Dynamo's cache for its blocks and one for its head.
RECOMPILATIONS = 4 * len(WAYS)


class Deadline:
    """The end of the time that the suite may take. seconds: None: no end."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.start = time.monotonic()

    def passed(self) -> bool:
        return self.seconds is not None and time.monotonic() - self.start >= self.seconds

    def why(self) -> str:
        return f"the limit of {self.seconds:g} s was reached"


class Contestant:
    """A way to train, with its first window checked and its peak measured."""

    def __init__(self, way: LoopVariant, task: Training, data: Sequence[MicroBatch]) -> None:
        self.loop = way.make(task)
        self.task = task
        self.data = data
        self.updates: list[float] = []

    def first_window(self, look: Callable[[Sequence[Tensor]], None]) -> list[float]:
        """Run a window, call `look` with its final gradients, and return its losses."""
        parameters = self.loop.parameters
        hook = self.loop.inner.register_step_pre_hook(lambda *_: look([p.grad for p in parameters]))
        losses = self.loop.window(self.data)
        hook.remove()
        return torch.stack(losses).tolist()

    def peak(self, before: int) -> int:
        """Run a window on a GPU. Return its peak of live bytes, without those of `before`."""
        torch.cuda.reset_peak_memory_stats()
        self.loop.window(self.data)
        return torch.cuda.max_memory_allocated() - before

    def run(self) -> float:
        """Run a window, and return the seconds of a micro-batch."""
        clock = Clock(self.task.device)
        self.loop.window(self.data, clock.phase)
        found = clock.seconds()
        self.updates.append(found["update"])
        return sum(found.values()) / len(self.data)


def _distance(values: Sequence[Tensor], others: Sequence[Tensor] | None = None) -> Tensor:
    """Return the norm of the difference of two lists, or of one list."""
    squares = []
    for index, value in enumerate(values):
        difference = value.float()
        if others is not None:
            difference = difference - others[index]
        squares.append(difference.square().sum(dtype=torch.float64))
    return torch.stack(squares).sum().sqrt()


class Cell:
    """The rows of one case: one mode and one size of micro-batch."""

    def __init__(self, results: Results, template: gpt.GPT, size: Size, mode: str, tokens: int) -> None:
        quick = size == QUICK
        backend = ""
        if mode != EAGER:
            backend = "aot_eager" if quick else "inductor"
        self.results = results
        self.quick = quick
        self.task = Training(template, size.context, tokens, STEPS, backend)
        self.data = self.task.window()
        parameters = sum(p.numel() for p in template.parameters())
        shapes = f"{size}, {parameters / 1e6:.1f} M parameters; "
        shapes += f"sequences of {size.context}, windows of {STEPS}"
        self.case = Case("end_to_end", f"{tokens} tokens", mode, shapes, "bfloat16 into float32")
        # The first way's final gradient and losses.
        self.reference = [torch.zeros_like(parameter) for parameter in template.parameters()]
        self.losses: list[float] = []
        self.peaks: dict[str, float] = {}

    def prepare(self, way: LoopVariant) -> Contestant | None:
        """Check a way and add its error and its peak. Return None if it does not train as the first."""
        on_gpu = self.task.device.type == "cuda"
        gc.collect()  # a way that failed may have left memory
        before = torch.cuda.memory_allocated() if on_gpu else 0
        contestant = Contestant(way, self.task, self.data)
        errors = []

        def compare(gradients: Sequence[Tensor]) -> None:
            if not self.losses:
                torch._foreach_copy_(self.reference, gradients)
            errors.append((_distance(gradients, self.reference) / _distance(self.reference)).item())

        losses = contestant.first_window(compare)
        self.losses = self.losses or losses
        (error,) = errors
        problem = self.problem(losses, error)
        note = "" if way.exact else "inexact"
        figure = {"metric": "gradient error", "unit": "", "median": error, "note": note}
        self.results.add([row(self.case, way.name, **figure)])
        if problem is not None:
            self.results.add([cannot_run(self.case, way.name, problem)])
            contestant.loop.close()
            return None
        if on_gpu:
            peak = contestant.peak(before)
        else:
            contestant.loop.window(self.data)
            peak = sum(way.peak(self.task, [self.data] * 2).values())
        self.peaks[way.name] = peak / 1e6
        self.results.add(
            records.value_rows(self.case, "peak memory", "MB", {way.name: peak / 1e6}, self.limits(way))
        )
        return contestant

    def problem(self, losses: Sequence[float], error: float) -> str | None:
        """Return why a way does not train as the first does, or None."""
        different = max(abs(ours / theirs - 1) for ours, theirs in zip(losses, self.losses, strict=True))
        if not different <= MOST_DIFFERENCE:
            return f"wrong: a loss differs by {different:.2g} of its value"
        if not error <= MOST_ERROR:
            return f"wrong: the gradient's error is {error:.2g} of its norm"
        return None

    def limits(self, way: LoopVariant) -> Mapping[str, tuple]:
        """Return the goal of a way's peak."""
        stock = [self.peaks[other.name] for other in WAYS if other.competes and other.name in self.peaks]
        if way.competes or way is INEXACT or not stock or self.quick:
            return {}
        room = 2 * sum(p.numel() for p in self.reference) / 1e6 + waiting_megabytes(self.task.device)
        return {way.name: (min(stock) + room, "the lower of PyTorch's + cast")}

    def measure(self, rounds: int, deadline: Deadline) -> None:
        """Add the rows of all ways."""
        ready: dict[LoopVariant, Contestant] = {}
        begin = len(self.results.rows)
        for way in harness.progress(WAYS, f"{self.case.case}, {self.case.mode}", "way"):
            if deadline.passed():
                self.results.add([cannot_run(self.case, way.name, deadline.why())])
                continue
            if found := self.results.attempt(self.case, [way.name], self.prepare, way):
                ready[way] = found
        runs = {way.name: contestant.run for way, contestant in ready.items()}

        def until_the_deadline() -> Iterator[int]:
            for index in harness.rounds(rounds, self.case.case):
                if index > 0 and deadline.passed():
                    return
                yield index

        if not ready:
            return
        seconds = take_turns(runs, until_the_deadline(), lambda run, calls: run())
        stock = [way.name for way in ready if way.competes]
        least = 0.0 if self.quick else 1.0
        ours = (WRAPPED.name, INSIDE.name, FUSED.name)
        goals = {name: [Goal(other, least) for other in stock] for name in ours}
        self.results.add(records.timed_rows(self.case, seconds, goals))
        for way, contestant in ready.items():
            updates = contestant.updates[-len(seconds[way.name]) :]
            self.results.add(
                [row(self.case, way.name, metric="time: update", **records.spread(updates, 1e6))]
            )
            contestant.loop.close()
        # The printed table has one block for each metric. The file has the rows as they were measured.
        own_rows = self.results.rows[begin:]
        self.results.rows[begin:] = sorted(own_rows, key=lambda row: METRICS.index(row.metric))


def figures(results: Results, effort: str, seconds: float | None = None) -> None:
    """Measure all cases, or as many as `seconds` allow."""
    deadline = Deadline(seconds)
    quick = effort == "quick"
    size = QUICK if quick else SIZES[results.device.type]
    cases = QUICK_CASES if quick else CASES[results.device.type]
    by_tokens = sorted({tokens for _, tokens in cases})
    template = gpt.template(size, results.device)
    for mode, tokens in cases:
        cell = Cell(results, template, size, mode, tokens)
        if deadline.passed():
            results.add([cannot_run(cell.case, "all", deadline.why())])
            continue
        compiling: contextlib.AbstractContextManager = contextlib.nullcontext()
        if mode == COMPILED:
            compiling = torch._dynamo.config.patch(recompile_limit=RECOMPILATIONS)
        with compiling:
            cell.measure(ROUNDS[effort][by_tokens.index(tokens)], deadline)
        del cell
        torch.compiler.reset()
        gc.collect()


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--seconds", type=float, help="start nothing new after this time (default: no limit)")
    options = parser.parse_args()
    harness.run(figures, options, seconds=options.seconds)


if __name__ == "__main__":
    main()
