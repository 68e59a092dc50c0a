"""The kernel benchmark: every provider computes the sum and moves the bytes that it reports."""

import pytest
import torch

from benchmarks.suites import kernels
from fusedacc.commands.bench.cases import Additions
from fusedacc.commands.bench.comparison import MEASURED, WRONG

SHAPES = ((1,), (3,), (7, 5), (1023,), (2, 3, 5, 7))
#: The bytes per element of one addition, by the item sizes of sum and gradient.
BYTES = {
    "fusedacc cpu": lambda a, g: g + 2 * a,
    "add_": lambda a, g: g + 2 * a,
    "add_ same dtype": lambda a, g: 3 * a,
    "cast and add_": lambda a, g: g + 4 * a,
    "torch._foreach_add_": lambda a, g: g + 2 * a,
    "foreach cast and add": lambda a, g: g + 4 * a,
    "autograd grad_dtype": lambda a, g: 3 * a if a == g else g + 4 * a,
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("dtypes", kernels.DTYPES)
def test_every_provider_computes_the_sum_and_moves_its_bytes(dtypes, device):
    work = Additions("some", SHAPES, kernels.DTYPES[dtypes], torch.device(device))
    names = [name for name in kernels.PROVIDERS if "triton" not in name]  # its interpreter is slow
    found = {entry["name"]: entry for entry in kernels.measure(work, names, kernels.EFFORTS["quick"])["ways"]}
    assert {"copy", "triad", "fusedacc cpu", *BYTES} <= found.keys() | {"fusedacc cpu"} - {device}
    sizes = (work.accumulator.itemsize, work.gradient.itemsize)
    for name, entry in found.items():
        assert entry["status"] != WRONG, entry
        if entry["status"] == MEASURED and name in BYTES:
            assert entry["bytes"] == work.elements * BYTES[name](*sizes), name
        elif entry["status"] != MEASURED:
            assert any(words in entry["why"] for words in ("nothing to cast", "too long")), entry


def test_goals_name_what_exists():
    for (size, dtypes, provider), goals in kernels.GOALS.items():
        assert size in kernels.SIZES
        assert dtypes in kernels.DTYPES
        assert {provider, *(goal.against for goal in goals)} <= set(kernels.PROVIDERS)
    for sweep in kernels.SWEEPS.values():
        assert set(sweep) <= set(kernels.SIZES)
    assert not any("," in name for name in (*kernels.PROVIDERS, *kernels.SIZES))
