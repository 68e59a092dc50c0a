"""Whether norms prefetch: both ways give the same bits, and the question is asked once."""

import pytest
import torch
from answers import answer, trials
from cases import native

from fusedacc import AccumulatingOptimizer, functional
from fusedacc.kernels import loop_settings, native_module, registry, tuning

pytestmark = native
QUESTION = "reading large norms"
WAYS = tuple(loop_settings.PREFETCH_BYTES)
LARGE = loop_settings.LARGE_NORM


@pytest.fixture
def asked(monkeypatch):
    """Return the tensors of every trial. Restore the state of a process that has computed no large norm."""
    found, tune = [], loop_settings.tune_prefetch
    monkeypatch.setattr(loop_settings, "_prefetch_tuned", False)
    loop_settings._large_norm_ran().value = 0
    monkeypatch.setattr(
        loop_settings, "tune_prefetch", lambda tensors: (found.append(list(tensors)), tune(tensors))
    )
    yield found
    loop_settings.set_prefetch(loop_settings.DEFAULT_PREFETCH)


@pytest.mark.parametrize("dispatched", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_gives_the_same_bits(dtype, dispatched, generator, monkeypatch):
    """Test norms alone and norms of accumulations, with the operators and without the dispatcher."""
    if dispatched:
        for name in ("accumulate", "norm_partials", "total_norm"):
            monkeypatch.setattr(native_module, name, native_module._left_to_the_operator)
    gradients = [torch.randn(size, generator=generator).to(dtype) for size in (5, 40_000, 131_073)]
    results = []
    for way in WAYS:
        loop_settings.set_prefetch(way)
        sums = [torch.ones(gradient.shape) for gradient in gradients]
        partials = registry.get("cpu").accumulate_(sums, gradients, 0.3, False, 1.0, 2.0)
        results.append([partials, functional.total_norm(gradients), functional.total_norm(sums)])
    loop_settings.set_prefetch(loop_settings.DEFAULT_PREFETCH)
    assert all(map(torch.equal, *results))


def test_the_first_large_norm_asks_once(asked):
    small, large = torch.ones(1000), torch.ones(LARGE // 2)
    functional.total_norm([small] * 600)
    functional.total_norm([large, large.narrow(0, 1, LARGE // 2 - 1)])
    functional.total_norm([large.double()] * 2)
    assert asked == []
    functional.total_norm([small, large, large])
    functional.total_norm([large, large])
    assert [[tensor.numel() for tensor in tensors] for tensors in asked] == [[1000, LARGE // 2, LARGE // 2]]


@pytest.mark.parametrize("private", [False, True])
def test_a_wrapper_that_clips_asks_with_its_sums(asked, private):
    """With private gradients the additions compute the norm, and the update reads nothing."""
    model = torch.nn.Linear(2048, LARGE // 2048)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = AccumulatingOptimizer(inner, 2, max_grad_norm=1.0, private_gradients=private)
    for _ in range(2):
        model(torch.ones(1, 2048)).sum().backward()
        optimizer.step(), optimizer.zero_grad()
    assert [sum(tensor.numel() for tensor in tensors) for tensors in asked] == [LARGE + LARGE // 2048]
    optimizer.close()


def test_a_norm_inside_a_trace_does_not_ask(asked):
    large = torch.ones(LARGE)
    torch.func.vmap(lambda x: (functional.total_norm([large]), x)[1])(torch.ones(2))
    assert asked == []
    functional.total_norm([large])
    assert len(asked) == 1


@pytest.mark.parametrize("way", WAYS)
def test_the_answer_is_set(way, monkeypatch):
    told = []
    monkeypatch.setattr(loop_settings, "set_prefetch", told.append)
    with answer(QUESTION, way):
        loop_settings.tune_prefetch()
    assert told == [way]


def test_a_trial_reads_lists_of_equal_size_in_each_way(monkeypatch):
    monkeypatch.setattr(loop_settings, "_STRETCH", 100)
    tensors = [torch.arange(130.0).view(13, 10), torch.ones(120, requires_grad=True), torch.ones(60)]
    found = loop_settings._stretches(tensors)
    assert [[piece.numel() for piece in stretch] for stretch in found] == [[100], [30, 70], [50, 50]]
    assert torch.equal(found[1][0], tensors[0].flatten()[100:])
    ways = loop_settings.prefetch_choice(tensors).trial()
    assert tuple(ways) == WAYS
    for run in ways.values():
        run()
    loop_settings.set_prefetch(loop_settings.DEFAULT_PREFETCH)


def test_a_real_trial(asked, tmp_path):
    with trials(FUSEDACC_CACHE=str(tmp_path)):
        functional.total_norm([torch.ones(LARGE)])
        (found,) = tuning.report()
    assert found["question"] == QUESTION
    assert set(found["microseconds"]) == set(WAYS)
