"""What tests of modules have in common."""

import pytest

from fusedacc.nn import convolution


@pytest.fixture(autouse=True)
def small_convolutions_keep_casts(monkeypatch):
    """Those of tests are small."""
    monkeypatch.setattr(convolution, "SMALLEST", 0)
