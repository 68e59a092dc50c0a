"""Warnings about errors in torch's own kernels."""

import warnings

import pytest
import torch
from torch import nn

import fusedacc
from fusedacc.optimizer import update
from fusedacc.traffic import TrafficMeter

LOW = [torch.bfloat16, torch.float16]


def leaves_unwritten(dtype: torch.dtype, size: int, **options) -> bool:
    """Return whether a step of torch's fused SGD leaves elements of a parameter unchanged."""
    param = nn.Parameter(torch.zeros(size, dtype=dtype))
    param.grad = torch.ones_like(param)
    torch.optim.SGD([param], lr=1.0, fused=True, **options).step()
    return bool((param == 0).any())


def warns(make, dtype: torch.dtype, size: int, **settings) -> bool:
    params = [nn.Parameter(torch.zeros(1, dtype=torch.float32)), nn.Parameter(torch.zeros(size, dtype=dtype))]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fusedacc.AccumulatingOptimizer(make(params), **settings)
    texts = [str(warning.message) for warning in seen if "unwritten" in str(warning.message)]
    assert all("SGD(fused=True)" in text and str(dtype)[6:] in text for text in texts)
    assert all(warning.filename == __file__ for warning in seen)
    return len(texts) == 1


@pytest.mark.parametrize("size", [1, 8, 15, 16, 17, 32, 100])
@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_warning_names_parameters_that_a_fused_sgd_does_not_write(dtype, size, momentum):
    """A torch with a repaired kernel gives no warning."""
    expected = leaves_unwritten(dtype, size, momentum=momentum)
    found = warns(lambda p: torch.optim.SGD(p, lr=1.0, momentum=momentum, fused=True), dtype, size)
    assert found == expected


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.SGD(params, lr=1.0),
        lambda params: torch.optim.SGD(params, lr=1.0, foreach=True),
        lambda params: torch.optim.AdamW(params, fused=True),
        lambda params: torch.optim.Adagrad(params, fused=True),
    ],
)
def test_no_warning_if_all_parameters_are_written(make, dtype):
    assert not warns(make, dtype, 100)


@pytest.mark.parametrize("dtype", LOW)
def test_float32_masters_are_written_without_a_warning(dtype):
    assert not warns(lambda p: torch.optim.SGD(p, lr=1.0, fused=True), dtype, 100, master_weights=True)
    param = nn.Parameter(torch.zeros(100, dtype=dtype))
    inner = torch.optim.SGD([param], lr=1.0, fused=True)
    optimizer = fusedacc.AccumulatingOptimizer(inner, master_weights=True)
    param.sum().backward()
    optimizer.step()
    assert param.tolist() == [-1.0] * 100


@pytest.mark.skipif(update.unwritten_from(torch.bfloat16) is None, reason="torch writes them")
def test_adding_a_group_warns_too():
    inner = torch.optim.SGD([nn.Parameter(torch.zeros(100))], lr=1.0, fused=True)
    optimizer = fusedacc.AccumulatingOptimizer(inner)
    with pytest.warns(UserWarning, match="elements of bfloat16 parameters of .* unwritten") as seen:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(100, dtype=torch.bfloat16))]})
    assert [warning.filename for warning in seen] == [__file__]


def test_a_meter_does_not_count_the_trial():
    update.unwritten_from.cache_clear()
    with TrafficMeter() as meter:
        update.unwritten_from(torch.bfloat16)
    assert meter.calls == 0
