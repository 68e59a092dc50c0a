"""The divisor of an update and the dtype of the sum, in examples for every reduction."""

import contextlib

import pytest
import torch
from loops import scalar, wrap
from torch import nn
from torch.nn import functional as F

import fusedacc
from fusedacc.accumulators.reduction import NAMES, WEIGHING


def assert_close(got: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor, terms: int) -> None:
    """Allow the rounding of a sum of `terms` terms whose absolute values add up to `magnitude`."""
    bound = torch.finfo(got.dtype).eps * (terms + 4) * magnitude.double()
    assert bool(((got.double() - exact.double()).abs() <= bound + 1e-300).all()), (got - exact).abs().max()


@pytest.mark.parametrize("steps", [None, 4])
@pytest.mark.parametrize("reduction", WEIGHING)
def test_ragged_lengths_equal_one_full_batch(reduction, steps):
    """The token counts are 3, 17, 9 and 40, so a mean of means would be far off."""
    torch.manual_seed(0)
    lengths = [3, 17, 9, 40]
    data = [(torch.randn(n, 8), torch.randint(0, 4, (n,))) for n in lengths]
    whole, parts = nn.Linear(8, 4).double(), nn.Linear(8, 4)
    parts.load_state_dict(whole.state_dict())
    inputs, targets = (torch.cat(columns) for columns in zip(*data, strict=True))
    F.cross_entropy(whole(inputs.double()), targets).backward()
    optimizer = wrap(parts, steps, reduction=reduction)
    for x, y in data:
        with optimizer.accumulate(weight=len(y)):
            loss = F.cross_entropy(parts(x), y, reduction="mean" if reduction == "weighted" else "sum")
            loss.backward()
        if steps:
            optimizer.step()
    if not steps:
        optimizer.step()
    for p, q in zip(whole.parameters(), parts.parameters(), strict=True):
        assert_close(q.grad, p.grad, torch.full_like(p.grad, 2.0), 80)


@pytest.mark.parametrize("reduction", NAMES)
def test_flush_divides_by_what_a_partial_window_holds(reduction):
    weight, optimizer = scalar(4, reduction=reduction)
    weighs = reduction in WEIGHING
    values, weights = [2.0, 3.0, 7.0], [1.0, 4.0, 2.0]
    for value, w in zip(values, weights, strict=True):
        with optimizer.accumulate(weight=w if weighs else None):
            (weight * value).backward()
        optimizer.step(), optimizer.zero_grad()
    assert weight.item() == 0.0
    optimizer.flush()
    expected = {
        "mean": sum(values) / 3,
        "sum": sum(values),
        "weighted": sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights),
        "normalized": sum(values) / sum(weights),
    }[reduction]
    assert weight.grad.item() == pytest.approx(expected, rel=1e-6)
    assert -weight.item() == pytest.approx(expected, rel=1e-6)
    assert optimizer.num_updates == 1
    optimizer.zero_grad()
    optimizer.flush()
    assert optimizer.num_updates == 1, "a flush of an empty window counted"


@pytest.mark.parametrize(
    ("dtype", "kept"), [(torch.bfloat16, None), (torch.float16, None), (torch.bfloat16, torch.bfloat16)]
)
@pytest.mark.parametrize("steps", [None, 64])
def test_low_precision_sums_are_float32_and_cast_once(dtype, kept, steps):
    """One gradient is large and 63 are small. A sum in bfloat16, if requested, stays at the large one."""
    weight = nn.Parameter(torch.zeros(3, dtype=dtype))
    inner = torch.optim.SGD([weight], lr=1.0)
    optimizer = fusedacc.AccumulatingOptimizer(inner, steps, reduction="sum", accumulate_dtype=kept)
    given = [1.0] + [2.0**-12] * 63
    for value in given:
        (weight.sum() * value).backward()
        if steps:
            optimizer.step()
    if not steps:
        assert weight.grad.dtype == (kept or torch.float32)
        optimizer.step()
    wanted = torch.full((3,), 1.0 if kept else sum(given)).to(dtype)
    assert torch.equal(weight.grad.to(dtype), wanted)
    assert torch.equal(-weight.detach(), wanted)
    assert bool(wanted[0] == 1) is (kept is not None)


def test_weight_zero_adds_nothing_even_if_the_gradient_is_nan():
    for reduction in WEIGHING:
        weight, optimizer = scalar(3, reduction=reduction)
        for value, w in ((2.0, 1.0), (float("nan"), 0.0), (4.0, 1.0)):
            with optimizer.accumulate(weight=w):
                (weight * value).backward()
            optimizer.step()
        assert weight.item() == -3.0


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("a backward pass fails")


@pytest.mark.parametrize("hooked", [False, True], ids=["", "hooked"])
@pytest.mark.parametrize("native", [True, False], ids=["engine", "no engine"])
@pytest.mark.parametrize("steps", [2, None])
def test_a_micro_batch_of_weight_zero_that_fails_changes_nothing(monkeypatch, steps, native, hooked):
    if not native:
        monkeypatch.setenv("FUSEDACC_ENGINE", "0")
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    inner = torch.optim.SGD([first, second], lr=1.0)
    optimizer = fusedacc.AccumulatingOptimizer(inner, steps, reduction="weighted")
    if hooked:
        second.register_post_accumulate_grad_hook(lambda _: None)
    for weight in (1.0, 0.0, 3.0):
        with optimizer.accumulate(weight=weight):
            branch = first * 2.0
            if weight:
                (branch + weight * second).sum().backward()
            else:  # the gradient of `second` comes first
                loss = Failing.apply(branch).sum() + (second * torch.nan).sum()
                with pytest.raises(ValueError, match="a backward pass fails"):
                    loss.backward()
        if steps and weight:
            optimizer.step()
    if not steps:
        optimizer.step()
    assert first.tolist() == [1.0 - 2.0] * 3
    assert second.tolist() == [1.0 - (1.0 * 1.0 + 3.0 * 3.0) / 4.0] * 3


class Deferring(nn.Linear):
    """A module whose gradients could be reduced by other code in the last micro-batch of a window."""

    def no_sync(self):
        return contextlib.nullcontext()


@pytest.mark.parametrize("weights", [(5.0, 0.0), (0.0, 5.0), (2.0, 0.0, 3.0)], ids=str)
def test_weight_zero_adds_nothing_where_other_code_reduces_gradients(weights):
    model = Deferring(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = fusedacc.AccumulatingOptimizer(inner, len(weights), reduction="normalized")
    node = torch.autograd.graph.get_gradient_edge(model.weight).node
    node.register_hook(lambda *_: None)  # as that of a reducer, which reads p.grad
    for weight in weights:
        with optimizer.accumulate(model, weight=weight):
            (model(torch.ones(1, 3)) * (weight or 7.0)).sum().backward()
        optimizer.step()
    assert model.weight.tolist() == [[-1.0] * 3]
