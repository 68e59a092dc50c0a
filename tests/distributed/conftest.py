"""A process group of one rank, for tests that need no other ranks."""

import one_rank
import pytest


@pytest.fixture
def group(tmp_path):
    with one_rank.process_group("gloo", tmp_path):
        yield
