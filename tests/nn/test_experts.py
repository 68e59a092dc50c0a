"""`model=` and stacked weights of experts: the same training without a gradient for all experts."""

import copy
import itertools

import pytest
import torch
from experts_models import EXPERTS, INNER, TWINS, WIDTH, K, Mixture, batch, loss_of, pair, wrapped
from loops import assert_same_gradients

from fusedacc.nn.patched_forward import PATCHED
from fusedacc.traffic import TrafficMeter


def paths(optimizer):
    """Return how the gradients were added, by the parameters' names."""
    rows = [line.split() for line in optimizer.explain().splitlines()]
    return {row[0]: row[2] for row in rows if row and row[0].split(".")[0] in ("enter", "experts", "leave")}


@pytest.mark.parametrize("inward", [False, True])
@pytest.mark.parametrize("how", TWINS)
def test_windows_equal_plain_pytorchs(how, inward):
    model, optimizer, twin = pair(how, inward=inward)
    stock = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for window in range(3):
        for index, each in itertools.product(range(K), (model, twin)):
            loss_of(each, K * window + index).backward()
        assert_same_gradients(model, twin, rtol=1e-5, atol=1e-7)
        if how == "loop" and window == 0:  # later windows differ by a rounding in the Linear layers
            assert torch.equal(model.experts.up.grad, twin.experts.up.grad), window
        for each in (optimizer, stock):
            each.step(), each.zero_grad()
    found = paths(optimizer)
    # A view of the tensor has another shape than the parameter, and is not a parameter.
    taken = "multi_tensor" if how == "grouped" and inward else "grouped"
    assert found["experts.up"] == found["experts.down"] == taken
    assert found["experts.bias"] == "multi_tensor"
    assert found["enter.weight"] == "gemm"


@pytest.mark.parametrize("how", TWINS)
@pytest.mark.parametrize("options", [{}, {"accumulate_dtype": torch.bfloat16}], ids=["float32", "bfloat16"])
def test_bfloat16_weights(how, options):
    """Compare with the float64 sums of the gradients of the same model."""
    model = Mixture(how, dtype=torch.bfloat16)
    twin = copy.deepcopy(model)
    optimizer = wrapped(model, **options)
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in twin.parameters()]
    for index in range(K):
        loss_of(model, index).backward()
        twin.zero_grad()
        (loss_of(twin, index) / K).backward()
        for total, p in zip(sums, twin.parameters(), strict=True):
            total += p.grad
        if index < K - 1:
            optimizer.step()
    for (name, p), total in zip(model.named_parameters(), sums, strict=True):
        error = (p.grad.double() - total).norm() / total.norm()
        assert error < (0.02 if options else 0.005), name


@pytest.mark.parametrize("how", TWINS)
def test_no_gradient_of_all_experts_is_written(how):
    """Experts with rows take 8 bytes per parameter. The others take 0, but 4 in the first micro-batch."""
    model = Mixture(how)
    optimizer = wrapped(model, steps=8)
    loss_of(model, 0).backward()
    optimizer.step()
    _, experts = batch(1)
    used = experts.unique().numel()
    with TrafficMeter(optimizer) as meter:
        loss_of(model, 1).backward()
        optimizer.step()
    op = meter.as_dict()["by_op"][
        "fusedacc::grouped_accumulate_" if how == "grouped" else "fusedacc::scale_accumulate_"
    ]
    both = 2 * used * WIDTH * INNER * 4
    # The loops' pass also adds the gradients of the biases.
    others = 4 * sum(p.numel() for name, p in model.named_parameters() if "bias" in name)
    assert both <= op["written_bytes"] <= both + (others if how == "loop" else 0)
    rows = len(experts) * 2 * (WIDTH + INNER) * 4 + 2 * EXPERTS * 4
    assert op["read_bytes"] <= (both + rows if how == "grouped" else 2 * both + 2 * others)
    assert not meter.uncounted


def test_modules_that_select_no_expert_keep_their_forward():
    model = Mixture("dense")
    optimizer = wrapped(model)
    loss_of(model, 0).backward()
    optimizer.step()
    assert paths(optimizer)["experts.up"] == "multi_tensor"
    assert not {PATCHED, "forward"} & model.experts.__dict__.keys()


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("how", TWINS)
def test_other_backends(how, backend):
    model, optimizer, twin = pair(how, backend=backend)
    for index in range(2):
        for each in (model, twin):
            loss_of(each, index).backward()
    assert_same_gradients(model, twin, rtol=1e-5, atol=1e-6)
    assert optimizer._slots[-2].paths == ("grouped",)
