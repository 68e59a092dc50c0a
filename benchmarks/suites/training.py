"""Training the demo's transformer, end to end: time by phase, tokens per second, peak memory by kind, bytes.

Every loop trains the same model on the same text (`loops.VARIANTS`). The rows of a loop:

- "time": one update, all its micro-batches; the loops take turns. "time: forward" and "time: update": by
  clock, or by CUDA events, at the boundaries of the phases. What accumulates runs inside the backward, where
  no clock can be put: "time: backward" is that of the same micro-batches through `torch.autograd.grad`, which
  accumulates nothing, timed in the same round, and "time: accumulate" is what the loop's own backward takes
  longer than that, with what its loop does after each backward. In each round the four add up to the update.
- "tokens per second", from the time of an update.
- "peak memory" of live bytes through two updates of two micro-batches, and by kind (`loops.KINDS`).
- "bytes": read and written in one window, per parameter, as `fusedacc.traffic.TrafficMeter` counts them, of
  weights, gradients with their sums, and optimizer state, also by phase; "bytes: others" are all the rest.

fusedacc is held to the best of stock: no slower, and no higher a peak than the lowest plus one bucket of
25 MB; with `model=` no higher a peak than the lowest. In the case of 1 x 128 bytes per micro-batch, where the
sums' bytes weigh most, `model=` is to be at least 1.05 times as fast. Under autocast `keep_casts=True` is
held to all this as `model=` is, with a peak of 1 % more, and to 0.98 of its speed.

    python -m benchmarks.suites.training [--quick | --full] [--dtypes bfloat16] [--widths 256,512]
"""

from __future__ import annotations

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
from fusedacc.commands.measuring.records import (
    Case,
    Goal,
    Results,
    Row,
    Variant,
    at_most,
    cannot_run,
    first_line,
    row,
    spread,
)
from fusedacc.commands.measuring.timing import synchronize
from fusedacc.traffic import TrafficMeter

from .. import harness
from ..contestants.loops import (
    BASELINE,
    INSIDE,
    KEPT,
    KINDS,
    PHASES,
    UNFUSED,
    VARIANTS,
    Demo,
    Loop,
    LoopVariant,
    Wrapped,
    phase_of,
)
from ..harness import chosen, measure, progress

BUCKET = 25_000_000
#: With `keep_casts=True`: of the speed of `model=`; by what share its peak may be above stock's, since casts
#: stay when their layers' backward is over.
AT_LEAST_KEPT, PEAK_KEPT = 0.98, 0.01
META = torch.device("meta")
PEAK = {"metric": "peak memory", "unit": "MB"}
NAMES = {"bfloat16": "bfloat16 into float32", "autocast": "float32, autocast to bfloat16"}
#: Losses that agree but for rounding are at most this far apart, relatively: the epsilon of the products,
#: and for float32 that of a few dozen of them in a row.
ROUNDING = {"float32": 2.0**-18, "bfloat16": 2.0**-8, "autocast": 2.0**-8}


@dataclasses.dataclass(frozen=True)
class Size:
    """A model, and how it is trained and timed.

    `at_least`: how many times as fast as the best of stock `model=` is to be. `short`: the dtypes that the
    short sweep measures.
    """

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


def figures(
    results: Results, effort: str, dtypes: Sequence[str] | None = None, widths: Sequence[int] | None = None
) -> None:
    """All rows of the sizes that are chosen (see `choose`)."""
    text = load_text()
    for size, dtype in choose(effort, results.device, dtypes, widths):
        shape = {"layers": size.layers, "heads": size.heads, "context": size.context}
        shape |= {"micro_batch_size": size.micro_batch_size, "width": size.width}
        config = Demo(dtype, results.device, size.steps, **shape)
        ways = [way for way in VARIANTS[dtype] if effort == "full" or way is not UNFUSED]
        one_case(results, config, ways, text, size.rounds * (2 if effort == "full" else 1), size.at_least)


def sizes(effort: str, device: torch.device) -> tuple[Size, ...]:
    return QUICK if effort == "quick" else SIZES["cuda" if device.type == "cuda" else "cpu"]


def choose(
    effort: str, device: torch.device, dtypes: Sequence[str] | None, widths: Sequence[int] | None
) -> list[tuple[Size, str]]:
    """Sizes with dtypes. The short sweep leaves some out, unless they are asked for by name."""
    full = effort == "full"
    return [
        (size, dtype)
        for size in sizes(effort, device)
        if (size.width in widths if widths else full or size.short)
        for dtype in dtypes or (DTYPES if full or widths else size.short)
    ]


