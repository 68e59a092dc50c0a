"""Operators that allocate inside: which are asked, what a trial finds, and what is guessed."""

import torch

from fusedacc.planner import fake_tensors
from fusedacc.planner.allocations import Inside
from fusedacc.planner.fake_tensors import OperatorTrials, signature

aten = torch.ops.aten
PRODUCT = aten.mm.default


def asked_of(func, *args):
    found = signature(func, args, {})
    assert found is not None
    return found


def test_each_is_tried_once_and_those_that_fail_are_left_out(monkeypatch):
    calls = []
    real = fake_tensors.inside_of_calls
    monkeypatch.setattr(fake_tensors, "inside_of_calls", lambda own: calls.append(len(own)) or real(own))
    x = torch.ones(8, 8, dtype=torch.bfloat16)
    good, bad = asked_of(PRODUCT, x, x), asked_of(PRODUCT, x, torch.ones(3, 3, dtype=torch.bfloat16))
    trials = OperatorTrials()
    assert set(trials([good, bad, good])) == {good}
    assert set(trials([good])) == {good}
    assert calls == [2, 0]


def test_of_large_ones_a_share_of_the_samples_is_tried(monkeypatch):
    monkeypatch.setattr(fake_tensors, "MOST_BYTES", 10_000)
    tried = []

    def inside(calls):
        tried.extend(call.args[0].operands[0].shape for call in calls)
        return [Inside(700, 200)] * len(calls)

    monkeypatch.setattr(fake_tensors, "inside_of_calls", inside)
    weight = torch.ones(4, 4, 3, 3)

    def of(rows):
        image = torch.empty(rows, 4, 8, 8, device="meta")
        args = (image, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        return asked_of(aten.convolution.default, *args)

    small, large = of(4), of(64)
    assert small.bytes <= 10_000 < large.bytes
    found = OperatorTrials()([small, large])
    assert found[small] == Inside(700, 200)
    assert found[large] == Inside(700 * 8, 200 * 8)
    assert sorted(tried) == [(4, 4, 8, 8), (8, 4, 8, 8)]
