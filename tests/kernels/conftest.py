"""Fixtures for the tests of kernels."""

from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _two_threads(threads: Callable[[int], None]) -> None:
    """Other tests use one thread, and would not run the parallel loops."""
    threads(2)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Set PyTorch's number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
