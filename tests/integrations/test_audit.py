"""The audit finds what frameworks do wrong, and nothing in right trainings, ours included."""

import io

import audited_trainings
import pytest

import fusedacc

pytestmark = pytest.mark.usefixtures("accelerator_state")

#: What each faulty training is told as: the kinds of its problems.
FOUND = {
    "bad_accelerate_last_window": {"scale"},
    "bad_accelerate_tokens": {"scale", "uneven"},
    "bad_transformers_stream": {"scale", "uneven"},
    "bad_transformers_mean_loss": {"uneven"},
    "bad_transformers_gpt2": {"scale"},
    "bad_transformers_classifier": {"scale"},
    "bad_lightning_last_window": {"scale"},
    "bad_lightning_tokens": {"uneven"},
    "bad_lightning_epoch_shorter_than_k": {"scale"},
    "bad_fastai_ragged": {"scale"},
    "bad_keras_last_window": {"uneven"},
    "bad_keras_tokens": {"uneven"},
    "bad_keras_branches": {"lost"},
}


@pytest.mark.parametrize("name", audited_trainings.CASES)
def test_trainings(name):
    with fusedacc.audit(updates=0, output=io.StringIO()) as report:
        audited_trainings.CASES[name]()
    assert {problem.kind for problem in report.problems} == FOUND.get(name, set()), report.text
    assert report.status == name.startswith("bad_"), report.text
