"""The meter on a GPU, where the backward runs in a thread of the engine, counts as on a CPU."""

import pytest
import torch
from torch import nn

import fusedacc
from fusedacc.traffic import TrafficMeter

pytestmark = pytest.mark.cuda
STEPS = 4


def window_bytes(device: str, dtype: torch.dtype, backend: str) -> dict[str, dict[str, int]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512), nn.Linear(512, 512)).to(device, dtype)
    optimizer = fusedacc.AccumulatingOptimizer(
        torch.optim.AdamW(model.parameters(), fused=True), gradient_accumulation_steps=STEPS, backend=backend
    )
    x = torch.randn(2, 512).to(device, dtype)

    def window() -> None:
        for _ in range(STEPS):
            model(x).float().square().mean().backward()
            optimizer.step(), optimizer.zero_grad()

    window()
    with TrafficMeter() as meter:
        window()
    assert not meter.uncounted
    return meter.as_dict()["by_phase_and_kind"]


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_counts_as_on_a_cpu(dtype, backend):
    on_cpu, on_gpu = window_bytes("cpu", dtype, "cpu"), window_bytes("cuda", dtype, backend)
    for phase in ("backward", "accumulate", "update"):
        for kind in ("weights", "gradients", "optimizer"):
            expected = on_cpu[phase].get(kind, 0)
            # Triton's tables of addresses and some scalars make a small difference.
            assert on_gpu[phase].get(kind, 0) == pytest.approx(expected, rel=0.01, abs=4096), (phase, kind)
