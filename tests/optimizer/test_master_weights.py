"""float32 master weights, compared with master weights in plain PyTorch."""

import copy
import pickle
import warnings

import pytest
import torch
from loops import LOW, assert_equal_weights, loss_of, micro_batch, network, through_file, wrap
from torch import nn

import fusedacc

F32, F16 = torch.float32, torch.float16
STEPS = 2
INNER = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=1e-3, foreach=True),
    "sgd fused, momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}


def wrapped(model, inner="adamw fused", steps=STEPS, **options):
    return fusedacc.AccumulatingOptimizer(
        INNER[inner](list(model.parameters())), steps, master_weights=True, **options
    )


def train_plainly(model: nn.Module, make, windows: int, divides: bool) -> list[torch.Tensor]:
    """Train with master weights as parameters of an ordinary optimizer and float32 sums of gradients."""
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = make(masters)
    for window in range(windows):
        for step in range(STEPS):
            (loss_of(model, STEPS * window + step) / (STEPS if divides else 1)).backward()
            for master, p in zip(masters, model.parameters(), strict=True):
                term = p.grad.float() * (1 if divides else 1 / STEPS)
                master.grad = term if master.grad is None else master.grad + term
                p.grad = None
        optimizer.step(), optimizer.zero_grad()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
    return masters


def train(model, optimizer, windows, start=0):
    counted = optimizer._window.counted
    for seed in range(STEPS * start, STEPS * (start + windows)):
        (loss_of(model, seed) / (1 if counted else STEPS)).backward()
        if counted or seed % STEPS == STEPS - 1:
            optimizer.step(), optimizer.zero_grad()


def masters_of(optimizer):
    return [optimizer._masters.of(slot) for slot in optimizer._slots]


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("dtype", [LOW, F16])
@pytest.mark.parametrize("inner", INNER)
def test_equal_to_plain_master_weights_bit_for_bit(inner, dtype, counted):
    wanted, ours = network(dtype), network(dtype)
    masters = train_plainly(wanted, INNER[inner], 6, divides=not counted)
    optimizer = wrapped(ours, inner, STEPS if counted else None)
    identities = [id(p) for p in ours.parameters()]
    train(ours, optimizer, 6)
    assert all(map(torch.equal, masters_of(optimizer), masters))
    assert_equal_weights(ours, wanted)
    assert [id(p) for p in ours.parameters()] == identities
    for p in ours.parameters():
        assert p.dtype == dtype
        assert all(v.dtype == F32 for v in optimizer.state[p].values() if isinstance(v, torch.Tensor))


def test_autograd_sees_that_an_update_wrote_the_parameters():
    model = network(LOW)
    optimizer = wrapped(model, steps=1)
    loss = loss_of(model, 0)
    loss_of(model, 1).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("through", ["state_dict", "torch.save", "pickle", "deepcopy"])
def test_saving_and_copying_keep_the_masters_exactly(through):
    straight = network(LOW)
    reference = wrapped(straight)
    train(straight, reference, 4)
    model = network(LOW)
    optimizer = wrapped(model)
    train(model, optimizer, 2)
    if through in ("pickle", "deepcopy"):
        pair = (model, optimizer)
        model, optimizer = copy.deepcopy(pair) if through == "deepcopy" else pickle.loads(pickle.dumps(pair))
    else:
        saved, weights = optimizer.state_dict(), copy.deepcopy(model.state_dict())
        if through == "torch.save":
            saved = through_file(saved)
        model = network(LOW)
        optimizer = wrapped(model)
        optimizer.load_state_dict(saved)
        model.load_state_dict(weights)  # after the optimizer's state: the masters must not change
    train(model, optimizer, 2, start=2)
    assert_equal_weights(straight, model)
    assert all(map(torch.equal, masters_of(reference), masters_of(optimizer)))
    for p, want in zip(model.parameters(), straight.parameters(), strict=True):
        for name, value in reference.state[want].items():
            assert torch.equal(value, optimizer.state[p][name])


def test_loaded_weights_reach_the_masters():
    model, other = network(LOW), network(LOW)
    optimizer = wrapped(model)
    train(model, optimizer, 2)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1.0)
    model.load_state_dict(other.state_dict())
    assert all(map(torch.equal, masters_of(optimizer), map(torch.Tensor.float, other.parameters())))


