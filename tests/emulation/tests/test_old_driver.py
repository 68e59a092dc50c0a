"""Tests a CUDA driver that is too old for the toolkit that built the library."""

from __future__ import annotations

import ctypes

import pytest
import torch

from fusedacc.kernels import library, registry

pytestmark = pytest.mark.cuda
INSUFFICIENT_DRIVER = 35


@pytest.fixture
def old_driver():
    error = ctypes.c_int.in_dll(library.functions(), "emu_driver_error")
    for value in (INSUFFICIENT_DRIVER, 0):
        # Both cache their result.
        library.launch_problem.cache_clear()
        registry._selection.cache_clear(), registry._untested.cache_clear()
        error.value = value
        if value:
            yield


def test_another_backend_is_chosen_and_the_reason_is_given(old_driver):
    at = torch.device("cuda", 0), torch.float32, torch.float32
    problem = registry.obstacle("cuda", *at)
    assert problem is not None
    assert "driver version is insufficient" in problem
    assert registry.select(*at, "auto").backend.name == "triton"
    with pytest.raises((RuntimeError, ValueError), match="driver version is insufficient"):
        registry.select(*at, "cuda")


def test_a_driver_that_is_new_enough_is_no_obstacle():
    assert registry.obstacle("cuda", torch.device("cuda", 0), torch.float32, torch.float32) is None
