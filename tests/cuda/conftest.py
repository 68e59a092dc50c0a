"""The fixture for tests that run with each backend of a GPU."""

import gpu
import pytest


@pytest.fixture(params=["cuda", "triton", "eager"])
def backend(request):
    return gpu.needs(request.param)
