"""The grain size of CPU threads: every size gives the same bits, and a trial's result is used."""

import pytest
import torch
from answers import answer
from cases import native

from fusedacc import AccumulatingOptimizer, functional
from fusedacc.kernels import loop_settings

pytestmark = native


@pytest.fixture
def two_threads(threads):
    threads(2)
    yield
    loop_settings.set_grain_size(loop_settings.GRAIN_SIZES[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_size_gives_the_same_bits(two_threads, dtype, generator):
    shapes = [5, 40_000, 131_073, 300_001]
    gradients = [torch.randn(elements, generator=generator).to(dtype) for elements in shapes]
    results = []
    for size in (1, *loop_settings.GRAIN_SIZES, 2**40):
        loop_settings.set_grain_size(size)
        totals = [torch.linspace(-1, 1, elements) for elements in shapes]
        functional.scale_accumulate_(totals, gradients, 0.3)
        results.append((totals, functional.total_norm(totals)))
    for totals, norm in results[1:]:
        assert all(map(torch.equal, totals, results[0][0]))
        assert torch.equal(norm, results[0][1])


@pytest.mark.parametrize("size", loop_settings.GRAIN_SIZES)
def test_the_answer_is_set(two_threads, size, monkeypatch):
    told = []
    monkeypatch.setattr(loop_settings, "set_grain_size", told.append)
    with answer("elements of a thread's least share", str(size)):
        loop_settings.tune_grain_size()
    assert told == [size]


def test_every_wrapper_tunes_and_the_functions_tune_once(two_threads, monkeypatch):
    calls = []
    loop_settings.tune_grain_size_once.cache_clear()
    monkeypatch.setattr(loop_settings, "tune_grain_size", lambda: calls.append(1))
    AccumulatingOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)).close()
    functional.scale_accumulate_([torch.zeros(2)], [torch.ones(2)])
    functional.prepare([torch.zeros(2)])
    assert calls == [1, 1]


def test_a_trial_runs_every_size(two_threads):
    choice = loop_settings.grain_choice()
    for run in choice.trial().values():
        run()
    assert choice.default in choice.candidates


def test_with_one_thread_there_is_no_question(threads):
    threads(1)
    assert loop_settings.grain_choice() is None
