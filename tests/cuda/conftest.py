"""Backends of a GPU, for the tests that run on each of them."""

import gpu
import pytest


@pytest.fixture(params=["cuda", "triton", "eager"])
def backend(request):
    return gpu.needs(request.param)
