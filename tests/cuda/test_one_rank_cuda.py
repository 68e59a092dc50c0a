"""A process group of one rank on NCCL trains like no process group. The functions are those for gloo.

The emulated device has no NCCL. There, torch's own process group for tests copies the tensors.
"""

import importlib
import sys

import one_rank
import pytest
import torch.distributed as dist

pytestmark = pytest.mark.cuda


def backend() -> str:
    if dist.is_nccl_available():
        return "nccl"
    if "emulation.plugin" not in sys.modules:
        pytest.skip("torch was built without NCCL")
    importlib.import_module("torch.testing._internal.distributed.multi_threaded_pg")
    return "threaded"


@pytest.mark.parametrize("dtype", one_rank.DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "reduction"), one_rank.CASES)
def test_one_rank_trains_like_no_group(kind, reduction, dtype, tmp_path):
    one_rank.check(kind, backend(), "cuda", dtype, reduction, tmp_path)
