"""The audit finds what is wrong in faulty loops, and finds nothing in right ones."""

import other_loops
import plain_loops
import pytest
from auditing_cases import are_close, audited, factors
from random_trainings import FAULTS, RandomTraining

CASES = plain_loops.CASES | other_loops.CASES
#: What each faulty loop is told as: the kinds of its problems, with their factors.
FOUND = {
    "bad_mean_of_means": {"uneven": 8.0},
    "bad_masked_means": {"uneven": 8.0},
    "bad_tied_added_twice": {"parameters": 2.0},
    "bad_not_divided": {"scale": 4.0},
    "bad_divided_twice": {"scale": 0.25},
    "bad_last_window": {"scale": 1.5},
    "bad_last_window_divided_by_k": {"scale": 0.5},
    "bad_no_zero_grad": {"stale": 1.0},
    "bad_zero_grad_each": {"lost": 0.25},
    "bad_one_of_32": {"lost": 0.0312},
    "bad_first_lost": {"lost": 0.75},
    "bad_step_each": {"scale": 0.25},
    "bad_one_in_no_grad": {"scale": 0.75},
    "bad_backward_twice": {"double": 2.0},
    "bad_clip_each": {"uneven": None},
    "bad_doubling": {"uneven": 8.0},
    "bad_own_zero_misses_a_parameter": {"stale": 1.0},
    "bad_compiled_zero_grad_each": {"lost": 0.25},
    "bad_sparse_embedding": {"parameters": None},
    "bad_expert_divided_again": {"parameters": 0.25},
    "bad_part_frozen_for_a_micro_batch": {"parameters": None},
    "bad_scaler_updates_each": {"uneven": 8.0},
    "bad_not_unscaled": {"scale": 4.0},
    "bad_not_unscaled_65536": {"scale": 65536.0018},
    "bad_same_batch_zero_grad_each": {"scale": 0.25},
    "bad_tiny_model": {"uneven": None},
    "bad_one_lost_of_300": {"lost": 0.9967},
    "bad_one_lost_of_64_bf16": {"lost": 0.9844},
    "bad_fusedacc_divided_too": {"scale": 0.25},
    "bad_fusedacc_means": {"uneven": 8.0},
    "bad_off_by_one": {"scale": 0.25},
    "bad_zero_grad_before_step": {"lost": 0.0},
    "bad_zero_grad_to_zero_before_step": {"lost": 0.0},
    "bad_multiplied_by_k": {"scale": 16.0},
    "bad_gradient_assigned_not_added": {"lost": 0.25},
    "bad_own_buffer_keeps_growing": {"stale": 1.0},
    "bad_own_buffer_misses_the_last": {"lost": 0.75},
    "bad_late_by_one_window": {"lost": 0.75, "stale": 1.0467},
    "bad_one_expert_lost": {"parameters": 0.0},
    "bad_value_loss_not_divided": {"scale": 4.0},
    "bad_scaler_scale_forgotten_once": {"uneven": 256.0},
    "bad_tokens_divided_by_micro_batch_and_window": {"uneven": 8.0},
    "bad_masked_mean_not_divided": {"scale": 4.0},
    "bad_labels_counted_with_padding": {"scale": 0.5789},
    "bad_not_divided_with_hooks_that_look": {"scale": 4.0},
    "bad_tasks_not_divided": {"scale": 12.0},
    "bad_running_sum_halved": {"parameters": None},
}
#: Random trainings in one test, and tests.
TRAININGS, TESTS = 10, 6


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("bad_")])
def test_a_right_loop_has_no_problem(name):
    report = audited(CASES[name])
    assert report.status == 0, report.text


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("bad_")])
def test_a_fault_is_found_with_its_factor(name):
    report = audited(CASES[name])
    assert report.status == 1, report.text
    assert are_close(factors(report), FOUND[name]), report.text
    assert all(problem.location for problem in report.problems)


@pytest.mark.parametrize("first", range(0, TRAININGS * TESTS, TRAININGS))
def test_random_trainings(first):
    """A fault is told as one of its kinds, and a right training has no problem."""
    for seed in range(first, first + TRAININGS):
        training = RandomTraining(seed)
        report = audited(training.run)
        found = {problem.kind for problem in report.problems}
        if training.fault is None:
            assert report.status == 0, f"seed {seed}\n{report.text}"
        else:
            assert found & FAULTS[training.fault], f"seed {seed}, {training.fault}\n{report.text}"
