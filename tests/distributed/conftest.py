"""A process group of one rank, for tests that need no other ranks."""

import one_rank
import pytest
from ranks import close_wrappers


@pytest.fixture
def group(tmp_path):
    close_wrappers()
    with one_rank.process_group("gloo", tmp_path):
        yield
        close_wrappers()
