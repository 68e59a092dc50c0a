"""Measures what a call allocates on the CPU, with PyTorch's profiler."""

import gc
import itertools
import os
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile


def has_amx() -> bool:
    """Return whether oneDNN multiplies 16-bit matrices with AMX, for which it copies operands in blocks."""
    cpu = Path("/proc/cpuinfo")
    return (
        cpu.exists()
        and "amx_bf16" in cpu.read_text()
        and "AVX" not in os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    )


def _allocations(run: Callable[[], object]) -> list[int]:
    """Return the bytes of each allocation, in order. A release counts negatively."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def peak_of(run: Callable[[], object]) -> int:
    """Return the peak of the bytes that `run` has allocated and not freed.

    Garbage is not collected while it runs: freeing what was allocated earlier would lower the peak.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return max(itertools.accumulate(_allocations(run), initial=0))
    finally:
        if was_enabled:
            gc.enable()


def kept_by(run: Callable[[], object]) -> int:
    """Return the bytes that `run` has allocated and not freed, less what it has freed of earlier memory."""
    return sum(_allocations(run))


def largest_allocation(run: Callable[[], object]) -> int:
    """Return the bytes of the largest allocation."""
    return max(_allocations(run), default=0)


def allocated_by(run: Callable[[], object]) -> int:
    """Return the bytes of all allocations."""
    return sum(nbytes for nbytes in _allocations(run) if nbytes > 0)
