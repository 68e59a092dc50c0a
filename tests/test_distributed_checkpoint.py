"""torch.distributed.checkpoint's state dicts of a wrapped optimizer, in one process."""

from __future__ import annotations

import copy

import pytest
import torch
from loops import LOW, expected, gradients, loss_of, micro_batch, network, wrap
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict


def pair(steps, dtype=torch.float32):
    model = network(dtype)
    return model, wrap(model, steps, torch.optim.Adam, lr=0.01)


@pytest.mark.parametrize("steps", [None, 1, 4])
def test_the_state_of_a_fresh_optimizer_appears_without_an_update(steps):
    model, optimizer = pair(steps)
    before = [p.detach().clone() for p in model.parameters()]
    state = get_optimizer_state_dict(model, optimizer)["state"]
    assert {"exp_avg", "exp_avg_sq", "step"} <= state["0.weight"].keys()
    assert (optimizer.num_updates, optimizer.micro_step, optimizer.has_updated) == (0, 0, False)
    assert gradients(model) == [None] * 4
    assert all(map(torch.equal, before, (p.detach() for p in model.parameters())))
    assert optimizer.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize("done", [1, 4, 6])
def test_a_round_trip_goes_on_bit_for_bit(done, dtype):
    model, optimizer = pair(4, dtype)
    for seed in range(done):
        micro_batch(model, optimizer, seed)
        optimizer.zero_grad()
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    other, resumed = pair(4, dtype)
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, resumed, saved)
    assert resumed.micro_step == optimizer.micro_step == done % 4
    for seed in range(done, 8):
        for each, its in ((model, optimizer), (other, resumed)):
            micro_batch(each, its, seed)
            its.zero_grad()
    assert optimizer.num_updates == 2
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_manual_sum_makes_the_round_trip():
    model, optimizer = pair(None)
    loss_of(model, 0).backward()
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    other, resumed = pair(None)
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, resumed, saved)
    for each, its in ((model, optimizer), (other, resumed)):
        micro_batch(each, its, 1)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
        assert torch.equal(p, q)


def test_saving_in_a_first_window_leaves_the_window_alone():
    """The optimizer has no state yet, and torch makes it appear by zeros in p.grad."""
    model, optimizer = pair(2)
    wanted = expected(model, (0, 1), 0.5)
    micro_batch(model, optimizer, 0)
    get_optimizer_state_dict(model, optimizer)
    assert gradients(model) == [None] * 4
    optimizer.step()  # no backward: it does not count
    assert (optimizer.num_updates, optimizer.micro_step) == (0, 1)
    loss_of(model, 1).backward()
    for gradient, want in zip(gradients(model), wanted, strict=True):
        torch.testing.assert_close(gradient, want, rtol=1e-5, atol=1e-6)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    norm = torch.nn.utils.get_total_norm(gradients(model))
    assert optimizer.num_updates == 1
    assert norm < 1.01e-3


@pytest.mark.parametrize("steps", [None, 2])
def test_a_warm_up_from_lr_zero_counts_its_gradients(steps):
    """Gradients of exactly zero by a backward are no way of making state appear."""
    model = network()
    optimizer = wrap(model, steps, torch.optim.Adam, lr=0.0)
    for _ in range(steps or 1):
        (loss_of(model) * 0.0).backward()
        optimizer.step()
    assert optimizer.num_updates == 1
    assert optimizer.state[model[0].weight]["step"] == 1


def test_a_warm_up_from_lr_zero_counts_after_a_move():
    """The hooks were on nodes that are gone: autograd stores the first gradients, step() finds them."""
    model = network()
    optimizer = wrap(model, 2, torch.optim.Adam, lr=0.0)
    model.double()
    counts = []
    for seed in (0, 1):
        micro_batch(model, optimizer, seed)
        counts.append((optimizer.micro_step, optimizer.num_updates))
    assert counts == [(1, 0), (0, 1)]
    assert optimizer.state[model[0].weight]["step"] == 1
