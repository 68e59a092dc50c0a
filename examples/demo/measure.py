"""What the loops cost: losses, time, peak memory, calls, measured in the same way for all."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from .loops import LOOPS, Batches, Config, StockLoop, WrappedLoop
from .model import micro_batch

Loop = StockLoop | WrappedLoop


def batches(text: Tensor, config: Config, update: int) -> Batches:
    """The micro-batches of one update: the same for every loop."""
    first = (config.seed * 1_000_003 + update) * config.steps
    size, context = config.micro_batch_size, config.context
    return [micro_batch(text, first + i, config.device, size, context) for i in range(config.steps)]


def train(loop: Loop, text: Tensor, updates: int) -> Iterator[float]:
    """Yields the loss of each update."""
    for update in range(updates):
        yield loop.update(batches(text, loop.config, update))


def time_per_update(
    loops: Sequence[Loop], text: Tensor, rounds: int, tick: Callable[[], object]
) -> dict[str, float]:
    """Median seconds of an update for each loop. They take turns, in changing order, on the same data."""
    times: dict[str, list[float]] = {loop.name: [] for loop in loops}
    for turn in range(rounds):
        data = batches(text, loops[0].config, turn)
        for loop in loops if turn % 2 else reversed(loops):
            synchronize(loop.config.device)
            start = time.perf_counter()
            loop.update(data)
            synchronize(loop.config.device)
            times[loop.name].append(time.perf_counter() - start)
            tick()
    return {name: statistics.median(values) for name, values in times.items()}


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


def calls_per_micro_batch(config: Config, text: Tensor) -> dict[str, int]:
    """Kernel launches (CUDA) or operator calls (CPU) that accumulation adds to one backward, for each loop.

    Counted in the middle of a window, less those of the same backward through `torch.autograd.grad`, which
    accumulates nothing. Below 0 where casts of gradients that this makes are not needed.
    """
    inputs, targets = batches(text, config, 0)[0]
    on_gpu = config.device.type == "cuda"

    def count(model: nn.Module, backward: Callable[[Tensor], object]) -> int:
        with profile(activities=list(torch.profiler.supported_activities())) as profiler:
            backward(config.loss(model, inputs, targets))
            synchronize(config.device)
        return sum(is_kernel(event) if on_gpu else is_work(event) for event in profiler.events())

    plain = config.model()
    without = count(plain, lambda loss: torch.autograd.grad(loss, list(plain.parameters())))
    counts = {}
    for kind in LOOPS:
        loop = kind(config)
        config.loss(loop.model, inputs, targets).backward()
        if isinstance(loop, WrappedLoop):
            loop.optimizer.step()
        counts[loop.name] = count(loop.model, Tensor.backward) - without
    return counts


def is_kernel(event: torch.autograd.profiler_util.FunctionEvent) -> bool:
    no_kernels = ("Mem", "Activity Buffer")
    return event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(no_kernels)


def is_work(event: torch.autograd.profiler_util.FunctionEvent) -> bool:
    """Operators that call no other and touch data."""
    views = ("aten::empty", "aten::as_strided", "aten::view", "aten::_unsafe_view", "aten::detach")
    views += ("aten::to", "aten::resolve", "aten::result_type")  # `to` that casts calls another
    is_operator = event.name.startswith(("aten::", "fusedacc::")) and not event.name.startswith(views)
    return is_operator and not any(child.name.startswith("aten::") for child in event.cpu_children)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
