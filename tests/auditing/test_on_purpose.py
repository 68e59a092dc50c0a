"""What programs do on purpose: equal micro-batches, restored sums, and float32 copies."""

import copy

import torch
from auditing_cases import audited, factors
from plain_loops import K, adam, data, mlp, sgd
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn import functional as F

import fusedacc


def backward(model, batch, divisor=K, **options):
    x, y = batch
    (F.cross_entropy(model(x), y) / divisor).backward(**options)


# Micro-batches with equal gradients


def test_equal_micro_batches_do_not_hide_a_lost_one():
    model, batches = mlp(), list(data(12))
    optimizer = sgd(model)

    def train():
        for start in range(0, 12, 2):
            lost, kept = batches[start : start + 2]
            backward(model, lost, 3)
            optimizer.zero_grad()
            for batch in (kept, kept):
                backward(model, batch, 3)
            optimizer.step()
            optimizer.zero_grad()

    assert factors(audited(train)) == {"lost": 0.6667}


def test_equal_micro_batches_that_do_not_count_are_lost():
    model, batches = mlp(), list(data(12))
    optimizer = sgd(model)

    def train():
        for start in range(0, 12, 2):
            lost, kept = batches[start : start + 2]
            for batch in (lost, lost, kept):
                optimizer.zero_grad()
                backward(model, batch, 1)
            optimizer.step()

    assert factors(audited(train)) == {"lost": 0.3333}


def test_equal_micro_batches_do_not_hide_the_update_before():
    model = mlp()
    optimizer = sgd(model)

    def train():
        for i, batch in enumerate(data(6)):
            for _ in range(2):
                backward(model, batch, 2)
            optimizer.step()
            if i % 2:
                optimizer.zero_grad()

    assert factors(audited(train)) == {"stale": 1.0}


def test_a_loss_that_ran_twice_and_was_cleared_is_not_double():
    model, batches = mlp(), list(data(12))
    optimizer = sgd(model)

    def train():
        for start in range(0, 12, 2):
            backward(model, batches[start], 1, retain_graph=True)
            optimizer.zero_grad()
            x, y = batches[start + 1]
            loss = F.cross_entropy(model(x), y)
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.zero_grad()
            backward(model, batches[start], 1)
            optimizer.step()
            optimizer.zero_grad()

    assert "double" not in factors(audited(train))


def test_losses_of_one_scalar_are_not_one_loss():
    weight = nn.Parameter(torch.ones(()))
    node = (weight * 1.0).grad_fn.next_functions[0][0]  # keeps the leaf's node alive

    def train():
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(2):
            (weight * 0.5).backward()
        optimizer.step()

    assert "double" not in factors(audited(train))
    assert node.variable is weight


# Sums that were made elsewhere


def counted(model):
    return fusedacc.AccumulatingOptimizer(sgd(model), K)


def alike(count):
    """Return micro-batches whose gradients are alike, so that others can almost explain a missing one."""
    return [(x, torch.zeros_like(y)) for x, y in data(count)]


def train_on(model, optimizer, batches):
    for batch in batches:
        backward(model, batch, 1)
        optimizer.step()
        optimizer.zero_grad()


def test_a_window_that_goes_on_after_a_restart_is_not_judged():
    model, batches = mlp(), alike(12)
    optimizer = counted(model)
    train_on(model, optimizer, batches[:1])
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def resume():
        restarted = mlp()
        optimizer = counted(restarted)
        restarted.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
        train_on(restarted, optimizer, batches[1:])

    report = audited(resume)
    assert (report.status, report.as_json()["updates"], report.as_json()["checked"]) == (0, 3, 2), report.text


def test_a_copy_of_an_optimizer_goes_on_in_its_window():
    model, batches = mlp(), alike(12)
    optimizer = counted(model)

    def train():
        train_on(model, optimizer, batches[:1])
        twin, other = copy.deepcopy((model, optimizer))
        train_on(model, optimizer, batches[1:])
        train_on(twin, other, batches[1:])

    report = audited(train)
    assert (report.status, report.as_json()["updates"], report.as_json()["checked"]) == (0, 6, 5), report.text


def test_a_window_goes_on_at_another_line():
    model, batches = mlp(), list(data(12))
    optimizer = counted(model)

    def train():
        train_on(model, optimizer, batches[:6])
        for x, y in batches[6:]:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    report = audited(train)
    assert (report.status, report.as_json()["checked"]) == (0, 3), report.text


def test_micro_batches_before_a_checkpoint_is_loaded_need_not_count():
    model, batches = mlp(), list(data(13))
    optimizer = counted(model)
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def train():
        train_on(model, optimizer, batches[:1])
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
        train_on(model, optimizer, batches[1:])

    report = audited(train)
    assert (report.status, report.as_json()["checked"]) == (0, 3), report.text


def test_sums_of_a_checkpoint_that_an_update_has_used_before():
    model, batches = mlp(), list(data(2))
    optimizer = counted(model)

    def train():
        train_on(model, optimizer, batches[:1])
        state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        optimizer.flush()
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
        train_on(model, optimizer, batches[1:])
        optimizer.flush()

    report = audited(train)
    assert (report.status, report.as_json()["updates"], report.as_json()["checked"]) == (0, 2, 1), report.text


def test_state_that_is_made_for_loading_is_no_update():
    model, batches = mlp(), list(data(12))
    model[0].bias.requires_grad_(False)
    optimizer = fusedacc.AccumulatingOptimizer(adam(model), K)

    def train():
        train_on(model, optimizer, batches[:2])
        get_optimizer_state_dict(model, optimizer)  # makes a step with gradients of 0
        train_on(model, optimizer, batches[2:])

    report = audited(train)
    assert (report.status, report.as_json()["updates"], report.as_json()["checked"]) == (0, 3, 3), report.text


# Float32 copies


class Blocks(nn.Module):
    """Two blocks with equal values in their normalization layers."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x, depth):
        for block in self.blocks[:depth]:
            x = torch.tanh(block(x))
        return self.head(x).float()


def train_copies(depths):
    """Train float32 copies: one update for each of these numbers of blocks."""
    model = Blocks().to(torch.bfloat16)
    params = list(model.parameters())
    copies = [nn.Parameter(param.detach().float()) for param in params]
    optimizer = torch.optim.SGD(copies, lr=0.05)
    for depth in depths:
        for _ in range(2):
            x, y = torch.randn(8, 16, dtype=torch.bfloat16), torch.randint(0, 4, (8,))
            (F.cross_entropy(model(x, depth), y) / 2).backward()
        for param, copied in zip(params, copies, strict=True):
            copied.grad = None if param.grad is None else param.grad.float()
            param.grad = None
        optimizer.step()
        with torch.no_grad():
            for param, copied in zip(params, copies, strict=True):
                param.copy_(copied)


def test_copies_of_parameters_with_equal_values():
    report = audited(lambda: train_copies([2] * 5))
    assert (report.status, report.notes, report.as_json()["checked"]) == (0, [], 5), report.text


def test_copies_of_parameters_that_join_later():
    report = audited(lambda: train_copies([1, 2, 2, 1, 2]))
    assert (report.status, report.notes, report.as_json()["checked"]) == (0, [], 5), report.text
