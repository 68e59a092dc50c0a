"""Values of ours in the checkpoint of a bare optimizer that continued from a wrapper's are not used."""

import contextlib
import functools

import pytest
import torch
from loops import LOW, cleared_micro_batch, network, through_file, wrap

import fusedacc
from fusedacc.optimizer.checkpoint.format import COUNTERS, MASTER, SUM

MAKES = {
    "AdamW": torch.optim.AdamW,
    "fused AdamW": functools.partial(torch.optim.AdamW, fused=True),
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    "SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
}


def continued_bare(make, updates: int = 10, dtype=torch.float32, partial: int = 0, **options):
    """Train with a wrapper, then with a bare optimizer that loads its checkpoint."""
    model = network(dtype)
    optimizer = wrap(model, 2, make, **options)
    for seed in range(6 + partial):
        cleared_micro_batch(model, optimizer, seed)
    state = through_file(optimizer.state_dict())
    optimizer.close()
    bare = make(model.parameters(), lr=0.1)
    bare.load_state_dict(state)
    for seed in range(updates):
        cleared_micro_batch(model, bare, seed)
    return model, bare


@pytest.mark.parametrize("partial", [0, 1])
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_old_counters_are_not_loaded_and_old_accumulators_are_dropped_with_a_warning(make, partial):
    _, bare = continued_bare(make, partial=partial)
    again = wrap(network(), 2, make)
    warns = pytest.warns(UserWarning, match="a bare optimizer has made updates since")
    with warns if partial else contextlib.nullcontext():
        again.load_state_dict(through_file(bare.state_dict()))
    assert (again.num_updates, again.micro_step, again.accumulator_bytes) == (0, 0, 0)
    assert not again.has_updated
    assert again.state_dict()["fusedacc"]["window"]["num_updates"] == 0


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_wrapping_a_bare_optimizer_removes_our_values_from_its_groups_and_state(make):
    _, bare = continued_bare(make, updates=1, dtype=LOW, master_weights=True)
    assert COUNTERS in bare.param_groups[0]
    again = fusedacc.AccumulatingOptimizer(bare, 2)
    assert again.num_updates == 0
    assert all(COUNTERS not in group for group in bare.param_groups)
    for entry in bare.state.values():
        assert entry.keys().isdisjoint({SUM, COUNTERS, MASTER})


def test_old_master_weights_are_replaced_with_the_parameters():
    model, bare = continued_bare(torch.optim.AdamW, dtype=LOW, master_weights=True)
    again = wrap(model, 2, torch.optim.AdamW, master_weights=True)
    again.load_state_dict(through_file(bare.state_dict()))
    for slot in again._slots:
        assert torch.equal(again._masters.of(slot), slot.param.detach().float())
