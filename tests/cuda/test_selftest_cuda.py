"""Self-tests at first use on a GPU: real kernels pass, wrong ones are not used, captures defer the tests."""

import json
import warnings

import pytest
import torch
from broken_backends import breaks, self_tests
from gpu import needs, nothing_waits
from torch import nn

import fusedacc
from fusedacc import __main__
from fusedacc.commands import selftest as command
from fusedacc.kernels import dtypes, grouped, registry, selftest

pytestmark = pytest.mark.cuda
FLOAT = torch.float32


@pytest.fixture
def device(tmp_path):
    """Return a device without results of self-tests."""
    with self_tests(tmp_path):
        yield torch.device("cuda", torch.cuda.current_device())


def make(device, backend="auto", dtype=FLOAT):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).to(device, dtype)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"model": model, "max_grad_norm": 1.0, "backend": backend}
    return model, fusedacc.AccumulatingOptimizer(inner, 2, **options)


def test_a_wrapper_tests_what_it_uses_and_its_steps_wait_for_nothing(device):
    x = torch.ones(3, 8, device=device, dtype=torch.bfloat16)
    model, optimizer = make(device, dtype=torch.bfloat16)
    name = registry.select(device, FLOAT, torch.bfloat16).backend.name
    pairs = ("bfloat16 into float32", "float32 into float32", "float32 into bfloat16")
    product = "torch's product into a float32 sum: bfloat16 into float32"
    tested, wanted = selftest.results(device), {f"{name}: {pair}" for pair in pairs}
    assert wanted <= set(tested) <= wanted | {product}
    assert not any(tested.values())
    with nothing_waits():
        for _ in range(4):
            model(x).float().square().mean().backward()
            optimizer.step(), optimizer.zero_grad()
    assert selftest.results(device) == tested


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_each_backend_passes(device, backend):
    needs(backend)
    chosen = registry.select(device, torch.bfloat16, torch.bfloat16, backend).backend
    assert selftest.results(device) == {f"{chosen.name}: bfloat16 into bfloat16": None}


def test_a_wrong_kernel_is_not_used(device):
    first = registry.select_untested(device, FLOAT, FLOAT).name
    with breaks(first, "misaligned"):
        with pytest.warns(RuntimeWarning, match=f"the self-test of '{first}' has failed on cuda:"):
            _, optimizer = make(device)
        assert registry.select(device, FLOAT, FLOAT).backend.name != first
        assert "its self-test has failed: float32 into float32: " in optimizer.explain()
        with pytest.raises(RuntimeError, match=f"backend='{first}' cannot run .*: its self-test has failed"):
            make(device, first)


def test_a_capture_defers_it(device):
    """A captured backend does not count as tested. The next step outside of the capture finds the mistake."""
    first = registry.select_untested(device, FLOAT, FLOAT).name
    graph, memory = torch.cuda.CUDAGraph(), torch.ones(8, device=device)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([nn.Parameter(memory)], lr=0.1), 2)
    assert registry.select_untested(device, FLOAT, FLOAT).name == first
    assert selftest.results(device) == {}
    assert selftest.deferred
    with breaks(first, "tail"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert [f"'{first}' has failed" in str(each.message) for each in caught] == [True]
    assert registry.select(device, FLOAT, FLOAT).backend.name != first
    assert not selftest.deferred


def test_the_command_runs_here(device, monkeypatch, tmp_path):
    monkeypatch.setattr(dtypes, "PAIRS", frozenset([(FLOAT, FLOAT)]))
    monkeypatch.setattr(command, "ELEMENTS", {"cuda": 4096})
    monkeypatch.setattr(command, "devices", lambda: [device])
    # An emulated GPU has no tensor cores, which Triton's kernel for experts needs.
    expected = {grouped.KERNEL} if torch.version.cuda is None and torch.version.hip is None else set()
    status = __main__.main(["selftest", "--output", str(tmp_path / "report.json")])
    (entry,) = json.loads((tmp_path / "report.json").read_text())["devices"]
    assert {check["who"] for check in entry["checks"]} >= {"eager", "AccumulatingOptimizer"}
    failed = {check["who"] for check in entry["checks"] if check["problem"]}
    assert failed == expected & {check["who"] for check in entry["checks"]}
    assert status == bool(failed)
    assert all(row["gb_per_s"] > 0 for row in entry["bandwidth"])
    assert selftest.results(device)["eager: float32 into float32"] is None
