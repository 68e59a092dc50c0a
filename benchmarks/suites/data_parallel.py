"""A window on two ranks: the wrapper's reduction against the best that stock DistributedDataParallel has.

Two processes of one thread each, gloo over loopback, train the demo's transformer on data of their own. The
time of a window is from a barrier to a barrier; loops take turns. "peak memory" is of live bytes above those
of the parameters, on the first rank, through two windows of two micro-batches; the least of three, since the
profiler misses what a thread of gloo's lets go, as it may the broadcast of the parameters in the beginning.

Goals of the plain wrapper: at most 1.05 times the time of each way of stock in float32, no slower than sums
by hand in bfloat16, and in float32 a peak at least 3 bytes a parameter below stock's.

    python -m benchmarks.suites.data_parallel [--quick | --full]
"""

from __future__ import annotations

import dataclasses
import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from examples.demo.measure import batches
from examples.demo.model import load_text
from fusedacc.commands.measuring import records
from fusedacc.commands.measuring.timing import Run, take_turns
from fusedacc.planner.allocations import recorded_peak

from .. import harness
from ..contestants.data_parallel_loops import MODEL, PLAIN, STOCK, VARIANTS
from ..contestants.loops import Demo, LoopVariant
from ..harness import ONE_THREAD, processes, progress

RANKS = 2
#: Rounds that are not timed: optimizer state is made, and both reducers learn, in the first windows.
UNTIMED = 2
#: How many times as fast as a competitor the plain wrapper is to be, by dtype.
AT_LEAST = {"float32": 1 / 1.05, "bfloat16": 1.0}
#: How many bytes a parameter below stock's the plain wrapper's peak is to be, in float32.
SAVED = 3
NAMES = {"bfloat16": "bfloat16 into float32"}


def figures(results: records.Results, effort: str) -> None:
    """All rows, of each dtype."""
    width, layers, context, size, rounds = {
        "quick": (32, 2, 16, 2, 3),
        "short": (256, 3, 64, 4, 11),
        "full": (256, 3, 64, 4, 41),
    }[effort]
    shape = {"width": width, "layers": layers, "context": context, "micro_batch_size": size}
    for dtype in progress(VARIANTS, "data parallel", "dtype"):
        config = Demo(dtype, torch.device("cpu"), 4, **shape)
        parameters = sum(p.numel() for p in config.model().parameters())
        shapes = f"{parameters / 1e6:.1f} M parameters; {RANKS} processes of one thread, gloo over loopback; "
        shapes += f"{config.steps} micro-batches of {size} x {context} bytes each"
        name = f"{RANKS} ranks, demo, width {width}"
        case = records.Case(
            "data_parallel", name, f"window k={config.steps}", shapes, NAMES.get(dtype, dtype)
        )
        if results.device.type != "cpu":
            results.add([records.cannot_run(case, PLAIN.name, "two ranks need two GPUs, or --device cpu")])
            continue
        try:
            seconds, peaks = on_all_ranks(measure_rank, config, rounds)
        except Exception as error:
            results.add(
                [records.cannot_run(case, way.name, records.first_line(error)) for way in VARIANTS[dtype]]
            )
            continue
        results.add(records.rows_of(case, [variant(way, dtype) for way in VARIANTS[dtype]], seconds))
        above = {name: peak / parameters - config_itemsize(config) for name, peak in peaks.items()}
        results.add(memory(dataclasses.replace(case, mode="peak above the parameters"), above))


def config_itemsize(config: Demo) -> int:
    """Bytes of a parameter."""
    return getattr(torch, config.dtype).itemsize


def variant(way: LoopVariant, dtype: str) -> records.Variant:
    """A way with what it is held against; of `model=` the ratios are shown."""
    held_to = [other.name for other in VARIANTS[dtype] if other.competes] if way in (PLAIN, MODEL) else []
    at_least = AT_LEAST[dtype] if way is PLAIN else 0.0
    return records.Variant(way.name, goals=tuple(records.Goal(name, at_least) for name in held_to))


def memory(case: records.Case, above: dict[str, float]) -> list[records.Row]:
    """The rows of the peaks, in bytes a parameter."""
    rows = []
    for name, value in above.items():
        goal = {}
        if name == PLAIN.name and STOCK.name in above:
            goal = records.at_most(above[STOCK.name] - SAVED, value, f"{STOCK.name} less {SAVED} B/param")
        rows.append(records.row(case, name, metric="peak memory", unit="B/param", median=value, **goal))
    return rows


def on_all_ranks(measure: Callable[..., Any], *arguments: Any) -> Any:
    """What `measure(*arguments)` returns on the first rank, where it runs on all at once."""
    loopback = {**ONE_THREAD, "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder, processes(loopback, RANKS) as pool:
        meeting = Path(folder, "meeting")
        ranks = [pool.submit(run_rank, rank, meeting, measure, *arguments) for rank in range(RANKS)]
        first, *_ = [rank.result() for rank in ranks]  # all, or the error of any
        return first


def run_rank(rank: int, meeting: Path, measure: Callable[..., Any], *arguments: Any) -> Any:
    """What `measure(*arguments)` returns in this process, as a rank."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    try:
        found = measure(*arguments)
        gc.collect()  # no reducer left, and no rank ahead, when the threads of the group end
        dist.barrier()
        return found
    finally:
        dist.destroy_process_group()


def measure_rank(config: Demo, rounds: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of each round's window, and bytes at the peak, by loop."""
    config = dataclasses.replace(config, seed=dist.get_rank())
    seconds = time_windows(config, rounds)
    gc.collect()
    short, text = dataclasses.replace(config, steps=2, micro_batch_size=1), load_text()
    peaks = {}
    for way in VARIANTS[config.dtype]:
        alive: list[Any] = []  # whose end is not to be measured

        def train(look: Any, way: LoopVariant = way, alive: list[Any] = alive) -> None:
            alive.append(way.make(short))
            for update in range(2):
                alive[-1].update(batches(text, short, update))

        found = []
        for _ in range(3):
            found.append(recorded_peak(train, config.device, "all").bytes)
            alive.clear()
            gc.collect()
        peaks[way.name] = min(found)
    return seconds, peaks


def time_windows(config: Demo, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round's window, by loop."""
    text = load_text()

    data = [batches(text, config, update) for update in range(UNTIMED + rounds)]

    def window_of(way: LoopVariant) -> Run:
        loop, own = way.make(config), iter(data)
        return lambda: loop.update(next(own))

    def between_barriers(run: Run, calls: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        run()
        dist.barrier()
        return time.perf_counter() - start

    runs = {way.name: window_of(way) for way in VARIANTS[config.dtype]}
    return take_turns(runs, range(-UNTIMED, rounds), between_barriers)


def main() -> None:
    harness.run(figures, harness.arguments(__doc__).parse_args())


if __name__ == "__main__":
    main()
