"""Helpers that the tests on a GPU share."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from fusedacc.kernels import registry

T = TypeVar("T")


def needs(backend: str) -> str:
    """Skip the test if this backend cannot run; return its name."""
    problem = registry.obstacle(backend, torch.device("cuda"), torch.float32, torch.float32)
    if problem is not None:
        pytest.skip(f"the {backend} backend cannot run here: {problem}")
    return backend


def needs_memory(nbytes: int) -> None:
    """Skip the test if less than this much memory is free."""
    free, _ = torch.cuda.mem_get_info()
    if free < nbytes:
        pytest.skip(f"needs {nbytes} bytes of GPU memory; {free} are free")


def launches(run: Callable[[], object]) -> list[str]:
    """Return the names of the kernels and copies that `run` launches."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    names = [event.name for event in profile.events() if event.device_type == cuda]
    # Ignore the profiler's own entries for the device.
    return [name for name in names if not name.startswith("Activity Buffer")]


def on_gpu(value: object, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(value, dtype=dtype, device="cuda")


@contextlib.contextmanager
def nothing_waits() -> Iterator[None]:
    """Raise an error if the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def side_stream() -> Iterator[torch.cuda.Stream]:
    """Run the block on a new stream, after the current stream's work so far and before its later work."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield side
    torch.cuda.current_stream().wait_stream(side)


def captured(step: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """Capture a CUDA graph of `step` and return the graph and the result of `step`.

    `step` runs once before the capture, to compile kernels and allocate memory.
    """
    with side_stream():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result
