"""The wrapper is made and used inside `torch.inference_mode()`, and trains outside."""

import copy

import pytest
import torch
from loops import LOW, loss_of, network, wrap

STEPS = 3
ACTIONS = ["make", "state", "load", "flush", "discard", "step", "explain", "close"]


def train(action, mode, dtype, counted, with_model, options):
    model = network(dtype)

    def make():
        return wrap(model, STEPS if counted else None, model=model if with_model else None, **options)

    def micro_batches(first, last):
        for index in range(first, last):
            loss_of(model, index).backward()
            if counted or index % STEPS == STEPS - 1:
                optimizer.step()
                optimizer.zero_grad()

    if action == "make":
        with mode():
            optimizer = make()
    else:
        optimizer = make()
    micro_batches(0, STEPS + 2)
    with mode():
        if action == "state":
            optimizer.state_dict()
        elif action == "load":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif action == "flush":
            optimizer.flush()
        elif action in ("discard", "step", "explain", "close"):
            getattr(optimizer, action)()
    optimizer.zero_grad() if action in ("flush", "close") else None
    micro_batches(2 * STEPS, 4 * STEPS)
    return list(model.parameters())


@pytest.mark.parametrize("options", [{}, {"master_weights": True}, {"max_grad_norm": 1.0}], ids=str)
@pytest.mark.parametrize("with_model", [False, True], ids=["", "model="])
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.sweep
def test_training_continues_as_after_no_grad(action, counted, with_model, options):
    dtype = LOW if "master_weights" in options else torch.float32
    wanted = train(action, torch.no_grad, dtype, counted, with_model, options)
    found = train(action, torch.inference_mode, dtype, counted, with_model, options)
    assert all(map(torch.equal, found, wanted))
