"""What a wrapper leaves behind, what it keeps alive, and what a copy of it is."""

import copy
import pickle
import subprocess
import sys
import weakref
from unittest import mock

import pytest
import torch
from loops import LOW, assert_gradients, expected, failing, gradients, identical, loss_of, network, wrap
from loops import cleared_micro_batch as micro_batch
from torch import nn

from fusedacc.kernels import native_module

#: Keeps a wrapper until after Python has emptied the package's modules, as libraries that list modules do.
KEPT_UNTIL_EXIT = """
import os, sys
import torch
import fusedacc

model = torch.nn.Linear(2, 2)
optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), 0.1), 2, model=model)
os.kept = optimizer, sys.modules.copy()
"""


def test_a_wrapper_that_lives_until_python_exits_prints_nothing():
    done = subprocess.run(
        [sys.executable, "-c", KEPT_UNTIL_EXIT], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize("steps", [None, 3])
def test_a_deleted_wrapper_leaves_a_stock_model(uncollected, steps, dtype):
    model = network(dtype)
    optimizer = wrap(model, steps)
    micro_batch(model, optimizer, 7)
    reference = weakref.ref(optimizer)
    del optimizer
    assert reference() is None
    model.load_state_dict(network(dtype).state_dict())
    for seed in (0, 1):
        loss_of(model, seed).backward()
    assert identical(gradients(model), expected(network(dtype), (0, 1)))


def test_gradients_of_a_graph_from_before_the_wrapper_are_accumulated():
    model = network()
    loss = loss_of(model)
    optimizer = wrap(model, 2)
    loss.backward()
    optimizer.step()
    assert optimizer.micro_step == 1
    assert all(p.grad is None for p in model.parameters())
    optimizer.flush()
    assert identical(gradients(model), expected(network(), (0,)))


def test_gradients_are_freed_at_the_end_of_their_backward(uncollected):
    model = network(LOW)
    optimizer = wrap(model, 8)
    seen: list[weakref.ref] = []
    for p in model.parameters():
        p.register_hook(lambda g: seen.append(weakref.ref(g)))
    for seed in range(3):
        loss_of(model, seed).backward()
        assert [r() for r in seen] == [None] * len(seen)
        optimizer.step()
    assert len(seen) == 12


def test_making_a_wrapper_calls_no_public_backward(monkeypatch):
    """Users may replace it with a mock that counts the backwards of a loop."""
    refused = mock.Mock(side_effect=AssertionError("called"))
    for where, name in ((torch.Tensor, "backward"), (torch.autograd, "backward"), (torch.autograd, "grad")):
        monkeypatch.setattr(where, name, refused)
    wrap(network(), 2)


def test_a_deep_copy_of_the_model_is_a_stock_model():
    model = network(LOW)
    optimizer = wrap(model, 4)
    loss_of(model).backward()
    twin = copy.deepcopy(model)
    for seed in (0, 1):
        loss_of(twin, seed).backward()
    assert identical(gradients(twin), expected(network(LOW), (0, 1)))
    optimizer.step()
    assert optimizer.micro_step == 1
    assert all(p.grad_dtype == LOW for p in twin.parameters())


@pytest.mark.parametrize("masters", [True, False])
def test_a_pickle_holds_only_what_loading_cannot_rebuild(masters):
    optimizer = wrap(network(LOW), 3, master_weights=masters)
    optimizer.note = "mine"
    wanted = {
        "optimizer",
        "_snapshot",
        "_accumulate_dtype",
        "_main_grad",
        "_reduce_dtype",
        "_update_settings",
    }
    assert optimizer.__getstate__().keys() == wanted | {"note"}


@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_the_wrapper_and_its_copy_continue_a_window_separately(duplicate, dtype):
    alone = network(dtype)
    reference = wrap(alone, 3)
    model = network(dtype)
    optimizer = wrap(model, 3)
    for m, o in ((alone, reference), (model, optimizer)):
        micro_batch(m, o, 0)
    twin, other = duplicate((model, optimizer))
    assert other.micro_step == 1
    for m, o in ((alone, reference), (model, optimizer), (twin, other)):
        for seed in (1, 2):
            assert not o.has_updated
            micro_batch(m, o, seed)
        assert o.has_updated
    for p, q, r in zip(alone.parameters(), model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(p, r)


@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
def test_after_close_model_and_wrapper_work_as_stock(steps, dtype):
    model = network(dtype)
    before = [p.grad_dtype for p in model.parameters()]
    optimizer = wrap(model, steps)
    micro_batch(model, optimizer, 5)
    optimizer.close()
    optimizer.close()
    model.load_state_dict(network(dtype).state_dict())
    optimizer.zero_grad(), optimizer.explain()
    wanted, updates = expected(model, (0,)), optimizer.num_updates
    loss_of(model).backward()
    optimizer.step()
    assert identical(gradients(model), wanted)
    assert not any(map(torch.equal, model.parameters(), network(dtype).parameters()))
    assert [p.grad_dtype for p in model.parameters()] == before
    optimizer.zero_grad()
    second = wrap(model, 1)
    micro_batch(model, second)
    assert (second.num_updates, optimizer.num_updates) == (1, updates)


@pytest.mark.skipif(not native_module.loaded(), reason="without the engine, `grad_dtype` stays as it was")
@pytest.mark.parametrize("between", [LOW, torch.float64])
@pytest.mark.parametrize("chosen", [None, LOW])
def test_after_close_gradients_follow_a_cast_of_the_model(chosen, between):
    model, twin = network(LOW), network(LOW)
    for p in (*model.parameters(), *twin.parameters()) if chosen else ():
        p.grad_dtype = chosen
    optimizer = wrap(model)
    for each in (model, twin):
        each.to(between)
    loss_of(model).backward()
    optimizer.close()
    model.zero_grad()
    for each in (model, twin):
        each.float()
        loss_of(each).backward()
    assert identical(gradients(model), gradients(twin))
    assert [p.grad_dtype for p in model.parameters()] == [chosen or torch.float32] * 4


@pytest.mark.parametrize("hooks", ["native", "python"])
def test_graphs_from_before_close_give_stocks_gradients(hooks, monkeypatch):
    if hooks == "python":
        monkeypatch.setenv("FUSEDACC_ENGINE", "0")
    model = network()
    optimizer = wrap(model, 2)
    loss = loss_of(model)
    optimizer.close()
    loss.backward()
    assert identical(gradients(model), expected(network(), (0,)))
    assert optimizer.micro_step == 0


@pytest.mark.parametrize("steps", [None, 2])
def test_graphs_from_before_close_count_for_the_next_wrapper(steps):
    model = network()
    first = wrap(model, steps)
    losses = [loss_of(model, seed) for seed in range(2)]
    first.close()
    second = wrap(model, steps)
    losses[0].backward()
    if steps is not None:
        second.step()
    losses[1].backward()
    assert_gradients(model, expected(network(), range(2), 1 / (steps or 1)))
    second.step()
    assert (first.micro_step, first.num_updates, second.num_updates) == (0, 0, 1)


def test_a_parameter_of_another_live_wrapper_is_refused():
    model, other = network(), network()
    first, second = wrap(model), wrap(other)
    with pytest.raises(ValueError, match="another live"):
        wrap(model)
    with pytest.raises(ValueError, match="another live"):
        second.add_param_group({"params": list(model.parameters())})
    assert len(second.param_groups) == 1
    for each, its in ((model, first), (other, second)):
        micro_batch(each, its)
    assert (first.num_updates, second.num_updates) == (1, 1), "a refused wrapper took parameters"
    first.close()
    third = wrap(model)
    with pytest.raises(ValueError, match="another live"):
        wrap(nn.Sequential(model[2]))
    del third
    wrap(model)


def wide() -> nn.Sequential:
    """Return a model whose last gradient is so large that it is added at once, not at the backward's end."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 1100), nn.Tanh(), nn.Linear(1100, 1100))


@pytest.mark.parametrize("make", [network, wide], ids=["all are added at the end", "one is added at once"])
@pytest.mark.parametrize("steps", [None, 2])
def test_no_part_of_a_failed_micro_batch_reaches_an_update(steps, make):
    model = make()
    optimizer = wrap(model, steps, reduction="sum")
    with failing(model[0].bias):
        loss_of(model).backward()
    try:
        loss_of(model).backward()
        optimizer.step()
    except RuntimeError:
        optimizer.discard()
        loss_of(model).backward()
        optimizer.step()
    optimizer.flush()
    assert optimizer.num_updates == 1
    assert identical(gradients(model), expected(make(), (0,)))
