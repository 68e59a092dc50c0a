"""The least share of a CPU thread: any gives the same bits, and what a trial finds is what is set."""

from __future__ import annotations

import pytest
import torch
from answers import answer

from fusedacc import AccumulatingOptimizer, functional, ops, shares

pytestmark = pytest.mark.skipif(ops.load_error() is not None, reason=str(ops.load_error()))


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
    shares.set_share(shares.SHARES[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_share_gives_the_same_bits(two_threads, dtype, generator):
    sizes = [5, 40_000, 131_073, 300_001]
    gradients = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    results = []
    for share in (1, *shares.SHARES, 2**40):
        shares.set_share(share)
        totals = [torch.linspace(-1, 1, size) for size in sizes]
        functional.scale_accumulate_(totals, gradients, 0.3)
        results.append((totals, functional.total_norm(totals)))
    for totals, norm in results[1:]:
        assert all(map(torch.equal, totals, results[0][0]))
        assert torch.equal(norm, results[0][1])


@pytest.mark.parametrize("way", map(str, shares.SHARES))
def test_what_is_found_is_set(two_threads, way, monkeypatch):
    told = []
    monkeypatch.setattr(shares, "set_share", told.append)
    with answer("elements of a thread's least share", way):
        shares.find_out()
    assert told == [int(way)]


def test_a_wrapper_and_the_functions_ask_once(two_threads, monkeypatch):
    calls = []
    shares.settle.cache_clear()
    monkeypatch.setattr(shares, "find_out", lambda: calls.append(1))
    AccumulatingOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)).close()
    functional.scale_accumulate_([torch.zeros(2)], [torch.ones(2)])
    functional.prepare([torch.zeros(2)])
    assert calls == [1]


def test_a_trial_adds_by_every_share(two_threads):
    for run in shares.question().trial().values():
        run()
    assert shares.question().fixed in shares.question().ways


def test_one_thread_is_not_asked():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert shares.question() is None
    finally:
        torch.set_num_threads(before)
