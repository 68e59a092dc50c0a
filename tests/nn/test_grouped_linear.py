"""`grouped_linear` equals PyTorch's grouped_mm: without `model=`, after the last rows, and in its errors."""

import pytest
import torch
from experts_models import Mixture, loss_of, wrapped
from loops import assert_same_gradients
from torch import nn

import fusedacc


def test_without_model_grouped_linear_has_plain_pytorchs_bits():
    model, twin = Mixture("grouped"), Mixture("stock")
    _optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for each in (model, twin):
        loss_of(each, 0).backward()
    assert_same_gradients(model, twin, rtol=0, atol=0)


def test_grouped_linear_ignores_rows_after_the_last_offset():
    weight = nn.Parameter(torch.randn(3, 8, 16))
    _optimizer = wrapped(nn.ParameterList([weight]), None)
    rows = torch.randn(7, 16)
    rows[5:] = torch.nan
    offs = torch.tensor([2, 2, 5], dtype=torch.int32)
    output = fusedacc.nn.functional.grouped_linear(rows, weight, offs)
    gradient = torch.randn_like(output)
    gradient[5:] = torch.nan
    output.backward(gradient)
    wanted = torch.stack([gradient[:2].t() @ rows[:2], torch.zeros(8, 16), gradient[2:5].t() @ rows[2:5]])
    torch.testing.assert_close(weight.grad, wanted)


@pytest.mark.parametrize(
    ("rows", "offs"),
    [
        (torch.zeros(4, 16, dtype=torch.float64), torch.tensor([1, 2, 4], dtype=torch.int32)),
        (torch.zeros(4, 12), torch.tensor([1, 2, 4], dtype=torch.int32)),
        (torch.zeros(4, 16), torch.tensor([1, 2, 4])),
        (torch.zeros(4, 16), torch.tensor([2, 4], dtype=torch.int32)),
    ],
    ids=["dtype", "width", "int64", "too few"],
)
def test_grouped_linear_raises_grouped_mms_errors(rows, offs):
    weight = nn.Parameter(torch.randn(3, 8, 16))
    _optimizer = wrapped(nn.ParameterList([weight]), None)
    with pytest.raises((RuntimeError, ValueError)) as theirs:
        torch.nn.functional.grouped_mm(rows, weight.transpose(-2, -1), offs=offs)
    with pytest.raises(type(theirs.value)) as ours:
        fusedacc.nn.functional.grouped_linear(rows, weight, offs)
    assert str(ours.value) == str(theirs.value)
