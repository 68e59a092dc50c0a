"""A process group of one rank on NCCL trains like no process group. The functions are those for gloo."""

import one_rank
import pytest
import torch.distributed as dist

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dtype", one_rank.DTYPES, ids=str)
@pytest.mark.parametrize("reduction", one_rank.REDUCTIONS)
@pytest.mark.parametrize("kind", one_rank.KINDS)
def test_one_rank_trains_like_no_group(kind, reduction, dtype, tmp_path):
    if not dist.is_nccl_available():
        pytest.skip("torch was built without NCCL")
    one_rank.check(kind, "nccl", "cuda", dtype, reduction, tmp_path)