def one_case(
    results: Results,
    config: Demo,
    ways: Sequence[LoopVariant],
    text: Tensor,
    rounds: int,
    at_least: float = 1.0,
) -> None:
    """Adds the rows of one model and dtype: times, then memory, then bytes."""
    parameters = sum(p.numel() for p in dataclasses.replace(config, device=META).model().parameters())
    shapes = (
        f"{parameters / 1e6:.1f} M parameters, {config.layers} blocks; "
        f"{config.steps} micro-batches of {config.micro_batch_size} x {config.context} bytes"
    )
    dtypes = NAMES.get(config.dtype, config.dtype)
    name = f"demo, width {config.width}"
    if config.micro_batch_size == 1:
        name += f", micro-batch of {config.context}"
    case = Case("training", name, "training", shapes, dtypes)
    results.add(speed(case, config, ways, text, rounds, at_least))
    gc.collect()  # all ways' models were alive at once
    results.add(memory(case, config, ways, text))
    results.add(traffic(case, config, ways, text, parameters))


# Time


class Clock:
    """Marks the ends of phases, without waiting for the device; all time is some phase's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[tuple[str, float | torch.cuda.Event]] = []
        synchronize(device)
        self._mark("start")

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield
        self._mark(phase_of(name))

    def _mark(self, name: str) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((name, event))
        else:
            self.marks.append((name, time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        """By phase, all its turns together."""
        synchronize(self.device)
        found = dict.fromkeys(PHASES, 0.0)
        for (_, before), (name, after) in itertools.pairwise(self.marks):
            on_device = isinstance(after, torch.cuda.Event)
            found[name] += before.elapsed_time(after) / 1e3 if on_device else after - before
        return found


class Timed:
    """A loop, and what each of its updates took; update i has the same data in every loop."""

    def __init__(self, loop: Loop, text: Tensor) -> None:
        self.loop, self.text = loop, text
        self.losses: list[float] = []
        self.seconds: list[dict[str, float]] = []

    def run(self) -> float:
        """Seconds of one update."""
        data = batches(self.text, self.loop.task, len(self.losses))
        clock = Clock(self.loop.task.device)
        loss = self.loop.update(data, clock.phase)
        self.seconds.append(clock.seconds())
        self.losses.append(loss.item())
        return sum(self.seconds[-1].values())


def by_phase(own: Sequence[dict[str, float]], baseline: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Each round's seconds with `backward` that of the baseline, and what it took longer in `accumulate`."""
    return [
        {
            **mine,
            "backward": plain["backward"],
            "accumulate": mine["backward"] - plain["backward"] + mine["accumulate"],
        }
        for mine, plain in zip(own, baseline, strict=True)
    ]


def speed(
    case: Case, config: Demo, ways: Sequence[LoopVariant], text: Tensor, rounds: int, at_least: float = 1.0
) -> list[Row]:
    """Time per update, tokens per second, and time by phase. `at_least`: as `Size.at_least`."""
    timed: dict[str, Timed] = {}
    failed = []
    for way in (*ways, BASELINE):
        try:
            timed[way.name] = Timed(way.make(config), text)
            timed[way.name].run()
        except Exception as error:
            timed.pop(way.name, None)
            failed.append(cannot_run(case, way.name, first_line(error)))
    running = [way for way in (*ways, BASELINE) if way.name in timed]
    variants = [
        Variant(way.name, timed[way.name].run, goals=goals_of(way, running, ways[0], at_least))
        for way in running
    ]
    found = measure(case, variants, rounds, timer=lambda run, calls: run())
    training = [way for way in running if way is not BASELINE]
    notes = {way.name: departure(timed, way, training, config) for way in training}
    rows = [dataclasses.replace(r, note=notes.get(r.provider, "")) for r in found]

    tokens = config.steps * config.micro_batch_size * config.context
    for way in training:
        totals = [sum(seconds.values()) for seconds in timed[way.name].seconds[-rounds:]]
        rates = [tokens / total for total in totals]
        rows.append(row(case, way.name, metric="tokens per second", unit="tok/s", **spread(rates)))
    for phase in PHASES if BASELINE.name in timed else ():
        for way in training:
            split = by_phase(timed[way.name].seconds[-rounds:], timed[BASELINE.name].seconds[-rounds:])
            seconds = spread([of_round[phase] for of_round in split], 1e6)
            rows.append(row(case, way.name, metric=f"time: {phase}", **seconds))
    return rows + failed


def goals_of(
    way: LoopVariant, running: Sequence[LoopVariant], first: LoopVariant, at_least: float
) -> tuple[Goal, ...]:
    """fusedacc is held to every competitor that runs; against `first` only the ratio is shown.

    `at_least`: how many times as fast it is to be with `model=`.
    """
    if not issubclass(way.kind, Wrapped):
        return ()
    goal = at_least if way in (INSIDE, KEPT) else 1.0
    held_to = [Goal(other.name, goal) for other in running if other.competes and way.fused]
    if way is KEPT:
        held_to += [Goal(other.name, AT_LEAST_KEPT) for other in running if other is INSIDE]
    return (*held_to, *(Goal(other.name) for other in running if other is first))


