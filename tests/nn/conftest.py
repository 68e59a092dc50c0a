"""Fixtures for the tests of modules."""

from unittest import mock

import pytest
import torch

from fusedacc.nn import convolution


@pytest.fixture(autouse=True)
def small_convolutions_keep_casts(monkeypatch):
    """Keep the casts of small convolutions, because those of the tests are small."""
    monkeypatch.setattr(convolution, "SMALLEST", 0)


@pytest.fixture
def fresh_compiler():
    """Reset the compiler and its counters."""
    from torch._dynamo.utils import counters  # importing the compiler takes seconds, and most tests need none

    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.fixture
def small_layers_too():
    """Let compiled graphs handle small layers, which they normally leave to PyTorch."""
    with mock.patch("fusedacc.nn.compiled.SMALL", 0):
        yield
