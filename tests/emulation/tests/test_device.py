"""Tests which errors the emulated device reports, and that it reports nothing for correct programs."""

from __future__ import annotations

import pytest
import torch
from emulation import torch_cuda
from gpu import captured

pytestmark = pytest.mark.cuda


def reported() -> str:
    """Return the errors that the device has reported since the last call."""
    return " ".join(torch_cuda.take_reports())


@pytest.fixture
def sides() -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    return torch.cuda.Stream(), torch.cuda.Stream()


def test_reading_what_another_stream_writes_needs_a_wait(sides):
    x = torch.zeros(4, device="cuda")
    with torch.cuda.stream(sides[0]):
        x + 1
    assert "reads without waiting for" in reported()
    sides[1].wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(sides[1]):
        x + 1
    assert not reported()


def test_writing_what_another_stream_reads_needs_a_wait(sides):
    x = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(sides[0]):
        x + 1
    x.add_(1)
    assert "writes without waiting for" in reported()


def test_an_event_orders_and_so_does_the_host(sides):
    x, event = torch.zeros(4, device="cuda"), torch.cuda.Event()
    event.record()
    with torch.cuda.stream(sides[0]):
        event.wait()
        x.add_(1)
    sides[0].synchronize()
    with torch.cuda.stream(sides[1]):
        x.add_(1)
    assert not reported()


def test_memory_is_given_back_to_its_stream_unless_its_use_is_recorded(sides):
    for records in (False, True):
        x = torch.zeros(4, device="cuda")
        sides[0].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(sides[0]):
            x + 1
            if records:
                x.record_stream(sides[0])
        del x
        torch.zeros(4, device="cuda")
        assert ("may be given memory again" in reported()) == (not records)


def test_a_copy_to_the_host_arrives_when_the_host_waits():
    x = torch.ones(4, device="cuda")
    there = x.to("cpu", non_blocking=True)
    assert not torch.equal(there, torch.ones(4))
    torch.cuda.synchronize()
    assert torch.equal(there, torch.ones(4))
    assert torch.equal(x.to("cpu"), torch.ones(4))


def test_a_graph_runs_when_it_is_replayed():
    x, y = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    graph, doubled = captured(lambda: y.add_(x * 2))
    assert y.tolist() == [2.0] * 4  # from the warm-up
    x.fill_(3.0)
    graph.replay()
    graph.replay()
    assert y.tolist() == [14.0] * 4
    assert doubled is y


def test_a_capture_must_be_joined_and_wait_for_nothing_outside(sides):
    x = torch.ones(4, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        sides[0].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(sides[0]):
            x.add_(1)
    assert "has not joined" in reported()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.cuda.current_stream().wait_stream(sides[1])
    assert "no part of the capture" in reported()


def test_waits_of_the_host_can_be_forbidden():
    x = torch.ones(4, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            x.cpu()
        with pytest.raises(RuntimeError, match="synchronizing"):
            x.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
