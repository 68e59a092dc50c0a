"""Tests random programs over streams: the wrapper causes no errors and trains as plain PyTorch does."""

from __future__ import annotations

import os

import pytest
import torch
from emulation import torch_cuda
from emulation.programs import Program

pytestmark = pytest.mark.cuda
PROGRAMS = 60
SEED = int(os.environ.get("EMULATION_SEED", "0"))


def reports() -> list[str]:
    torch.cuda.synchronize()
    return torch_cuda.take_reports()


@pytest.mark.parametrize("number", range(PROGRAMS))
def test_nothing_is_unordered_or_reused_early(number):
    program = Program.random(1000 * SEED + number)
    expected = program.run(wraps=False)
    assert not reports(), f"the program itself is wrong: {program}"
    found = program.run(wraps=True)
    assert not reports(), program
    if program.equals_stock:
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
