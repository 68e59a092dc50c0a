"""What a trace of fake tensors sees: storages from their first tensor to their last, by kind."""

from __future__ import annotations

import sys
import weakref

import pytest
import torch
from planned_models import CPU
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedacc.planner.allocations import ACTIVATIONS, GRADIENTS, OPTIMIZER, PARAMETERS, TEMPORARIES, Inside
from fusedacc.planner.trace import Trace


@pytest.fixture
def trace():
    """Of fake tensors, entered."""
    own = Trace(CPU)
    with FakeTensorMode(), own:
        yield own


def test_a_block_ends_when_the_last_tensor_dies(trace):
    x = torch.empty(10)
    view = x[2:]
    (block,) = trace.blocks
    assert block.bytes == 40
    del x
    assert block.end == float("inf")
    del view
    assert block.end < float("inf")
    assert block.start < block.end


def test_kinds_by_phase_and_by_mark(trace):
    weight = torch.empty(3)
    trace.mark([weight], PARAMETERS)
    with trace.phase(ACTIVATIONS):
        kept = weight * 2
        with trace.phase(TEMPORARIES):
            passing = kept * 2
        other = kept * 2
    state = torch.empty(5)
    trace.mark([state[1:]], OPTIMIZER)  # a view stands for all
    assert [block.kind for block in trace.blocks] == [
        PARAMETERS,
        ACTIVATIONS,
        TEMPORARIES,
        ACTIVATIONS,
        OPTIMIZER,
    ]
    assert trace.bytes(ACTIVATIONS) == 24
    assert trace.kind == TEMPORARIES
    del passing, other


def test_what_was_there_before_is_told_by_mark():
    with FakeTensorMode() as mode:
        before = torch.empty(7)
    trace = Trace(CPU)
    trace.mark([before], PARAMETERS)
    with mode, trace:
        made = before + 1
        del made
    assert trace.peak().bytes == 56
    del before
    assert trace.bytes(PARAMETERS) == 0


def test_other_devices_do_not_count(trace):
    torch.empty(5, device="meta")
    assert not trace.blocks


def test_terms_of_a_sum_are_gradients(trace):
    sums, terms = ([torch.empty(4) for _ in range(2)] for _ in range(2))
    trace.mark(sums, OPTIMIZER)
    torch._foreach_add_(sums, terms)
    assert [block.kind for block in trace.blocks] == [OPTIMIZER, OPTIMIZER, GRADIENTS, GRADIENTS]


def test_operators_that_allocate_inside_are_asked_for_once_a_signature(trace):
    asked = []

    def measure(signatures):
        asked.append(list(signatures))
        return dict.fromkeys(asked[0], Inside(1000, 0))

    weight, x = torch.empty(2, 3, 3, 3), torch.empty(1, 3, 8, 8)
    for _ in range(3):
        y = torch.nn.functional.conv2d(x, weight)
        del y
    assert len(trace.operators) == 3
    outside = trace.peak()
    found = trace.peak(measure)
    assert len(asked[0]) == 1
    assert found.bytes == weight.nbytes + x.nbytes + 1000
    assert outside.bytes == weight.nbytes + x.nbytes + 2 * 36 * 4
    assert found.by_kind[TEMPORARIES] == found.bytes


def test_a_trace_that_is_gone_lets_tensors_die(monkeypatch):
    unraised = []
    monkeypatch.setattr(sys, "unraisablehook", unraised.append)
    trace = Trace(CPU)
    with FakeTensorMode(), trace:
        x = torch.empty(3)
    blocks, gone = trace.blocks, weakref.ref(trace)
    del trace
    assert gone() is None
    del x
    assert unraised == []
    assert blocks[0].end == float("inf")  # nobody counts any more