WRITES = {
    "in place": lambda param, value: param.detach().copy_(value),
    "behind autograd": lambda param, value: param.data.copy_(value),
    "new memory": lambda param, value: setattr(param, "data", value.clone()),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("steps", [STEPS, None])
def test_refresh_copies_the_parameters_into_the_masters(write, steps):
    """The loaded weights equal the rounded masters, so only a refresh removes the masters' low bits."""
    model, other = network(LOW), network(LOW)
    optimizer = wrapped(model, "adamw", steps)
    train(model, optimizer, 3)
    for param, its in zip(model.parameters(), other.parameters(), strict=True):
        write(its, param.detach())
        write(param, param.detach().clone())
    kept = [master.data_ptr() for master in masters_of(optimizer)]
    assert any((m != m.to(LOW)).any() for m in masters_of(optimizer)), "the masters have no low bits"
    optimizer.refresh_master_weights()
    masters = masters_of(optimizer)
    assert all(map(torch.equal, masters, map(torch.Tensor.float, other.parameters())))
    assert [master.data_ptr() for master in masters] == kept
    fresh = wrapped(other, "adamw", steps)
    for param, its in zip(model.parameters(), other.parameters(), strict=True):
        fresh.state[its] = copy.deepcopy(optimizer.state[param])
    train(model, optimizer, 2, start=3)
    train(other, fresh, 2, start=3)
    assert_equal_weights(model, other)


def test_refresh_without_masters_does_nothing():
    model, other = network(LOW), network(LOW)
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.refresh_master_weights()
    closed = wrapped(other)
    train(other, closed, 1)
    kept = [master.clone() for master in masters_of(closed)]
    closed.close()
    closed.refresh_master_weights()
    assert all(map(torch.equal, kept, masters_of(closed)))


def test_a_checkpoint_of_the_bare_optimizer_becomes_float32():
    model = network(LOW)
    bare = INNER["adamw fused"](list(model.parameters()))
    loss_of(model).backward()
    bare.step(), bare.zero_grad()
    optimizer = wrapped(model)
    optimizer.load_state_dict(bare.state_dict())
    train(model, optimizer, 1)
    assert all(s["exp_avg"].dtype == F32 for s in optimizer.state.values())
    optimizer.close()
    late = fusedacc.AccumulatingOptimizer(bare, STEPS, master_weights=True)
    train(model, late, 1)
    assert all(s["exp_avg"].dtype == F32 for s in late.state.values())


def test_loading_masters_without_master_weights_warns():
    model = network(LOW)
    optimizer = wrapped(model)
    train(model, optimizer, 1)
    saved = optimizer.state_dict()
    optimizer.close()
    plain = fusedacc.AccumulatingOptimizer(INNER["adamw fused"](list(model.parameters())), STEPS)
    with pytest.warns(UserWarning, match="pass master_weights=True"):
        plain.load_state_dict(saved)
    train(model, plain, 1)


def test_master_weights_of_float32_parameters_warn():
    with pytest.warns(UserWarning, match="no parameter is bfloat16 or float16"):
        wrapped(network(F32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped(network(LOW))


def test_a_closure_in_a_manual_loop_is_refused():
    with pytest.raises(RuntimeError, match="master_weights=True does not go with a closure"):
        wrapped(network(LOW), steps=None).step(lambda: None)


def test_added_and_unfrozen_parameters_get_masters():
    model = network(LOW)
    model[0].requires_grad_(False)
    optimizer = fusedacc.AccumulatingOptimizer(
        INNER["adamw fused"](list(model[2].parameters())), 1, master_weights=True
    )
    micro_batch(model, optimizer, 0)
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    before = model[0].weight.detach().clone()
    for seed in range(5):
        micro_batch(model, optimizer, seed)
    assert optimizer.state[model[0].weight]["exp_avg"].dtype == F32
    assert not torch.equal(before, model[0].weight)


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_have_the_parameters_dtype_after_an_update(sparse):
    """The update with masters uses a cast of the bfloat16 accumulator."""
    model = nn.Embedding(5, 4, sparse=sparse).to(LOW)
    optimizer = wrap(model, accumulate_dtype=LOW, master_weights=True, max_grad_norm=0.01)
    for set_to_none in (False, True):
        model(torch.tensor([0, 2, 2])).square().sum().backward()
        optimizer.step()
        assert model.weight.grad.dtype == LOW
        optimizer.zero_grad(set_to_none)
