"""Operators that allocate inside: which are asked, what a trial finds, and what is guessed."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedacc.planner import operators
from fusedacc.planner.allocations import Inside
from fusedacc.planner.operators import Operand, OperatorTrials, signature

aten = torch.ops.aten
PRODUCT = aten.mm.default


def test_which_are_asked():
    wide, narrow = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bfloat16)
    assert signature(PRODUCT, (wide, wide), {}) is None
    assert signature(PRODUCT, (narrow, narrow), {}) is not None
    assert signature(aten.add.Tensor, (wide, wide), {}) is None
    assert signature(aten.add.Tensor, (wide, narrow), {}) is not None
    assert signature(aten.add.Tensor, (narrow, torch.tensor(1.0)), {}) is None  # a number, wrapped
    assert signature(aten.mul.Tensor, (wide, wide > 0), {}) is None
    assert signature(aten.relu.default, (narrow,), {}) is None


def test_signatures_are_those_of_layouts():
    def of(tensor):
        return signature(PRODUCT, (tensor, torch.ones(4, 4, dtype=torch.bfloat16)), {})

    x = torch.ones(4, 4, dtype=torch.bfloat16)
    assert of(x) == of(x.clone())
    assert hash(of(x)) == hash(of(x.clone()))
    assert of(x) != of(x.t())
    assert of(x) != of(x.half())
    with FakeTensorMode():
        fake = torch.ones(4, 4, dtype=torch.bfloat16)
    assert of(x) == signature(PRODUCT, (fake, fake), {})
    assert of(x).bytes == 64


def test_bytes_of_an_operand_are_those_that_it_reaches():
    assert Operand((2, 3), (10, 1), torch.float32).bytes == 4 * 13
    assert Operand((0, 3), (3, 1), torch.float32).bytes == 0
    assert Operand((2, 3), (0, 1), torch.float32).bytes == 12
    made = Operand((2, 3), (10, 1), torch.bfloat16).made()
    assert (made.shape, made.stride(), made.sum()) == ((2, 3), (10, 1), 0)


def asked_of(func, *args):
    found = signature(func, args, {})
    assert found is not None
    return found


def test_a_trial_finds_a_copy_and_what_is_kept():
    """A product of two dtypes' sum casts one: its bytes are there in the call, beside the result's."""
    wide, narrow = torch.ones(256, 64), torch.ones(256, 64, dtype=torch.bfloat16)
    mixed = asked_of(aten.where.self, wide > 0, wide, narrow)
    (found,) = OperatorTrials()([mixed]).values()
    assert found.kept == wide.nbytes
    assert found.peak >= found.kept


def test_each_is_tried_once_and_those_that_fail_are_left_out(monkeypatch):
    calls = []
    real = operators.inside_of_calls
    monkeypatch.setattr(operators, "inside_of_calls", lambda own: calls.append(len(own)) or real(own))
    x = torch.ones(8, 8, dtype=torch.bfloat16)
    good, bad = asked_of(PRODUCT, x, x), asked_of(PRODUCT, x, torch.ones(3, 3, dtype=torch.bfloat16))
    trials = OperatorTrials()
    assert set(trials([good, bad, good])) == {good}
    assert set(trials([good])) == {good}
    assert calls == [2, 0]


def test_of_large_ones_a_share_of_the_samples_is_tried(monkeypatch):
    monkeypatch.setattr(operators, "MOST_BYTES", 10_000)
    tried = []

    def inside(calls):
        tried.extend(call.args[0].operands[0].shape for call in calls)
        return [Inside(700, 200)] * len(calls)

    monkeypatch.setattr(operators, "inside_of_calls", inside)
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
