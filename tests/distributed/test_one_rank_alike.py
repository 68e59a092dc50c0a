"""One rank on gloo trains like no process group. tests/cuda/test_one_rank_cuda.py tests NCCL."""

import one_rank
import pytest


@pytest.mark.parametrize("dtype", one_rank.DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "reduction"), one_rank.CASES)
def test_one_rank_trains_as_none(kind, reduction, dtype, tmp_path):
    one_rank.check(kind, "gloo", "cpu", dtype, reduction, tmp_path)
