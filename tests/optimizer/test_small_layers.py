"""Small Linears: `model=` replaces those for which a trial or a checkpoint says so."""

import copy

import pytest
import torch
from answers import answer
from torch import nn

from fusedacc import AccumulatingOptimizer
from fusedacc.optimizer import parameters

SMALLEST = parameters.questions(AccumulatingOptimizer)[0].name
#: The answer for the second layer, so that no trial is needed.
SECOND = (parameters.question_of(torch.empty(200, 30), AccumulatingOptimizer).name, parameters.INSIDE)


def made(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 200), nn.Tanh(), nn.Linear(200, 100))
    return model, AccumulatingOptimizer(torch.optim.AdamW(model.parameters()), 2, model=model)


def replaced(model):
    return ["forward" in layer.__dict__ for layer in model[::2]]


def train(model, optimizer, count):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        model(torch.randn(6, 20, generator=generator)).square().mean().backward()
        optimizer.step(), optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_trains_as_without(model, optimizer) -> None:
    plain, wrapped = made()
    wrapped.close()
    wrapped = AccumulatingOptimizer(torch.optim.AdamW(plain.parameters()), 2)
    torch.testing.assert_close(train(model, optimizer, 4), train(plain, wrapped, 4))


def test_small_linears_have_a_question_by_size_and_dtype():
    def name(*shape, **options):
        question = parameters.question_of(torch.empty(*shape, **options), AccumulatingOptimizer)
        return None if question is None else question.name

    assert name(32, 32) == name(1, 2) == SMALLEST == "model= for a Linear of up to 1024 weights of float32"
    assert name(32, 33, dtype=torch.bfloat16) == "model= for a Linear of up to 4096 weights of bfloat16"
    assert name(128, 128) is not None
    assert name(128, 129) is name(2, 2, device="meta") is name(2, 2, dtype=torch.float64) is None
    assert name(32, 32) in {question.name for question in parameters.questions(AccumulatingOptimizer)}


@pytest.mark.parametrize("way", [parameters.INSIDE, parameters.STOCK])
def test_the_answer_is_used_and_explained(way):
    with answer(SMALLEST, way, *SECOND):
        model, optimizer = made()
    assert replaced(model) == [way == parameters.INSIDE, True, True]
    assert optimizer._accumulators.choices[SMALLEST] == way
    rows = dict(line.split()[:3:2] for line in optimizer.explain().splitlines() if ".weight " in line)
    assert rows["0.weight"] == ("gemm" if way == parameters.INSIDE else "multi_tensor")
    said = "overhead exceeds the saving for so few weights; stock: says the test"
    assert (said in optimizer.explain()) == (way == parameters.STOCK)
    assert_trains_as_without(model, optimizer)
    optimizer.close()
    assert replaced(model) == [False] * 3


def test_a_checkpoint_with_the_same_answers_changes_no_layer():
    """The user's forward around the replaced one stays, and the replaced one still adds gradients."""
    model, optimizer = made()
    saved, ours = copy.deepcopy(optimizer.state_dict()), model[0].forward
    model[0].forward = lambda x: ours(x)
    optimizer.load_state_dict(saved)
    assert model[0].forward is not ours
    assert optimizer._slots[0].paths == ("gemm",)
    assert_trains_as_without(model, optimizer)


@pytest.mark.parametrize(
    "question", parameters.questions(AccumulatingOptimizer), ids=lambda question: question.name
)
def test_a_trial_runs_both_ways_and_restores_global_state(question):
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    ways = question.trial()
    assert tuple(ways) == question.candidates
    for run in ways.values():
        for _ in range(3):
            run()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
