"""What a CUDA graph may capture.

Here the rules are told that a capture is running; `tests/cuda` has real captures.
"""

import pytest
import torch
from loops import loss_of, micro_batch, network, wrap

from fusedacc.kernels import torch_state


@pytest.fixture
def graph(monkeypatch):
    """Return a function: `graph(True)` begins a capture, `graph(False)` ends it."""
    state = {"on": False}
    monkeypatch.setattr(torch_state, "capturing", lambda: state["on"])
    return lambda on: state.update(on=on)


def mark(optimizer, text):
    """Mark every node. A node that is freed loses its mark."""
    for node in optimizer._capture.registry.nodes.values():
        node.metadata["mark"] = text


def marks(optimizer):
    return [node.metadata.get("mark") for node in optimizer._capture.registry.nodes.values()]


def test_whole_windows_are_captured_on_separate_nodes(graph):
    model = network()
    optimizer = wrap(model, 2)
    optimizer._engine.set_condition("the capture is not a real one", True)
    micro_batch(model, optimizer, 0), micro_batch(model, optimizer, 1)
    mark(optimizer, "outside")
    graph(True)
    optimizer.zero_grad()
    assert marks(optimizer) == [None] * 4
    mark(optimizer, "inside")
    for seed in range(4):
        micro_batch(model, optimizer, seed)
    assert marks(optimizer) == ["inside"] * 4
    graph(False)
    optimizer.zero_grad()
    assert marks(optimizer) == [None] * 4
    micro_batch(model, optimizer, 0), micro_batch(model, optimizer, 1)
    assert optimizer.num_updates == 4


def test_a_capture_without_zero_grad_inside_is_refused(graph):
    model = network()
    optimizer = wrap(model, 1)
    graph(True)
    assert not optimizer.has_updated
    with pytest.raises(RuntimeError, match=r"call optimizer\.zero_grad\(\) inside the capture"):
        loss_of(model).backward()


@pytest.mark.parametrize("begins_inside", [True, False])
def test_a_part_of_a_window_is_refused(graph, begins_inside):
    model = network()
    optimizer = wrap(model, 3)
    graph(begins_inside)
    optimizer.zero_grad()
    micro_batch(model, optimizer, 0)
    graph(not begins_inside)
    optimizer.zero_grad()  # clears nothing inside a window
    optimizer._capture.registry.refresh()
    where = "inside" if begins_inside else "outside"
    with pytest.raises(RuntimeError, match=f"1 of 3 micro-batches {where} the capture"):
        loss_of(model).backward()


def test_skipping_an_update_on_the_host_is_refused(graph):
    model = network()
    optimizer = wrap(model, 1, torch.optim.SGD, skip_nonfinite=True)
    graph(True)
    optimizer.zero_grad()
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match="cannot be captured with SGD here"):
        optimizer.step()


def test_skipped_updates_are_counted_in_the_same_memory():
    """A graph adds to the same memory at each replay."""
    model = network()
    optimizer = wrap(model, 1, lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True), skip_nonfinite=True)
    places = set()
    for seed in range(3):
        micro_batch(model, optimizer, seed)
        places.add(optimizer._inner_update.skipped.data_ptr())
    assert len(places) == 1
