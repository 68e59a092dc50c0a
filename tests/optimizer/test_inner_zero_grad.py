"""Inner optimizers that override `zero_grad`, as Opacus' DPOptimizer does to clear its buffers."""

import copy

import pytest
import torch
from loops import loss_of, network, wrap

STEPS = 3
WAYS = ["counted", "counted model=", "manual", "manual model=", "python counted"]


class Recording(torch.optim.SGD):
    """Counts its calls of `zero_grad`, with their arguments."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.cleared = []

    def zero_grad(self, set_to_none=True):
        self.cleared.append(set_to_none)
        super().zero_grad(set_to_none)


class Sampling(torch.optim.SGD):
    """Updates from samples that hooks leave on the parameters, and clears them in `zero_grad`."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.grad = torch.stack(p.samples).mean(0)
        return super().step(closure)

    def zero_grad(self, set_to_none=True):
        for p in self.param_groups[0]["params"]:
            p.samples = []
        super().zero_grad(set_to_none)


def wrapped(way, make, monkeypatch):
    monkeypatch.setenv("FUSEDACC_ENGINE", "0" if "python" in way else "")
    model = network()
    optimizer = wrap(
        model, STEPS if "counted" in way else None, make, model=model if "model=" in way else None
    )
    return model, optimizer, "counted" in way


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_it_is_called_where_the_wrapper_clears(way, set_to_none, monkeypatch):
    model, optimizer, counted = wrapped(way, Recording, monkeypatch)
    for index in range(4 * STEPS):
        loss_of(model, index).backward()
        if counted or index % STEPS == STEPS - 1:
            optimizer.step()
            optimizer.zero_grad(set_to_none)
    assert optimizer.optimizer.cleared == [set_to_none] * 4
    loss_of(model).backward()
    optimizer.discard()
    assert optimizer.optimizer.cleared == [set_to_none] * 4 + [True]


def test_a_method_that_the_user_puts_on_the_inner_optimizer_is_called():
    model = network()
    optimizer, calls = wrap(model, 1), []
    for index in range(4):
        if index == 2:
            optimizer.optimizer.zero_grad = lambda set_to_none=True: calls.append(set_to_none)
        loss_of(model, index).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert calls == [True, True]
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("way", WAYS)
def test_samples_of_earlier_windows_do_not_reach_an_update(way, monkeypatch):
    def follow(model):
        for p in model.parameters():
            p.samples = []
            p.register_hook(lambda gradient, p=p: p.samples.append(gradient.clone()) and None)

    model, optimizer, counted = wrapped(way, Sampling, monkeypatch)
    twin = copy.deepcopy(model)
    plain = Sampling(twin.parameters(), lr=0.1)
    follow(model), follow(twin)
    for index in range(3 * STEPS):
        loss_of(model, index).backward()
        loss_of(twin, index).backward()
        if counted or index % STEPS == STEPS - 1:
            optimizer.step()
            optimizer.zero_grad()
        if index % STEPS == STEPS - 1:
            plain.step()
            plain.zero_grad()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def without_arguments(calls):
    return lambda: calls.append(None)


def by_keyword(calls):
    return lambda *, set_to_none=True: calls.append(set_to_none)


def by_position(calls):
    return lambda to_none: calls.append(to_none)


@pytest.mark.parametrize(
    ("make", "wanted"), [(without_arguments, None), (by_keyword, False), (by_position, False)]
)
def test_it_gets_the_argument_if_it_takes_one(make, wanted):
    model = network()
    optimizer, calls = wrap(model, 1), []
    optimizer.optimizer.zero_grad = make(calls)
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert calls == [wanted]
