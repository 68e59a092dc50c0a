"""Checkpoints of windows in which a parameter was frozen after gradients of it had been summed."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from loops import LOW, WAYS, loss_of, network
from torch import Tensor, nn

import fusedacc

K = 4


def wrap(net: nn.Module, steps: int | None, make=torch.optim.AdamW, **options):
    given = options | ({"model": net} if options.get("model") else {})
    return fusedacc.AccumulatingOptimizer(make(net.parameters(), lr=0.01), steps, **given)


def saved(net: nn.Module, optimizer) -> io.BytesIO:
    file = io.BytesIO()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    return file


def finish(net: nn.Module, optimizer, steps: int | None, first: int, unfreezes: bool) -> list[Tensor]:
    """The rest of the window and one more, the frozen parameter free again in between; the weights after."""
    for number in range(first, 2 * K):
        if number == K and unfreezes:
            net[0].weight.requires_grad_(True)
        loss = loss_of(net, number)
        (loss if steps else loss / K).backward()
        if steps or number % K == K - 1:
            optimizer.step()
        if number % K == K - 1:
            optimizer.zero_grad()
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.sweep
@pytest.mark.parametrize("unfreezes", [True, False], ids=["unfrozen later", "frozen for good"])
@pytest.mark.parametrize("loaded", ["frozen before it is wrapped", "frozen after it is wrapped", "free"])
@pytest.mark.parametrize("at", [1, K], ids=["in mid-window", "before the update"])
@pytest.mark.parametrize("way", [way for way in WAYS if "python" not in way])
@pytest.mark.parametrize("steps", [K, None], ids=["counted", "manual"])
def test_a_window_with_a_parameter_frozen_in_it_resumes_bit_for_bit(steps, way, at, loaded, unfreezes):
    dtype, options = WAYS[way]
    net = network(dtype)
    optimizer = wrap(net, steps, **options)
    for number in range(at):
        loss = loss_of(net, number)
        (loss if steps else loss / K).backward()
        if steps and number < K - 1:
            optimizer.step()
    net[0].weight.requires_grad_(False)
    if steps and at == K:
        optimizer._loop.closes_window()
    file = saved(net, optimizer)

    other = network(dtype)
    checkpoint = torch.load(file, weights_only=True)
    other.load_state_dict(checkpoint["model"])
    if loaded == "frozen before it is wrapped":
        other[0].weight.requires_grad_(False)
    resumed = wrap(other, steps, **options)
    if loaded == "frozen after it is wrapped":
        other[0].weight.requires_grad_(False)
    resumed.load_state_dict(checkpoint["optimizer"])
    other[0].weight.requires_grad_(False)
    assert resumed.micro_step == optimizer.micro_step
    for one, twin in zip(net.parameters(), other.parameters(), strict=True):
        assert (one.grad is None) == (twin.grad is None)
        assert one.grad is None or torch.equal(one.grad, twin.grad)
    results = []
    for each, its in ((net, optimizer), (other, resumed)):
        if at == K:
            its.step()
            its.zero_grad()
        results.append(finish(each, its, steps, at, unfreezes))
    assert all(map(torch.equal, *results))
    resumed.close()
    assert all(p.grad_dtype is dtype for p in other.parameters())


def test_a_copy_of_a_wrapper_with_a_parameter_frozen_in_mid_window_goes_on_as_it_would():
    net = network(LOW)
    optimizer = wrap(net, K)
    loss_of(net, 0).backward()
    optimizer.step()
    net[0].weight.requires_grad_(False)
    other, twin = copy.deepcopy((net, optimizer))
    results = [finish(each, its, K, 1, True) for each, its in ((net, optimizer), (other, twin))]
    assert all(map(torch.equal, *results))
