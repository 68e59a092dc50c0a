"""What real training allocates, from the record of an allocator."""

from fusedacc.planner.allocations import peak
from fusedacc.planner.recorded import Event, blocks_of


def test_replay_tells_kinds_by_allocation_not_by_address():
    events = [
        Event(16, 100),  # weights
        Event(32, 50),  # an activation, and after it a gradient at the same address
        Event(0, 0),
        Event(32, -50),
        Event(32, 70),
        Event(48, 30),
        Event(1, 0),
        Event(64, -1000),  # was there before
        Event(48, -30),
        Event(48, 20),
    ]
    looks = [{16: "weights"}, {16: "weights", 32: "gradients"}]
    found = peak(blocks_of(events, looks, "others"))
    assert (found.bytes, found.by_kind) == (200, {"weights": 100, "gradients": 70, "others": 30})
