"""Backends of a GPU, for the tests that run on each of them."""

import pytest
import torch

from fusedacc.kernels import registry


@pytest.fixture(params=["cuda", "triton", "eager"])
def backend(request):
    problem = registry.obstacle(request.param, torch.device("cuda"), torch.float32, torch.float32)
    if problem is not None:
        pytest.skip(f"the {request.param} backend cannot run here: {problem}")
    return request.param
