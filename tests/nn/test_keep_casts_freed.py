"""`keep_casts=True`: no cast exists during or after a change of the weights."""

import copy
import gc
import weakref

import pytest
import torch
from kept_casts import casts_of, loss_of, make


@pytest.mark.parametrize("loop", ["counted", "flush", "manual", "closure"])
def test_before_the_inner_step(loop):
    model, optimizer = make("encoder", steps=4 if loop in ("counted", "flush") else None)
    casts, alive = [], []
    optimizer.optimizer.register_step_pre_hook(lambda *_: alive.append([ref() for ref in casts if ref()]))

    def closure():
        loss = loss_of(model)
        loss.backward()
        casts.extend(map(weakref.ref, casts_of(optimizer)))
        return loss

    for _ in range(4 if loop == "counted" else 3):
        closure()
        if loop in ("counted", "flush"):
            optimizer.step()
    if loop == "flush":
        optimizer.flush()
    elif loop == "manual":
        optimizer.step()
    elif loop == "closure":
        optimizer.step(closure)
    assert casts
    assert alive == [[]]
    assert not casts_of(optimizer)


@pytest.mark.parametrize("how", ["discard", "zero_grad", "close", "load", "gone"])
def test_at_the_end_of_a_window(how):
    model, optimizer = make("convolutions", steps=None if how == "zero_grad" else 4)
    state = copy.deepcopy(optimizer.state_dict())
    loss_of(model).backward()
    casts = [weakref.ref(cast) for cast in casts_of(optimizer)]
    assert len(casts) == 5
    if how == "load":
        optimizer.load_state_dict(state)
    elif how == "gone":
        del optimizer
        gc.collect()
    else:
        getattr(optimizer, how)()
    assert all(ref() is None for ref in casts)


@pytest.mark.parametrize("steps", [1, None])
def test_a_step_that_runs_a_forward_and_fails(steps):
    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            loss_of(model, 1)
            assert casts_of(optimizer)
            super().step()
            raise ValueError("broken")

    model, optimizer = make("perceptron", steps=steps, inner=Fails)
    loss_of(model).backward()
    with pytest.raises(ValueError, match="broken"):
        optimizer.step()
    assert not casts_of(optimizer)


def test_parameters_that_are_removed_from_the_optimizer():
    model, optimizer = make("perceptron")
    loss_of(model).backward()
    optimizer.step()
    group = optimizer.param_groups[0]
    group["params"] = [p for p in group["params"] if p is not model[0].weight]
    loss_of(model).backward()
    optimizer.step()
    assert len(casts_of(optimizer)) == 1
    assert "casts: those of 1 weights" in optimizer.explain()
