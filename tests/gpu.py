"""What tests on a GPU share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def on_gpu(value: object, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(value, dtype=dtype, device="cuda")


@contextlib.contextmanager
def nothing_waits() -> Iterator[None]:
    """Raises where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(step: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of what `step` does, and what it returned; it ran once before, which compiles and allocates."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result
