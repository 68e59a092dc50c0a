"""Measures losses, time, peak memory and bytes moved, in the same way for all loops."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from fusedacc.commands.timing import Run, synchronize, take_turns
from fusedacc.planner.allocations import recorded_peak
from fusedacc.traffic import TrafficMeter

from .loops import Batches, Config, StockLoop, WrappedLoop
from .model import micro_batch

Loop = StockLoop | WrappedLoop
#: The parts of a window's bytes: weights and activations, gradients, and the optimizer's step.
PARTS = ("forward and backward", "gradients written and summed", "update")
#: Warm-up updates of a loop, which are not timed. They create the optimizer state.
UNTIMED = 2


def batches(text: Tensor, config: Config, update: int) -> Batches:
    """Return the micro-batches of one update, which are the same for every loop."""
    first = (config.seed * 1_000_003 + update) * config.steps
    size, context = config.micro_batch_size, config.context
    return [micro_batch(text, first + i, config.device, size, context) for i in range(config.steps)]


def train(loop: Loop, text: Tensor, updates: int) -> Iterator[float]:
    """Train, and yield the loss of each update."""
    for update in range(updates):
        yield loop.update(batches(text, loop.config, update))


@dataclass(frozen=True)
class Length:
    """How long to train: `updates` of each loop, or as many as `seconds` for all loops together allow, from
    `least` to `most`.
    """

    updates: int | None
    seconds: float
    least: int
    most: int

    def rounds(self, seconds_per_round: float) -> int:
        """Return the number of updates of each loop, given the time for one update of every loop."""
        if self.updates is not None:
            return self.updates
        return max(self.least, min(self.most, int(self.seconds / seconds_per_round)))


def train_in_turns(
    loops: Sequence[Loop],
    text: Tensor,
    length: Length,
    tick: Callable[[float], object],
    decided: Callable[[int, float], object],
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Train the loops in turns.

    In each round every loop makes the same update. The order of the loops changes, so that other programs
    slow all loops alike. The time of the last warm-up round determines the number of rounds. Calls `tick`
    with each loss, and `decided` with the number of rounds and that time. Returns, for each loop, the losses
    of all updates and the seconds of the timed updates.
    """
    losses: dict[str, list[float]] = {loop.name: [] for loop in loops}

    def update_of(loop: Loop) -> Run:
        def run() -> None:
            losses[loop.name].append(loop.update(batches(text, loop.config, len(losses[loop.name]))))

        return run

    def timer(run: Run, calls: int) -> float:
        synchronize(loops[0].config.device)
        start = clock()
        run()
        synchronize(loops[0].config.device)
        taken = clock() - start
        tick(losses[loops[0].name][-1])
        return taken

    runs = {loop.name: update_of(loop) for loop in loops}
    first = UNTIMED if length.updates is None else min(UNTIMED, length.updates)
    times = take_turns(runs, range(first), timer)
    seconds_per_round = sum(seconds[-1] for seconds in times.values())
    rounds = length.rounds(seconds_per_round)
    decided(rounds, seconds_per_round)
    timed = take_turns(runs, range(first, rounds), timer)
    return losses, timed if rounds > first else {name: seconds[-1:] for name, seconds in times.items()}


def bytes_by_part(loop: Loop, text: Tensor, update: int) -> tuple[dict[str, int], int]:
    """Count the bytes that a loop moves in one more update, after an earlier one has created all state.

    Returns the bytes of each of `PARTS`, and the number of calls of operators that accumulate outside the
    backward of a layer.
    """
    with TrafficMeter(loop.model) as meter:
        loop.update(batches(text, loop.config, update))
    counts = meter.as_dict()
    found = dict.fromkeys(PARTS, 0)
    for phase, kinds in counts["by_phase_and_kind"].items():
        for what, size in kinds.items():
            is_gradient = what == "gradients" and phase != "update"
            found["update" if phase == "update" else PARTS[is_gradient]] += size
    calls = counts["by_phase_and_op"].get("accumulate", {}).values()
    return found, sum(op["calls"] for op in calls)


def peak_memory(kind: type[Loop], config: Config, text: Tensor, updates: int = 2) -> int:
    """Return the peak bytes of live tensors, from the model's construction through `updates` updates.

    The count uses the allocations and releases that PyTorch's allocator reports, so malloc has no influence.
    """
    return recorded_peak(lambda look: run(kind, config, text, updates), config.device, "all").bytes


def run(kind: type[Loop], config: Config, text: Tensor, updates: int) -> None:
    for _ in train(kind(config), text, updates):
        pass
