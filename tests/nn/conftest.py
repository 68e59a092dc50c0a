"""What tests of modules have in common."""

from unittest import mock

import pytest
import torch

from fusedacc.nn import convolution
from fusedacc.optimizer import parameters


@pytest.fixture(autouse=True)
def small_convolutions_keep_casts(monkeypatch):
    """Those of tests are small."""
    monkeypatch.setattr(convolution, "SMALLEST", 0)


@pytest.fixture
def fresh_compiler():
    """Nothing is compiled yet, and nothing is counted."""
    from torch._dynamo.utils import counters  # most tests need no compiler, which takes seconds to import

    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.fixture
def small_layers_too():
    """No layer is left to PyTorch for its size."""
    with (
        mock.patch.object(parameters, "why_left", return_value=""),
        mock.patch("fusedacc.nn.compiled.SMALL", 0),
    ):
        yield