def departure(timed: dict[str, Timed], way: LoopVariant, running: Sequence[LoopVariant], config: Demo) -> str:
    """A note if the losses of a way's first two updates are not those of the ways before it.

    Before the first update all weights are equal, so the losses must be. After it, on a CPU, they still must
    between exact ways whose AdamW is the same code: all sum in float32 in the same order, and the number of
    micro-batches is a power of two. Else they may differ by rounding.
    """
    losses = timed[way.name].losses
    notes = []
    for other in running[: running.index(way)]:
        wanted = timed[other.name].losses
        exact = other.fused == way.fused and other.exact and way.exact and config.device.type == "cpu"
        for update, bound in enumerate((0.0, 0.0 if exact else ROUNDING[config.dtype])):
            if not abs(losses[update] - wanted[update]) <= bound * abs(wanted[update]):
                notes.append(f"loss of update {update + 1} is {losses[update]:.7g}, of {other.name} ")
                notes[-1] += f"{wanted[update]:.7g}: more than rounding"
    return "; ".join(notes)


# Memory and bytes


def memory(case: Case, config: Demo, ways: Sequence[LoopVariant], text: Tensor) -> list[Row]:
    """Peak memory of each way through two updates of two micro-batches, and what it was made of."""
    config = dataclasses.replace(config, steps=min(2, config.steps))
    data = [batches(text, config, update) for update in range(2)]
    kinds: dict[str, dict[str, int]] = {}
    failed = []
    for way in progress(ways, f"{case.case}, memory", "way"):
        try:
            kinds[way.name] = way.peak(config, data)
        except Exception as error:
            failed.append(dataclasses.replace(cannot_run(case, way.name, first_line(error)), **PEAK))
    best = [sum(kinds[way.name].values()) for way in ways if way.competes and way.name in kinds]
    rows = []
    for way in ways:
        if way.name not in kinds:
            continue
        peak = sum(kinds[way.name].values())
        goal = {}
        if issubclass(way.kind, Wrapped) and best:
            bucket, words = (0, "") if way in (INSIDE, KEPT) else (BUCKET, " + bucket")
            room = PEAK_KEPT if way is KEPT else 0.0
            goal = at_most(min(best) + bucket, peak, f"the lowest of stock{words}", room)
        rows.append(row(case, way.name, **PEAK, median=peak / 1e6, **goal))
    for kind in KINDS:
        columns = {**PEAK, "metric": f"peak memory: {kind}"}
        rows += [row(case, name, **columns, median=found[kind] / 1e6) for name, found in kinds.items()]
    return rows + failed


def traffic(
    case: Case, config: Demo, ways: Sequence[LoopVariant], text: Tensor, parameters: int
) -> list[Row]:
    """Bytes per parameter of each way's second window, by phase."""
    rows, failed = [], []
    counts = {}
    for way in progress(ways, f"{case.case}, bytes", "way"):
        try:
            counts[way.name] = count(way.make(config), text)
        except Exception as error:
            failed.append(dataclasses.replace(cannot_run(case, way.name, first_line(error)), metric="bytes"))
    for name, found in counts.items():
        phases = found["by_phase_and_kind"]
        known = sum(of_known(kinds) for kinds in phases.values())
        uncounted = ", ".join(found["uncounted"])
        columns = {"bytes": known, "launches": found["calls"]}
        columns["note"] = f"not counted: {uncounted}" if uncounted else ""
        rows.append(row(case, name, metric="bytes", unit="B/param", median=known / parameters, **columns))
    for phase in PHASES:
        for name, found in counts.items():
            known = of_known(found["by_phase_and_kind"].get(phase, {}))
            figure = {"metric": f"bytes: {phase}", "unit": "B/param", "bytes": known}
            rows.append(row(case, name, **figure, median=known / parameters))
    for name, found in counts.items():
        other = found["by_kind"].get("other", 0)
        figure = {"metric": "bytes: others", "unit": "B/param", "bytes": other}
        rows.append(row(case, name, **figure, median=other / parameters))
    return rows + failed


def of_known(kinds: dict[str, int]) -> int:
    return sum(kinds.get(kind, 0) for kind in ("weights", "gradients", "optimizer"))


def count(loop: Loop, text: Tensor) -> dict[str, Any]:
    """What the meter counts in a loop's second update, when all state is there."""
    loop.update(batches(text, loop.task, 0))
    with TrafficMeter(loop.model) as meter:

        def phase(name: str) -> contextlib.AbstractContextManager:
            # Forward and backward the meter knows, and what accumulates inside a backward too.
            known = phase_of(name) in ("forward", "backward")
            return contextlib.nullcontext() if known else meter.phase(phase_of(name))

        loop.update(batches(text, loop.task, 1), phase)
    return meter.as_dict()


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--dtypes", help=f"some of {', '.join(DTYPES)}")
    parser.add_argument("--widths", help="of the model; which there are depends on the device")
    options = parser.parse_args()
    effort, device = harness.effort(options), torch.device(options.device)
    dtypes = chosen(options.dtypes, DTYPES, "dtype") if options.dtypes else None
    known = list(dict.fromkeys(str(size.width) for size in sizes(effort, device)))
    widths = [int(w) for w in chosen(options.widths, known, "width")] if options.widths else None
    harness.run(figures, options, dtypes=dtypes, widths=widths)


if __name__ == "__main__":
    main()
