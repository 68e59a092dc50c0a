"""The code of docs/sinks.md, with its Triton kernel in Triton's interpreter."""

import pages
import pytest
import torch
from sink_functions import count_sinks
from torch import nn

import fusedacc
from fusedacc.kernels import native_module, registry

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROBLEM = registry.obstacle("triton", torch.device(DEVICE), torch.float32, torch.float32)
if PROBLEM is not None:
    pytest.skip(f"the triton backend cannot run here: {PROBLEM}", allow_module_level=True)
if not native_module.loaded():
    pytest.skip("sinks need the native engine", allow_module_level=True)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return pages.load("../sinks", tmp_path_factory.mktemp("page"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("steps", "on_device"), [(None, False), (3, False), (3, True)])
def test_gradients_are_those_of_pytorch_in_float64(monkeypatch, page, dtype, steps, on_device):
    found = count_sinks(monkeypatch)
    gain = nn.Parameter((torch.rand(300) + 0.5).to(DEVICE, dtype))
    weight = nn.Parameter((torch.randn(7, 300) / 9).to(DEVICE, dtype))
    twins = [param.detach().double().requires_grad_() for param in (gain, weight)]
    reduction = "weighted" if on_device else "sum"
    inner = torch.optim.SGD([gain, weight], lr=0.1)
    optimizer = fusedacc.AccumulatingOptimizer(inner, steps, reduction=reduction)
    for seed in range(3):
        x = torch.randn(5, 300, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
        given = {"weight": torch.tensor(2.0, device=DEVICE)} if on_device else {}
        with optimizer.accumulate(**given):
            page.MyLinear.apply(page.Scale.apply(x, gain), weight).sum().backward()
            optimizer.step() if steps else None
        ((x.double() * twins[0]) @ twins[1].t()).sum().div(3 if on_device else 1).backward()
    for ours, theirs in zip((gain, weight), twins, strict=True):
        error = (ours.grad.double() - theirs.grad).abs().max() / theirs.grad.abs().max()
        assert error < (1e-5 if dtype is torch.float32 else 0.03)
    assert found
    assert all(found)
