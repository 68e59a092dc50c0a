"""What a checkpoint leaves in a bare optimizer that loads it, and goes on, is not believed afterwards."""

import functools

import pytest
import torch
from loops import LOW, cleared_micro_batch, micro_batch, network, through_file, wrap

import fusedacc
from fusedacc.optimizer.checkpoint import COUNTERS, MASTER, SUM

MAKES = {
    "AdamW": torch.optim.AdamW,
    "fused AdamW": functools.partial(torch.optim.AdamW, fused=True),
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    "SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
}


def trained(make, updates: int = 3, dtype=torch.float32, partial: int = 0, **options):
    model = network(dtype)
    optimizer = wrap(model, 2, make, **options)
    for seed in range(2 * updates + partial):
        micro_batch(model, optimizer, seed)
        optimizer.zero_grad()
    return model, optimizer


def go_on_bare(model, make, state, updates: int = 10):
    bare = make(model.parameters(), lr=0.1)
    bare.load_state_dict(through_file(state))
    for seed in range(updates):
        cleared_micro_batch(model, bare, seed)
    return bare


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_counters_of_before_a_bare_optimizer_went_on_are_not_loaded(make):
    model, optimizer = trained(make)
    state = optimizer.state_dict()
    optimizer.close()
    bare = go_on_bare(model, make, state)
    again = wrap(network(), 2, make)
    again.load_state_dict(through_file(bare.state_dict()))
    assert (again.num_updates, again.has_updated) == (0, False)
    assert again.state_dict()["fusedacc"]["window"]["num_updates"] == 0


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_wrapping_a_bare_optimizer_takes_what_is_ours_out_of_its_groups_and_state(make):
    model, optimizer = trained(make, dtype=LOW, master_weights=True)
    state = optimizer.state_dict()
    optimizer.close()
    bare = go_on_bare(model, make, state, updates=1)
    assert COUNTERS in bare.param_groups[0]
    again = fusedacc.AccumulatingOptimizer(bare, 2)
    assert again.num_updates == 0
    assert all(COUNTERS not in group for group in bare.param_groups)
    for entry in bare.state.values():
        assert entry.keys().isdisjoint({SUM, COUNTERS, MASTER})


def test_masters_are_made_again_after_a_bare_optimizer_went_on():
    model, optimizer = trained(torch.optim.AdamW, dtype=LOW, master_weights=True)
    state = optimizer.state_dict()
    optimizer.close()
    bare = go_on_bare(model, torch.optim.AdamW, state)
    again = wrap(model, 2, torch.optim.AdamW, master_weights=True)
    again.load_state_dict(through_file(bare.state_dict()))
    for slot in again._slots:
        assert torch.equal(again._masters.of(slot), slot.param.detach().float())


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_sums_of_before_a_bare_optimizer_went_on_are_left_out_with_a_warning(make):
    model, optimizer = trained(make, partial=1)
    state = optimizer.state_dict()
    optimizer.close()
    bare = go_on_bare(model, make, state)
    again = wrap(network(), 2, make)
    with pytest.warns(UserWarning, match="a bare optimizer has made updates since"):
        again.load_state_dict(through_file(bare.state_dict()))
    assert (again.num_updates, again.micro_step, again.accumulator_bytes) == (0, 0, 0)
