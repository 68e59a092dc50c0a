"""A window on two ranks: the wrapper's reduction against stock's best DistributedDataParallel.

Two processes of one thread each, gloo over loopback, train the demo's transformer on different data. "peak
memory" is of live bytes beyond the parameters, on the first rank, during two windows of two micro-batches. It
is the least of three, because the profiler misses what gloo's threads free.
"""

import contextlib
import dataclasses
import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from examples.demo.measure import batches
from examples.demo.model import load_text
from fusedacc.commands.timing import Run, take_turns
from fusedacc.planner.allocations import recorded_peak

from .. import harness, records
from ..contestants.loops import F32, Demo, HookSums, Loop, LoopVariant, MicroBatch, MixedAdd, Task, Wrapped
from ..harness import ONE_THREAD, processes, progress

RANKS = 2
#: Rounds that are not timed: the first windows make optimizer state, and both reducers learn the order.
UNTIMED = 2
#: The least speed of the plain wrapper relative to a competitor, by dtype.
AT_LEAST = {"float32": 1 / 1.05, "bfloat16": 1.0}
#: Bytes per parameter by which the plain wrapper's peak is below stock's, in float32.
SAVED = 3
ABOVE = "peak above the parameters"
NAMES = {"float32": "float32", "bfloat16": "bfloat16 into float32"}


class StockDDP(Loop):
    """DistributedDataParallel, which synchronizes only in the last micro-batch of a window."""

    views = False

    def build(self, task: Task) -> nn.Module:
        return DistributedDataParallel(task.model(), gradient_as_bucket_view=self.views)

    def micro_batch(self, micro_batch: MicroBatch, is_last: bool) -> Tensor:
        with contextlib.nullcontext() if is_last else self.model.no_sync():
            return super().micro_batch(micro_batch, is_last)


class ViewsDDP(StockDDP):
    views = True


class SumsByHand(MixedAdd):
    """bfloat16 parameters with float32 sums in one block of memory.

    A hook adds each gradient by a mixed `add_`, and one `all_reduce` after the last backward adds the ranks'.
    """

    def prepare(self) -> None:
        sizes = [parameter.numel() for parameter in self.parameters]
        self.memory = torch.empty(sum(sizes), dtype=F32)
        parts = zip(self.memory.split(sizes), self.parameters, strict=True)
        self.accumulators = [part.view_as(parameter) for part, parameter in parts]
        for parameter in self.parameters:
            dist.broadcast(parameter.detach(), 0)
        self.hook_sums = HookSums(self.parameters, self.accumulators)

    def micro_batch(self, micro_batch: MicroBatch, is_last: bool) -> Tensor:
        loss = self.task.loss(self.model, *micro_batch)
        (loss / (self.task.steps * dist.get_world_size())).backward()
        return loss

    def cast(self) -> None:
        dist.all_reduce(self.memory)
        super().cast()


class WrappedDDP(Wrapped):
    def build(self, task: Task) -> nn.Module:
        return DistributedDataParallel(task.model())

    def options(self) -> dict[str, Any]:
        return {**super().options(), "data_parallel": self.model}


class InsideDDP(WrappedDDP):
    """fusedacc with `model=`."""

    def options(self) -> dict[str, Any]:
        return {**super().options(), "model": self.model.module}


PLAIN, MODEL = LoopVariant("fusedacc", WrappedDDP), LoopVariant("fusedacc, model=", InsideDDP)
STOCK = LoopVariant("stock DDP, no_sync", StockDDP, competes=True)
VIEWS = LoopVariant("stock DDP, no_sync, gradient_as_bucket_view", ViewsDDP, competes=True)
BY_HAND = LoopVariant("stock, float32 sums by hand", SumsByHand, competes=True)
#: By dtype of the parameters.
VARIANTS = {"float32": (STOCK, VIEWS, PLAIN, MODEL), "bfloat16": (BY_HAND, PLAIN, MODEL)}


