"""FUSEDACC_CHECK_RANKS=1 finds one bit that differs between two ranks, after the update and on both ranks."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from loops import network
from ranks import on_each_rank
from ranks_setting import given, refused, small_loss, wrap
from torch import Tensor, nn

from fusedacc.distributed import agreement


@on_each_rank(2)
def test_another_value_is_refused() -> None:
    net = network()
    with (
        mock.patch.dict("os.environ", {agreement.VARIABLE: "yes"}),
        pytest.raises(ValueError, match="FUSEDACC_CHECK_RANKS='yes'") as error,
    ):
        wrap(net, 2, model=net, data_parallel=dist.group.WORLD)
    assert type(net[0]) is nn.Linear, f"while {error} lives, and with it the wrapper"


@pytest.mark.parametrize(("steps", "kind"), [(2, "ddp"), (None, "ddp"), (2, "group")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@on_each_rank(2)
def test_one_bit_is_found_on_both_ranks(dtype: torch.dtype, steps: int | None, kind: str) -> None:
    net, sent, reduce = network(dtype), [], dist.all_reduce
    called, parallel = given(net, kind)

    def counting(tensor: Tensor, *args, **options):
        sent.append(tensor.numel() if tensor.dtype == torch.int64 else 0)
        return reduce(tensor, *args, **options)

    def train(windows: int) -> None:
        for index in range(2 * windows):
            silent = kind == "ddp" and steps is None and index % 2 == 0
            with called.no_sync() if silent else contextlib.nullcontext():
                small_loss(called, index).backward()
            if steps or index % 2:
                optimizer.step(), optimizer.zero_grad()

    with (
        mock.patch.dict("os.environ", {agreement.VARIABLE: "1"}),
        mock.patch.object(dist, "all_reduce", counting),
    ):
        optimizer = wrap(net, steps, model=net, data_parallel=parallel)
        sent.clear()
        train(3)
        if kind == "ddp":
            assert sum(map(bool, sent)) == 3, "one each, after the updates only"
            assert set(sent) == {0, 2 * 4}
        if dist.get_rank() == 1:
            bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
            # The update could round away a lower bit of a bfloat16 parameter.
            net[2].weight.data.view(bits)[1, 3] ^= 8 if dtype == torch.bfloat16 else 1
        refused(RuntimeError, "differ in parameter '2.weight'.", lambda: train(1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.complex64, torch.int8])
def test_a_checksum_is_of_every_bit(dtype):
    values = torch.arange(-6, 6).to(dtype).reshape(3, 4)
    known = agreement.checksum(values)
    assert (known.dtype, known.shape) == (torch.int64, ())
    assert agreement.checksum(values.t()) == known
    assert agreement.checksum(values[1:]) != known
    for bit in range(8 * values.element_size()):
        changed = values.clone()
        changed.view(torch.uint8).view(3, -1)[2, bit // 8] ^= 1 << bit % 8
        assert agreement.checksum(changed) != known
    assert agreement.checksum(torch.zeros(0, 3)) == 0
