"""Which stream waits for which when modules add gradients themselves, tested with fake streams."""

import contextlib
import itertools
import types

import pytest
import torch

from fusedacc.autograd import graph_task
from fusedacc.autograd.capture import Capture
from fusedacc.autograd.graph_task import GraphTask


@pytest.fixture
def device(monkeypatch):
    """Fake a GPU with a current stream that can be set, and record which stream waits for which."""
    state = types.SimpleNamespace(current=0, waits=[])

    @contextlib.contextmanager
    def entered(stream):
        before, state.current = state.current, stream.cuda_stream
        yield
        state.current = before

    class Stream:
        def __init__(self, raw):
            self.cuda_stream = raw

        def wait_stream(self, other):
            state.waits.append((self.cuda_stream, other.cuda_stream))

    fresh = itertools.count(-1, -1)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: state.current, raising=False)
    # As in torch: without an address, a new stream.
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda raw, device=None: Stream(raw or next(fresh)))
    monkeypatch.setattr(torch.cuda, "get_stream_from_external", lambda raw, device=None: Stream(raw))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream(state.current))
    monkeypatch.setattr(torch.cuda, "stream", entered)
    return state


def slot():
    return types.SimpleNamespace(lane=(torch.device("cuda", 0),), writer_stream=None)


def test_a_write_waits_for_the_previous_write_and_the_end_for_all_writes(device):
    task, shared, other = GraphTask(True), slot(), slot()
    for device.current, weight in ((7, shared), (9, shared), (8, other)):
        graph_task.wait_for_last_writer(task, weight)
    assert device.waits == [(9, 7)]
    device.current = 7
    graph_task.wait_for_all_writers(task)
    assert device.waits[1:] == [(7, 9), (7, 8)]
    assert shared.writer_stream is None
    assert other.writer_stream is None


def test_the_current_stream_waits_for_work_on_another_stream(device):
    where = torch.device("cuda", 0)
    with graph_task.on_stream(0, where):
        assert device.current == 0
    assert device.waits == []
    device.current = 7
    with graph_task.on_stream(0, where):
        assert device.current == 0
        assert device.waits == []
    assert (device.current, device.waits) == (7, [(7, 0)])


def test_a_bucket_is_added_on_its_own_stream_after_the_writes_of_modules(device):
    """The callers' streams do not wait for each other. The node's stream orders their additions."""
    done = []

    class Taken:
        stream = 3

        def take(self):
            return [weight], [torch.ones(1)], False

    weight = types.SimpleNamespace(
        lane=(torch.device("cuda", 0),), writer_stream=5, paths=("gemm",), on_cuda=True, native_hook=object()
    )
    owner = types.SimpleNamespace(
        _lock=contextlib.nullcontext(),
        hooks=types.SimpleNamespace(release_to_python=lambda slot: done.append("handed over")),
        _add=lambda task, slots, gradients, adoptable: done.append(device.current),
    )
    task = GraphTask(True)
    for device.current in (7, 9):
        Capture._add_bucket(owner, task, Taken())
    assert done == ["handed over", 3, "handed over", 3]
    assert device.waits == [(3, 5), (7, 3), (9, 3)]
    graph_task.wait_for_all_writers(task)
    assert weight.writer_stream is None