def figures(results: records.Results, effort: str) -> None:
    sizes = {"quick": (32, 2, 16, 2, 3), "short": (256, 3, 64, 4, 11), "full": (256, 3, 64, 4, 41)}
    width, layers, context, size, rounds = sizes[effort]
    shape = {"width": width, "layers": layers, "context": context, "micro_batch_size": size}
    for dtype in progress(VARIANTS, "data parallel", "dtype"):
        config = Demo(dtype, torch.device("cpu"), 4, **shape)
        parameters = config.parameters
        shapes = f"{parameters / 1e6:.1f} M parameters; {RANKS} processes of one thread, gloo over loopback; "
        shapes += f"{config.micro_batches} each"
        name = f"{RANKS} ranks, demo, width {width}"
        mode = f"window k={config.steps}"
        case = records.Case("data_parallel", name, mode, shapes, NAMES[dtype])
        ways = VARIANTS[dtype]
        found = on_ranks(results, case, [way.name for way in ways], measure_rank, config, rounds)
        if not found:
            continue
        goals = {
            way.name: [records.Goal(other.name, least) for other in ways if other.competes]
            for way, least in ((PLAIN, AT_LEAST[dtype]), (MODEL, 0.0))
        }
        results.add(records.timed_rows(case, found[0], goals))
        itemsize = getattr(torch, dtype).itemsize
        above = dataclasses.replace(case, mode=ABOVE)
        peaks = {name: peak / parameters - itemsize for name, peak in found[1].items()}
        limits = {}
        if STOCK.name in peaks:
            limits[PLAIN.name] = peaks[STOCK.name] - SAVED, f"{STOCK.name} less {SAVED} B/param"
        results.add(records.value_rows(above, "peak memory", "B/param", peaks, limits))


def on_ranks(
    results: records.Results, case: records.Case, names: list[str], measure: Callable[..., Any], *given: Any
) -> Any:
    """Return what `measure(*given)` returns on the first rank; None after rows that say why it cannot."""
    if results.device.type != "cpu":
        why = "two ranks need two GPUs, or --device cpu"
        results.add([records.cannot_run(case, name, why) for name in names])
        return None
    return results.attempt(case, names, on_all_ranks, measure, *given)


def on_all_ranks(measure: Callable[..., Any], *arguments: Any) -> Any:
    """Run `measure(*arguments)` on all ranks at once. Return what the first one returns."""
    loopback = {**ONE_THREAD, "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder, processes(loopback, RANKS) as pool:
        meeting = Path(folder, "meeting")
        ranks = [pool.submit(run_rank, rank, meeting, measure, *arguments) for rank in range(RANKS)]
        first, *_ = [rank.result() for rank in ranks]  # all results, or the error of any
        return first


def run_rank(rank: int, meeting: Path, measure: Callable[..., Any], *arguments: Any) -> Any:
    """Run `measure(*arguments)` in this process, as one rank."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    try:
        found = measure(*arguments)
        gc.collect()  # when the threads of the group end, there is no reducer, and no rank is ahead
        dist.barrier()
        return found
    finally:
        dist.destroy_process_group()


def between_barriers(run: Run, calls: int) -> float:
    """Return the seconds of one call on all ranks."""
    dist.barrier()
    start = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - start


def cpu_seconds(run: Run, calls: int) -> float:
    """Return the CPU time of one call, of all ranks together."""
    dist.barrier()
    start = time.process_time()
    run()
    spent = torch.tensor(time.process_time() - start, dtype=torch.float64)
    dist.all_reduce(spent)
    return spent.item()


def measure_rank(config: Demo, rounds: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Return the seconds of each round's window, and the bytes at the peak, by loop."""
    config = dataclasses.replace(config, seed=dist.get_rank())
    text = load_text()
    windows = [batches(text, config, update) for update in range(UNTIMED + rounds)]

    def window_of(way: LoopVariant) -> Run:
        loop = way.make(config)
        following = iter(windows)
        return lambda: loop.update(next(following))

    runs = {way.name: window_of(way) for way in VARIANTS[config.dtype]}
    seconds = take_turns(runs, range(-UNTIMED, rounds), between_barriers)
    del runs
    gc.collect()
    short = dataclasses.replace(config, steps=2, micro_batch_size=1)
    data = [batches(text, short, update) for update in range(2)]
    peaks = {}
    for way in VARIANTS[config.dtype]:
        alive: list[Any] = []  # so that the end of the loop is not measured

        def train(look: Any, way: LoopVariant = way, alive: list[Any] = alive) -> None:
            alive.append(way.make(short))
            for update in data:
                alive[-1].update(update)

        found = []
        for _ in range(3):
            found.append(recorded_peak(train, config.device, "all").bytes)
            alive.clear()
            gc.collect()
        peaks[way.name] = min(found)
    return seconds, peaks


if __name__ == "__main__":
    harness.run(figures, harness.arguments(__doc__).parse_args())
