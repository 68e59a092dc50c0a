"""Settings to make before a framework is imported, and a fixture that resets Accelerate."""

import os

import pytest

os.environ["KERAS_BACKEND"] = "torch"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"


@pytest.fixture
def accelerator_state():
    """Reset the state that all Accelerators share, after the test."""
    from accelerate.state import AcceleratorState, GradientState

    yield
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)
