"""Cases of `bench` that try its code and measure nothing: the effort `TINY`."""

from collections.abc import Iterator
from unittest import mock

import torch

from fusedacc.commands import bench
from fusedacc.commands.bench import comparison
from fusedacc.commands.bench.cases import OTHER_PAIRS, PAIRS, Additions, Norms, Work

TINY = comparison.Effort(
    "tiny",
    seconds=0.0,
    least_rounds=7,
    most_rounds=7,
    sample_seconds=0.0,
    cold_bytes=1024,
    most_sets=2,
)


def tiny_cases(device: torch.device) -> Iterator[Work]:
    shapes = ((33,), (4, 5), (0,), (300,))
    for pair in (*PAIRS, *OTHER_PAIRS):
        yield Additions("4 tensors", shapes, pair, device)
    for dtype in (torch.float32, torch.bfloat16):
        yield Norms("4 tensors", shapes, dtype, device)


def with_tiny_cases() -> mock._patch:
    """Return a patch by which `bench` knows the effort "tiny"."""
    real = bench.cases_of
    return mock.patch.object(
        bench,
        "cases_of",
        lambda effort, device: tiny_cases(device) if effort == "tiny" else real(effort, device),
    )
