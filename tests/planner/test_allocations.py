"""The peak of blocks: its time, its parts, and the memory that operators allocate internally."""

import random

import torch

from fusedacc.planner import prediction
from fusedacc.planner.allocations import (
    ACTIVATIONS,
    GRADIENTS,
    PARAMETERS,
    TEMPORARIES,
    Block,
    Inside,
    Operator,
    peak,
)
from fusedacc.planner.prediction import OperatorTrials, signature


def test_internal_memory_of_an_operator_exists_only_in_its_call():
    blocks = [Block(5, 0, PARAMETERS), Block(3, 4, ACTIVATIONS)]
    calls = [Operator(2, "a"), Operator(6, "b"), Operator(7, "unknown")]
    inside = {"a": Inside(9, 0), "b": Inside(7, 0)}
    found = peak(blocks, calls, inside)
    assert found.bytes == 5 + 3 + 7
    assert dict(found.by_kind) == {PARAMETERS: 5, ACTIVATIONS: 3, TEMPORARIES: 7}
    assert peak(blocks, calls).bytes == 8


def test_a_workspace_that_fake_tensors_lack_is_added_to_the_last_output():
    outputs = [Block(4, 1, ACTIVATIONS), Block(0, 2, ACTIVATIONS, 5)]
    call = Operator(0, "rnn", outputs)
    found = peak([*outputs, Block(9, 6, GRADIENTS)], [call], {"rnn": Inside(20, 14)})
    assert outputs[1].bytes == 10
    assert found.bytes == 20
    # A second call adds nothing.
    assert peak([*outputs, Block(9, 6, GRADIENTS)], [call], {"rnn": Inside(20, 14)}) == found


def test_the_peak_is_the_maximum_over_time():
    draw = random.Random(5)
    for _ in range(200):
        blocks = []
        for _ in range(draw.randrange(1, 12)):
            start = draw.randrange(20)
            end = draw.choice([float("inf"), start + draw.randrange(1, 9)])
            blocks.append(Block(draw.randrange(9), start, draw.choice([PARAMETERS, GRADIENTS]), end))
        at = [sum(own.bytes for own in blocks if own.start <= now < own.end) for now in range(40)]
        found = peak(blocks)
        assert found.bytes == max(at)
        assert sum(found.by_kind.values()) == found.bytes


def test_each_operator_is_tried_once_and_failing_ones_are_left_out(monkeypatch):
    calls = []
    real = prediction.inside_of_calls
    monkeypatch.setattr(prediction, "inside_of_calls", lambda own: calls.append(len(own)) or real(own))
    x, wrong = (torch.ones(size, size, dtype=torch.bfloat16) for size in (8, 3))
    good, bad = (signature(torch.ops.aten.mm.default, (x, right), {}) for right in (x, wrong))
    assert None not in (good, bad)
    trials = OperatorTrials()
    assert set(trials([good, bad, good])) == {good}
    assert set(trials([good])) == {good}
    assert calls == [2, 0]
