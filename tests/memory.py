"""What a call allocates on the CPU, as torch's profiler sees it."""

import gc
import itertools
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def _allocations(run: Callable[[], object]) -> list[int]:
    """Bytes of each, in their order; what is freed counts negatively."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def peak_of(run: Callable[[], object]) -> int:
    """How many bytes more than before are alive in `run` at its peak."""
    gc.collect()
    return max(itertools.accumulate(_allocations(run), initial=0))


def largest_allocation(run: Callable[[], object]) -> int:
    """Bytes of the largest one."""
    return max(_allocations(run), default=0)


def allocated_by(run: Callable[[], object]) -> int:
    """Bytes of all of them."""
    return sum(nbytes for nbytes in _allocations(run) if nbytes > 0)
