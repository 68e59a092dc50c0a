"""How gradients are assigned to buckets, and that buckets keep their memory from window to window."""

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from ranks_setting import given, wrap
from torch import nn

from fusedacc.distributed.reducer import FIRST_BYTES


def addresses(steps: int | None, kind: str, dtype: torch.dtype) -> list[list[int]]:
    """Return the addresses of the buckets after each of four windows."""
    model = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 20)).to(dtype)
    called, parallel = given(model, "ddp" if kind == "ddp" else "group")
    options = {"model": model} if kind == "model=" else {}
    optimizer = wrap(model, steps, data_parallel=parallel, max_grad_norm=1e-3, **options)
    reducer = optimizer._accumulation.ranks.parallel.reducer
    found = []
    for _ in range(4):
        for _ in range(2):
            called(torch.ones(5, 30, dtype=dtype)).float().square().mean().backward()
            if steps:
                optimizer.step(), optimizer.zero_grad()
        if not steps:
            optimizer.step(), optimizer.zero_grad()
        found.append([bucket.memory.data_ptr() for bucket in reducer._buckets])
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["ddp", "group", "model="])
@pytest.mark.parametrize("steps", [2, None], ids=["counted", "manual"])
def test_memory_stays(steps, kind, dtype):
    for found in on_ranks(2, addresses, steps, kind, dtype):
        assert found[0]
        assert found == found[:1] * 4


def sizes() -> list[int]:
    """Return the bytes of each bucket of a model whose last parameters are small."""
    model = nn.Sequential(*(nn.Linear(400, 400) for _ in range(50)))
    optimizer = wrap(model, 2, data_parallel=dist.group.WORLD)
    return [
        sum(slot.param.nbytes for slot in slots)
        for slots in optimizer._accumulation.ranks.parallel.reducer.buckets()
    ]


def test_the_first_is_small_and_none_is_tiny():
    for first, *others in on_ranks(2, sizes):
        assert FIRST_BYTES <= first < 2 * FIRST_BYTES
        assert len(others) == 2
        assert 25 * 2**20 <= others[0] < 27 * 2**20
