"""The training benchmark: all loops train alike, and the parts of a figure add up. No test checks times."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.contestants import loops
from benchmarks.suites import training
from examples.demo import measure
from examples.demo.loops import StockLoop
from examples.demo.model import load_text
from fusedacc.planner.allocations import recorded_peak

DTYPES = ("float32", "bfloat16", "autocast")


def config(dtype: str, steps: int = 4, device: str = "cpu"):
    shape = {"width": 32, "layers": 2, "heads": 2, "context": 16, "micro_batch_size": 2}
    return loops.Demo(dtype, torch.device(device), steps, **shape)


def batches(of, updates: int):
    return [measure.batches(load_text(), of, update) for update in range(updates)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_ways_train_alike(dtype):
    of = config(dtype)
    data = batches(of, 3)
    losses, weights = {}, {}
    for way in loops.VARIANTS[dtype]:
        loop = way.make(of)
        losses[way.name] = [loop.update(of_one).item() for of_one in data]
        weights[way.name] = loop.parameters
    for fused in (True, False):
        first, *others = [way.name for way in loops.VARIANTS[dtype] if way.fused == fused and way.exact]
        assert others
        for name in others:  # float32 sums in one order, scaled by a power of two: bit for bit
            assert losses[name] == losses[first]
            assert all(map(torch.equal, weights[name], weights[first]))
    inside = [way.name for way in loops.VARIANTS[dtype] if not way.exact]
    assert inside == [loops.INSIDE.name, loops.KEPT.name][: 1 + (dtype == "autocast")]
    # The epsilon of the products. For float32, errors of a few dozen products add up.
    rounding = 2.0**-18 if dtype == "float32" else 2.0**-8
    for name in inside:
        assert losses[name][0] == losses["fusedacc"][0]
        assert losses[name] == pytest.approx(losses["fusedacc"], rel=rounding)
        assert losses[name] == losses[inside[0]]
    stock = StockLoop(of)
    stocks = [stock.update(of_one) for of_one in data]  # adds losses in float64
    assert losses["fusedacc, fused AdamW"] == pytest.approx(stocks, rel=1e-6)
    assert losses["fusedacc"][-1] < losses["fusedacc"][0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_meter_counts_every_operator_of_every_way(dtype):
    of = config(dtype)
    size = sum(p.numel() for p in of.model().parameters())
    found = {way.name: training.count(way, of, load_text()) for way in loops.VARIANTS[dtype]}
    for name, counted in found.items():
        assert counted["uncounted"] == {}, name
        assert training.of_known(counted["by_phase_and_kind"]["update"]) > 4 * size
    stock = min(counted["total_bytes"] for name, counted in found.items() if name.startswith("stock"))
    # If all dtypes are equal, the window's first gradient becomes the sum. Plain PyTorch scales the loss.
    more = 0 if dtype == "bfloat16" else 8 * size
    assert found["fusedacc, fused AdamW"]["total_bytes"] <= stock + more
    # 8 bytes per micro-batch after the first are saved in float32, 4 where sums and gradients differ.
    inside = found[loops.INSIDE.name]["total_bytes"]
    assert inside < stock - 3 * 3 * size
    if dtype == "autocast":  # three of four casts of a Linear's weight, 6 bytes each
        weights = sum(m.weight.numel() for m in of.model().modules() if isinstance(m, torch.nn.Linear))
        saved = inside - found[loops.KEPT.name]["total_bytes"]
        assert saved == pytest.approx(3 * 6 * weights, rel=0.01)


@pytest.mark.cuda
def test_the_peak_on_a_gpu_is_that_of_the_allocator():
    of = config("bfloat16", 2, "cuda")
    data = batches(of, 2)
    way = loops.VARIANTS["bfloat16"][0]
    way._train(of, data, lambda held: None)  # the libraries' workspaces
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    found = way.peak(of, data)
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    assert sum(found.values()) == peak
    assert found["weights"] == 2 * sum(p.numel() for p in of.model().parameters())


def test_the_gpu_allocators_history_is_replayed(monkeypatch):
    device = torch.device("cuda", 1)
    old = {"action": "alloc", "addr": 8, "size": 10**6}
    traces = [[], [old]]
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": traces})
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *_, **__: None)

    def event(action, address, size):
        traces[1].append({"action": action, "addr": address, "size": size})

    def tensor(address, where):
        storage = SimpleNamespace(data_ptr=lambda: address)
        return SimpleNamespace(device=torch.device(where), untyped_storage=lambda: storage)

    def train(look):
        event("segment_alloc", 16, 2_000_000)
        event("alloc", 16, 100)
        event("alloc", 32, 50)
        look({"weights": [tensor(16, "cuda")], "optimizer": [tensor(32, "cpu")]})
        event("free_requested", 32, 50)
        event("free_completed", 32, 50)
        event("alloc", 32, 60)
        look({"gradients": [tensor(32, "cuda")]})

    assert recorded_peak(train, device, "other").by_kind == {"weights": 100, "gradients": 60}
