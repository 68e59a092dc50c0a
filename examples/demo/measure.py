"""What the loops cost: losses, time, peak memory, bytes, measured in the same way for all."""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fusedacc.commands.bench.timing import interval
from fusedacc.traffic import TrafficMeter

from .loops import Batches, Config, StockLoop, WrappedLoop
from .model import micro_batch

Loop = StockLoop | WrappedLoop
#: What a window's bytes are made of: weights and activations, then gradients, then the optimizer's step.
PARTS = ("forward and backward", "gradients written and summed", "update")
#: Updates of a loop that are not timed: optimizer state is made in the first, and what is chosen by trial.
UNTIMED = 2


def batches(text: Tensor, config: Config, update: int) -> Batches:
    """The micro-batches of one update: the same for every loop."""
    first = (config.seed * 1_000_003 + update) * config.steps
    size, context = config.micro_batch_size, config.context
    return [micro_batch(text, first + i, config.device, size, context) for i in range(config.steps)]


def train(loop: Loop, text: Tensor, updates: int) -> Iterator[float]:
    """Yields the loss of each update."""
    for update in range(updates):
        yield loop.update(batches(text, loop.config, update))


@dataclass(frozen=True)
class Length:
    """How long to train.

    Attributes:
        updates: the number of updates of each loop. None: as many as `seconds` allow, from `least` to `most`.
        seconds: the time for all loops together.
    """

    updates: int | None
    seconds: float
    least: int
    most: int

    def rounds(self, seconds_per_round: float) -> int:
        """Return the number of updates of each loop; `seconds_per_round` is the time of one update of all."""
        if self.updates is not None:
            return self.updates
        return max(self.least, min(self.most, int(self.seconds / seconds_per_round)))


def train_in_turns(
    loops: Sequence[Loop],
    text: Tensor,
    length: Length,
    tick: Callable[[float], object],
    decided: Callable[[int], object],
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the losses of every update, and the seconds of those that are timed, by loop.

    In each round every loop makes the same update, in an order that changes, so that work of others slows
    neighbours alike. `tick` is called with each loss, and `decided` with the number of rounds, which follows
    from the time of the last round that is not timed.
    """
    losses: dict[str, list[float]] = {loop.name: [] for loop in loops}
    times: dict[str, list[float]] = {loop.name: [] for loop in loops}
    orders = list(itertools.permutations(loops))
    rounds = UNTIMED if length.updates is None else min(UNTIMED, length.updates)
    update = 0
    while update < rounds:
        data = batches(text, loops[0].config, update)
        for loop in orders[update % len(orders)]:
            synchronize(loop.config.device)
            start = clock()
            losses[loop.name].append(loop.update(data))
            synchronize(loop.config.device)
            times[loop.name].append(clock() - start)
            tick(losses[loop.name][-1])
        update += 1
        if update == rounds <= UNTIMED:
            rounds = length.rounds(sum(seconds[-1] for seconds in times.values()))
            decided(rounds)
    untimed = min(UNTIMED, rounds - 1)
    return losses, {name: seconds[untimed:] for name, seconds in times.items()}


def ratio(times: Sequence[float], stock: Sequence[float]) -> tuple[float, float, float]:
    """Time against stock's: the median of the rounds' ratios, and the ends of its 95 % interval, or of their
    whole range below six rounds, which are too few for one."""
    ratios = [own / other for own, other in zip(times, stock, strict=True)]
    low, high = interval(ratios) or (min(ratios), max(ratios))
    return statistics.median(ratios), low, high


def bytes_by_part(kind: type[Loop], config: Config, text: Tensor) -> tuple[dict[str, int], int]:
    """What the meter counts in a loop's second update, when all state is there: bytes of each of `PARTS`, and
    the calls of operators that accumulate outside the backward of a layer."""
    loop = kind(config)
    loop.update(batches(text, config, 0))
    with TrafficMeter(loop.model) as meter:
        loop.update(batches(text, config, 1))
    counts = meter.as_dict()
    found = dict.fromkeys(PARTS, 0)
    for phase, kinds in counts["by_phase_and_kind"].items():
        for what, size in kinds.items():
            is_gradient = what == "gradients" and phase != "update"
            found["update" if phase == "update" else PARTS[is_gradient]] += size
    calls = counts["by_phase_and_op"].get("accumulate", {}).values()
    return found, sum(op["calls"] for op in calls)


def peak_memory(kind: type[Loop], config: Config, text: Tensor, updates: int = 2) -> int:
    """Peak bytes of live tensors from the model's construction through `updates` updates.

    On CUDA the caching allocator's own count; on the CPU every allocation and release that torch's allocator
    reports to the profiler, down to the byte, so the figure does not depend on malloc.
    """
    if config.device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(kind, config, text, updates)
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run(kind, config, text, updates)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = [event["args"] for event in sorted(events, key=_time) if event["name"] == "[memory]"]
    # The total may still hold what an earlier profile of this process has seen made and not let go.
    before = found[0]["Total Allocated"] - found[0]["Bytes"]
    return max(each["Total Allocated"] for each in found) - before


def _time(event: dict[str, Any]) -> float:
    return event.get("ts", 0.0)


def run(kind: type[Loop], config: Config, text: Tensor, updates: int) -> None:
    for _ in train(kind(config), text, updates):
        pass


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
