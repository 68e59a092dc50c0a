"""Notes on backward passes that count in an update, but may not be meant to."""

import re

import pytest
import torch
from auditing_cases import audited
from plain_loops import data, mlp
from torch.nn import functional as F

from fusedacc.auditing.doubts import MOVED


def train_at_moved_parameters(clears):
    """Train as SAM does: with the gradient at parameters that were moved along a first gradient."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for x, y in data(6):
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            moves = [0.01 * param.grad for param in model.parameters()]
            for param, move in zip(model.parameters(), moves, strict=True):
                param.add_(move)
        if clears:
            optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for param, move in zip(model.parameters(), moves, strict=True):
                param.sub_(move)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("clears", [False, True])
def test_gradients_from_before_the_parameters_were_changed(clears):
    report = audited(lambda: train_at_moved_parameters(clears))
    assert (report.status, MOVED in report.notes) == (0, not clears), report.text


def train_on_adversarial_examples(clears):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for x, y in data(6):
        x.requires_grad_()
        F.cross_entropy(model(x), y).backward()
        if clears:
            optimizer.zero_grad()
        F.cross_entropy(model((x + 0.1 * x.grad.sign()).detach()), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("clears", [False, True])
def test_gradients_of_the_attack_count_too(clears):
    report = audited(lambda: train_on_adversarial_examples(clears))
    notes = [re.sub(r"py:\d+", "py:7", note) for note in report.notes if "inputs" in note]
    expected = (
        "the gradients of backward() at test_doubts.py:7, which has inputs that require gradients, count "
        "too: if only those of the inputs are wanted, use torch.autograd.grad(loss, inputs)"
    )
    assert notes == [expected] * (not clears)
    assert report.status == 0
