"""Training of the demo's transformer: time by phase, tokens per second, peak memory by kind, bytes.

- "time": one update; the loops take turns. "time: PHASE": between the boundaries of the phases. Accumulation
  runs inside the backward, where no clock can be read. So "time: backward" is that of `torch.autograd.grad`
  in the same round, which accumulates nothing; "time: accumulate" is what the loop takes longer than that.
- "peak memory" of live bytes during two updates of two micro-batches, and by kind (`loops.KINDS`).
- "bytes": in one window, per parameter, by a TrafficMeter: of weights, gradients with their sums, and
  optimizer state, also by phase. "bytes: others" are all the rest.

Goals relative to stock's best: no slower, and a peak no higher than the lowest, within 1 %. On a GPU the
gradients that may wait for a launch come on top. With `model=` the peak may not be higher at all.
`keep_casts=True` has the goals of `model=`, with a peak of 1 % more, and at least 0.98 of its speed.
"""

import contextlib
import dataclasses
import gc
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from examples.demo.loops import DTYPES
from examples.demo.measure import batches
from examples.demo.model import load_text
from fusedacc.accumulators.engine import LAUNCH_BYTES
from fusedacc.commands.timing import synchronize
from fusedacc.traffic import TrafficMeter

from .. import harness
from ..contestants import loops
from ..contestants.loops import BASELINE, INSIDE, KEPT, KINDS, PHASES, Demo, LoopVariant, Wrapped
from ..harness import measure, progress
from ..records import Case, Goal, Results, Row, Variant, row, spread, value_rows

#: How much more than the lowest of stock's a peak may be without `model=`.
PEAK_WRAPPED = 0.01
#: Of `keep_casts=True`: the least share of the speed of `model=`, and the share by which its peak may exceed
#: stock's, because casts stay after the backward of their layers.
AT_LEAST_KEPT, PEAK_KEPT = 0.98, 0.01
NAMES = {"bfloat16": "bfloat16 into float32", "autocast": "float32, autocast to bfloat16"}


def waiting_megabytes(device: torch.device) -> float:
    """Return how much memory the gradients may have that wait for a launch. On a CPU none wait."""
    return LAUNCH_BYTES / 1e6 if device.type == "cuda" else 0.0


@dataclasses.dataclass(frozen=True)
class Size:
    """How a model is trained and timed. `at_least`: goal of `model=`; `short`: dtypes of the short sweep."""

    width: int
    layers: int
    heads: int
    context: int = 64
    micro_batch_size: int = 8
    steps: int = 4
    rounds: int = 5
    at_least: float = 1.0
    short: tuple[str, ...] = DTYPES


#: By device, the largest last. Those of a GPU: the blocks of GPT-2 124M, and 1 B parameters.
SIZES = {
    "cpu": (
        Size(256, 3, 4, 128, 1, steps=8, rounds=7, at_least=1.05, short=("float32",)),
        Size(256, 3, 4),
        Size(512, 3, 8, rounds=3, short=("bfloat16",)),
        Size(1024, 3, 16, short=()),
    ),
    "cuda": (Size(768, 12, 12, 256, steps=8), Size(2048, 20, 16, 256, steps=8, short=("bfloat16",))),
}
QUICK = (Size(32, 2, 2, 16, micro_batch_size=2, steps=2, rounds=2, short=("float32", "bfloat16")),)


def figures(results: Results, effort: str) -> None:
    text = load_text()
    full = effort == "full"
    names = ("width", "layers", "heads", "context", "micro_batch_size")
    for size in QUICK if effort == "quick" else SIZES[results.device.type]:
        for dtype in DTYPES if full else size.short:
            config = Demo(dtype, results.device, size.steps, **{name: getattr(size, name) for name in names})
            ways = [way for way in loops.VARIANTS[dtype] if full or way is not loops.UNFUSED]
            cell = Cell(results, config, ways, text)
            cell.speed(size.rounds * (2 if full else 1), size.at_least)
            gc.collect()  # the models of all ways were alive at once
            cell.memory()
            cell.traffic()


