"""What reports say of a machine that tells little about itself."""

from pathlib import Path

import pytest
import torch

from fusedacc.commands import machine
from fusedacc.kernels import machine_names

CPU = torch.device("cpu")


@pytest.fixture
def silent(monkeypatch):
    """A system without /proc and /sys."""

    def refuse(path, *arguments, **options):
        raise OSError(f"no {path}")

    monkeypatch.setattr(Path, "read_text", refuse)


def test_a_processor_without_proc_has_a_name(silent):
    assert machine_names.processor.__wrapped__().endswith(")")


def test_an_unknown_cache_is_taken_for_32_mib(silent):
    assert machine.cache_bytes(CPU) == 32 * 2**20


def test_unknown_memory_is_taken_for_2_gib(monkeypatch):
    def unknown(device):
        raise RuntimeError("no /proc/meminfo")

    monkeypatch.setattr(machine, "available", unknown)
    assert machine.available_memory(CPU) == 2**31


def test_a_package_that_is_missing_has_no_version():
    assert machine_names.version("torch") == torch.__version__
    assert machine_names.version("no such package") is None
