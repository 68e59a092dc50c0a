"""Stochastically rounded bfloat16 sums: the bytes that they move and the memory that they need."""

from typing import Any

import pytest
import torch
from memory import peak_of
from torch import nn

import fusedacc
from fusedacc.traffic import TrafficMeter, bytes_per_micro_batch, bytes_per_window, total

LOW, F32 = torch.bfloat16, torch.float32
STEPS, ELEMENTS = 6, 1 << 18
STOCHASTIC: dict[str, Any] = {"accumulate_dtype": LOW, "rounding": "stochastic", "seed": 0}


def window(optimizer: fusedacc.AccumulatingOptimizer, weight: nn.Parameter) -> None:
    for number in range(STEPS):
        (weight * (1.0 + number)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()


def vector(dtype: torch.dtype = LOW, **options: Any) -> tuple[fusedacc.AccumulatingOptimizer, nn.Parameter]:
    weight = nn.Parameter(torch.zeros(ELEMENTS, dtype=dtype))
    inner = torch.optim.SGD([weight], lr=0.1)
    return fusedacc.AccumulatingOptimizer(inner, STEPS, **options), weight


@pytest.mark.parametrize(("dtype", "first", "later"), [(LOW, 0, 6), (F32, 6, 8)], ids=["bfloat16", "float32"])
def test_the_meter_counts_the_bytes_of_additions(dtype, first, later, monkeypatch):
    """A first gradient of bfloat16 becomes the sum; autograd's own write of it counts elsewhere."""
    monkeypatch.setenv("FUSEDACC_ENGINE", "1")
    optimizer, weight = vector(dtype, **STOCHASTIC)
    window(optimizer, weight)
    with TrafficMeter() as meter:
        window(optimizer, weight)
    assert not meter.uncounted
    found = meter.as_dict()["by_phase_and_kind"]["accumulate"]["gradients"] / ELEMENTS
    assert found == pytest.approx(first + later * (STEPS - 1), rel=1e-3)
    parts = [
        bytes_per_micro_batch(dtype, dtype, LOW, first=each, rounding="stochastic") for each in (True, False)
    ]
    assert [total(part) - dtype.itemsize for part in parts] == [first, later]


def test_bytes_of_either_rounding():
    """With rounding to nearest, thirds are scaled at once: 4 bytes more in the first micro-batch."""
    for steps, nearest in ((6, 6), (8, 2)):
        found = [
            total(bytes_per_window(LOW, LOW, LOW, steps, rounding=rounding))
            for rounding in ("nearest", "stochastic")
        ]
        assert found == [pytest.approx((first + (steps - 1) * 8) / steps) for first in (nearest, 2)]
    exposed = bytes_per_micro_batch(LOW, LOW, LOW, first=True, visible=True, rounding="stochastic")
    assert total(exposed) == 6


def peak(**options: Any) -> float:
    """Return the peak bytes per parameter in two windows, including the parameter."""

    def train() -> None:
        optimizer, weight = vector(**options)
        window(optimizer, weight), window(optimizer, weight)

    return peak_of(train) / ELEMENTS


def test_sums_need_two_bytes_per_parameter_less_than_float32_sums():
    optimizer, weight = vector(**STOCHASTIC)
    weight.sum().backward()
    assert optimizer.accumulator_bytes == 2 * ELEMENTS
    wide, low, nearest = peak(), peak(**STOCHASTIC), peak(accumulate_dtype=LOW)
    assert low <= wide - 2 + 0.01, (low, wide)
    assert low <= nearest + 0.01, (low, nearest)
    assert low <= 2 + 2 + 2 + 0.01, "more than the parameter, the sum and a gradient"