class Clock:
    """Marks the ends of phases without waiting for the device. All time belongs to a phase."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[tuple[str, float | torch.cuda.Event]] = []
        synchronize(device)
        self._mark("start")

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield
        self._mark(loops.phase_of(name))

    def _mark(self, name: str) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((name, event))
        else:
            self.marks.append((name, time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        """Return the sum of each phase."""
        synchronize(self.device)
        found = dict.fromkeys(PHASES, 0.0)
        for (_, before), (name, after) in itertools.pairwise(self.marks):
            on_device = isinstance(after, torch.cuda.Event)
            found[name] += before.elapsed_time(after) / 1e3 if on_device else after - before
        return found


class Timed:
    """A loop, and the seconds of its updates by phase. Update i has the same data in every loop."""

    def __init__(self, way: LoopVariant, config: Demo, text: Tensor) -> None:
        self.loop = way.make(config)
        self.text = text
        self.seconds: list[dict[str, float]] = []
        self.run()

    def run(self) -> float:
        data = batches(self.text, self.loop.task, len(self.seconds))
        clock = Clock(self.loop.task.device)
        self.loop.update(data, clock.phase)
        self.seconds.append(clock.seconds())
        return sum(self.seconds[-1].values())


def goals_of(
    way: LoopVariant, running: Sequence[LoopVariant], first: LoopVariant, at_least: float
) -> tuple[Goal, ...]:
    """Return a goal relative to every competitor that runs; relative to `first` only the ratio is shown.

    at_least: the goal of `model=`.
    """
    if not issubclass(way.kind, Wrapped):
        return ()
    goal = at_least if way in (INSIDE, KEPT) else 1.0
    goals = [Goal(other.name, goal) for other in running if other.competes and way.fused]
    goals += [Goal(other.name, AT_LEAST_KEPT) for other in running if way is KEPT and other is INSIDE]
    return (*goals, *(Goal(other.name) for other in running if other is first))


@dataclasses.dataclass
class Cell:
    """The rows of one model and dtype."""

    results: Results
    config: Demo
    ways: Sequence[LoopVariant]
    text: Tensor

    def __post_init__(self) -> None:
        config = self.config
        shapes = f"{config.parameters / 1e6:.1f} M parameters, {config.layers} blocks; {config.micro_batches}"
        small = f", micro-batch of {config.context}" if config.micro_batch_size == 1 else ""
        dtypes = NAMES.get(config.dtype, config.dtype)
        self.case = Case("training", f"demo, width {config.width}{small}", "training", shapes, dtypes)

    def speed(self, rounds: int, at_least: float) -> None:
        """Add the time per update, tokens per second, and the time by phase."""
        timed: dict[str, Timed] = {}
        for way in (*self.ways, BASELINE):
            found = self.results.attempt(self.case, [way.name], Timed, way, self.config, self.text)
            timed |= {way.name: found} if found else {}
        running = [way for way in (*self.ways, BASELINE) if way.name in timed]
        goals = {way.name: goals_of(way, running, self.ways[0], at_least) for way in running}
        variants = [Variant(name, timed[name].run, goals=of_loop) for name, of_loop in goals.items()]
        self.results.add(measure(self.case, variants, rounds, timer=lambda run, calls: run()))
        training = [way.name for way in running if way is not BASELINE]
        tokens = self.config.steps * self.config.micro_batch_size * self.config.context
        seconds = {name: of_loop.seconds[-rounds:] for name, of_loop in timed.items()}
        for name in training:
            rates = spread([tokens / sum(phases.values()) for phases in seconds[name]])
            self.results.add([row(self.case, name, metric="tokens per second", unit="tok/s", **rates)])
        for phase, name in itertools.product(PHASES if BASELINE.name in timed else (), training):
            found = []
            for phases, plain in zip(seconds[name], seconds[BASELINE.name], strict=True):
                longer = phases["backward"] - plain["backward"] + phases["accumulate"]
                found.append({**phases, "backward": plain["backward"], "accumulate": longer}[phase])
            self.results.add([row(self.case, name, metric=f"time: {phase}", **spread(found, 1e6))])

    def memory(self) -> None:
        """Add the peak memory of two updates of two micro-batches, and its kinds."""
        config = dataclasses.replace(self.config, steps=min(2, self.config.steps))
        data = [batches(self.text, config, update) for update in range(2)]
        kinds = {
            way.name: self.results.attempt(self.case, [way.name], way.peak, config, data)
            for way in progress(self.ways, f"{self.case.case}, memory", "way")
        }
        ways = [way for way in self.ways if kinds[way.name]]
        peaks = {way.name: sum(kinds[way.name].values()) / 1e6 for way in ways}
        best = min((peaks[way.name] for way in ways if way.competes), default=None)
        limits = {}
        for way in ways if best is not None else ():
            if way in (INSIDE, KEPT):
                limits[way.name] = best, "the lowest of stock", PEAK_KEPT if way is KEPT else 0.0
            elif issubclass(way.kind, Wrapped):
                limit = best + waiting_megabytes(self.config.device)
                limits[way.name] = limit, "the lowest of stock", PEAK_WRAPPED
        self.results.add(value_rows(self.case, "peak memory", "MB", peaks, limits))
        for kind in KINDS:
            megabytes = {way.name: kinds[way.name][kind] / 1e6 for way in ways}
            self.results.add(value_rows(self.case, f"peak memory: {kind}", "MB", megabytes))

    def traffic(self) -> None:
        """Add the bytes per parameter of each way's second window, by phase."""
        parameters = self.config.parameters
        case = self.case

        def moved(name: str, metric: str, size: int, **columns: Any) -> Row:
            figure = {"metric": metric, "unit": "B/param", "bytes": size, "median": size / parameters}
            return row(case, name, **figure, **columns)

        counts = {
            way.name: found
            for way in progress(self.ways, f"{case.case}, bytes", "way")
            if (found := self.results.attempt(case, [way.name], count, way, self.config, self.text))
        }
        for name, found in counts.items():
            known = sum(of_known(kinds) for kinds in found["by_phase_and_kind"].values())
            note = f"not counted: {', '.join(found['uncounted'])}" if found["uncounted"] else ""
            self.results.add([moved(name, "bytes", known, launches=found["calls"], note=note)])
        for phase, (name, found) in itertools.product(PHASES, counts.items()):
            known = of_known(found["by_phase_and_kind"].get(phase, {}))
            self.results.add([moved(name, f"bytes: {phase}", known)])
        for name, found in counts.items():
            self.results.add([moved(name, "bytes: others", found["by_kind"].get("other", 0))])


def of_known(kinds: dict[str, int]) -> int:
    return sum(kinds.get(kind, 0) for kind in ("weights", "gradients", "optimizer"))


def count(way: LoopVariant, config: Demo, text: Tensor) -> dict[str, Any]:
    """Return what the meter counts in a loop's second update, when all state exists."""
    loop = way.make(config)
    loop.update(batches(text, loop.task, 0))
    with TrafficMeter(loop.model) as meter:

        def phase(name: str) -> contextlib.AbstractContextManager:
            # The meter recognises forward and backward, and accumulation inside a backward.
            known = loops.phase_of(name) in ("forward", "backward")
            return contextlib.nullcontext() if known else meter.phase(loops.phase_of(name))

        loop.update(batches(text, loop.task, 1), phase)
    return meter.as_dict()


if __name__ == "__main__":
    harness.run(figures, harness.arguments(__doc__).parse_args())
