"""The example of FSDP2."""

from __future__ import annotations

import re

import pytest
import sweeps
from example_scripts import forked_output_of, output_of


def test_the_example_runs_on_two_ranks():
    """Under torchrun in `make test-full`."""
    pytest.importorskip("sklearn", reason="the examples read scikit-learn's digits")
    printed = (output_of if sweeps.FULL else forked_output_of)("fsdp2.py", 2)
    updates, accuracy = re.search(r"(\d+) updates, accuracy .*: ([\d.]+)%", printed).groups()
    assert int(updates) == 10 * 12  # 750 images of a rank are 23 micro-batches of 32 and one of 14
    assert float(accuracy) > 85
