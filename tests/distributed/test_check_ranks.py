"""FUSEDACC_CHECK_RANKS=1: one bit that differs between two ranks is found after the update, on both."""

from __future__ import annotations

import textwrap

import pytest
import torch
from ranks import run_on_ranks

from fusedacc.distributed import checks

SCRIPT = textwrap.dedent(
    """
    import contextlib, gc, os, sys
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    import fusedacc

    rank, rendezvous = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    meeting = dict(init_method=f"file://{rendezvous}", timeout=timedelta(seconds=20))
    dist.init_process_group("gloo", rank=rank, world_size=2, **meeting)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    os.environ["FUSEDACC_CHECK_RANKS"] = "yes"
    try:
        fusedacc.AccumulatingOptimizer(inner, 2, model=model, data_parallel=dist.group.WORLD)
    except ValueError as error:
        assert "FUSEDACC_CHECK_RANKS='yes'" in str(error), error
        assert type(model[0]) is nn.Linear  # while the error lives, and with it the wrapper
    else:
        raise AssertionError("any value was taken")

    def loss_of(net, index):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * index + rank))
        return net(x.to(model[0].weight.dtype)).pow(2).mean()

    sent = []
    reduce = dist.all_reduce

    def counting(tensor, *args, **options):
        sent.append(tensor.numel() if tensor.dtype == torch.int64 else 0)
        return reduce(tensor, *args, **options)

    dist.all_reduce = counting
    os.environ["FUSEDACC_CHECK_RANKS"] = "1"
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for steps, ddp in ((2, True), (None, True), (2, False)):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)
            net = DistributedDataParallel(model) if ddp else model
            given = net if ddp else dist.group.WORLD
            inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            optimizer = fusedacc.AccumulatingOptimizer(inner, steps, model=model, data_parallel=given)
            sent.clear()

            def train(windows):
                for index in range(2 * windows):
                    silent = ddp and steps is None and index % 2 == 0
                    with net.no_sync() if silent else contextlib.nullcontext():
                        loss_of(net, index).backward()
                    if steps or index % 2:
                        optimizer.step(), optimizer.zero_grad()

            train(3)
            if ddp:
                assert sum(map(bool, sent)) == 3  # one each, after the updates only
                assert set(sent) == {0, 2 * 4}
            if rank == 1:
                bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
                # bfloat16 could round a lower one away in the update
                model[2].weight.data.view(bits)[1, 3] ^= 8 if dtype == torch.bfloat16 else 1
            try:
                train(1)
            except RuntimeError as error:
                assert "differ in parameter '2.weight'." in str(error), error
            else:
                raise AssertionError("nothing was found")
            optimizer.close()
    del net, optimizer, model
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    """
)


def test_one_bit_is_found_on_both_ranks(tmp_path):
    run_on_ranks(tmp_path, SCRIPT, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.complex64, torch.int8])
def test_a_checksum_is_of_every_bit(dtype):
    values = torch.arange(-6, 6).to(dtype).reshape(3, 4)
    known = checks.checksum(values)
    assert (known.dtype, known.shape) == (torch.int64, ())
    assert checks.checksum(values.t()) == known
    assert checks.checksum(values[1:]) != known
    for bit in range(8 * values.element_size()):
        changed = values.clone()
        changed.view(torch.uint8).view(3, -1)[2, bit // 8] ^= 1 << bit % 8
        assert checks.checksum(changed) != known
    assert checks.checksum(torch.zeros(0, 3)) == 0


def test_its_values_are_0_and_1(monkeypatch):
    for value, meant in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv(checks.VARIABLE, value)
        assert checks.wanted() is meant
