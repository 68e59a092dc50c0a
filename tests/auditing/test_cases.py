"""The audit finds what is wrong in faulty loops, and finds nothing in right ones."""

import other_loops
import plain_loops
import pytest
import trainer_loops
from auditing_cases import are_close, audited, factors
from random_trainings import FAULTS, RandomTraining

CASES = plain_loops.CASES | other_loops.CASES | trainer_loops.CASES
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
    "bad_zero_grad_in_the_wrong_branch": {"lost": 0.25},
    "bad_zero_grad_in_every_second_update": {"stale": 1.0},
    "bad_wrapper_without_its_context": {"scale": 0.25},
    "bad_divided_by_the_length_of_the_loader": {"scale": 0.1667},
    "bad_backward_of_a_running_sum": {"double": 4.0},
    "bad_contrastive_not_divided": {"scale": 4.0},
    "bad_label_smoothing_not_divided": {"scale": 4.0},
    "bad_half_mse_not_divided": {"scale": 4.0},
    "bad_closure_without_zero_grad": {"stale": 1.0},
    "bad_saliency_leaks": {"stale": None},
    "bad_complex_not_divided": {"scale": 4.0},
    "bad_only_matrices_zeroed_by_hand": {"stale": 1.0},
    "bad_gradients_set_to_none_by_hand_each": {"lost": 0.25},
    "bad_micro_batch_with_nan_shortens_the_window": {"scale": 0.75},
    "bad_skipped_update_is_not_cleared": {"scale": 2.0},
    "bad_failed_micro_batch_counts": {"scale": 0.75},
    "bad_copy_is_cleared": {"stale": 1.0},
    "bad_only_the_body_is_cleared": {"stale": 1.0},
    "bad_cleared_at_the_begin_of_an_epoch": {"lost": 0.5},
    "bad_sums_decay": {"uneven": 1.372},
    "bad_means_of_samples": {"uneven": 4.0},
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


@pytest.mark.parametrize("seed", [183, 189, 313])
def test_a_gradient_that_a_loss_scale_shrinks_is_stale(seed):
    """It counts 1/128 to 1/4096 times, because only the new gradients are multiplied by the loss scale."""
    training = RandomTraining(seed)
    assert (training.fault, training.scaler.is_enabled()) == ("never cleared", True)
    assert {*factors(audited(training.run))} == {"stale"}


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
