"""DDP and process groups that the wrapper reduces equal one process and plain PyTorch."""

import contextlib
import gc
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_each_rank, on_ranks
from ranks_setting import (
    LOW,
    Net,
    assert_close,
    assert_nets_close,
    assert_ranks_equal,
    given,
    inner_of,
    loss_of,
    small_buckets,
    wrap,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fusedacc

# Comparison with one process, whose sums are in float64


def one_process(steps: int, updates: int, dtype: torch.dtype) -> tuple[nn.Module, list[list[Tensor]]]:
    """Train one process on all ranks' data, and return its model and the gradients of each update."""
    net = Net(dtype=dtype)
    net.norm.eval()
    inner, seen = inner_of(net), []
    parameters = [p for name, p in net.named_parameters() if not name.startswith(("extra", "never"))]
    for update in range(updates):
        sums = [torch.zeros(p.shape, dtype=torch.float64) for p in parameters]
        for index in range(update * steps, (update + 1) * steps):
            for rank in range(dist.get_world_size()):
                found = torch.autograd.grad(loss_of(net, index, rank), parameters)
                for total, gradient in zip(sums, found, strict=True):
                    total += gradient.double() / (steps * dist.get_world_size())
        for p, total in zip(parameters, sums, strict=True):
            p.grad = total.to(p.dtype)
        inner.step(), inner.zero_grad()
        seen.append(sums)
    return net, seen


def against_one_process(kind: str, steps: int, dtype: torch.dtype, in_module: bool) -> None:
    net = Net(dtype=dtype)
    net.norm.eval()
    called, parallel = given(net, kind)
    wanted, finals = one_process(steps, 3, dtype)
    with small_buckets():
        optimizer = wrap(net, steps, data_parallel=parallel, model=net if in_module else None)
        for index in range(3 * steps):
            loss_of(called, index).backward()
            present = [
                p.grad for name, p in net.named_parameters() if not name.startswith(("extra", "never"))
            ]
            if (index + 1) % steps:
                assert not any(gradient is not None for gradient in present)
            else:
                for gradient, final in zip(present, finals[index // steps], strict=True):
                    # After the first update, 16-bit parameters may round differently. A module's product is
                    # not rounded to 16 bits before it is added.
                    low = dtype is LOW and (in_module or index >= steps)
                    assert_close(gradient, final, 5e-2 if low else 5e-7, index)
            assert net.never.weight.grad is None
            optimizer.step(), optimizer.zero_grad()
    assert_nets_close(net, wanted, 2e-6 if dtype is torch.float32 else 2e-2)
    assert_ranks_equal(net)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["ddp", "group"])
@pytest.mark.parametrize("dtype", [torch.float32, LOW], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("in_module", [False, True], ids=["", "model="])
def test_equal_to_one_process(kind, dtype, in_module):
    for steps in (1, 3):
        on_ranks(2, against_one_process, kind, steps, dtype, in_module)
    if not in_module:
        on_ranks(3, against_one_process, kind, 2, dtype, in_module)


# Comparison with plain PyTorch


def manual_loop(wrapped: bool) -> list[Tensor]:
    """Return every p.grad during training, and the parameters."""
    net = Net()
    parallel = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = inner_of(net)
    if wrapped:
        optimizer = fusedacc.AccumulatingOptimizer(optimizer, data_parallel=parallel)
    seen = []
    for index in range(6):
        last = index % 3 == 2
        with contextlib.nullcontext() if last else parallel.no_sync():
            (loss_of(parallel, index, uses_extra=index == 4) / 3).backward()
        seen += [torch.zeros(0) if p.grad is None else p.grad.clone() for p in net.parameters()]
        if last:
            optimizer.step(), optimizer.zero_grad()
    return seen + [p.detach().clone() for p in net.parameters()]


def equal_to_stocks_manual_loop() -> None:
    with small_buckets():
        for number, (ours, theirs) in enumerate(zip(manual_loop(True), manual_loop(False), strict=True)):
            if dist.get_world_size() == 2:
                assert torch.equal(ours, theirs), number
            elif len(ours):  # three gradients are added in another order if the buckets differ
                assert_close(ours, theirs, 3e-7, number)


@pytest.mark.parametrize("count", [2, 3])
def test_a_manual_loop_has_the_bits_of_stock(count):
    on_ranks(count, equal_to_stocks_manual_loop)


NEVER, FIRST_RANK, NOW_AND_THEN = range(3)


def uses_extra(when: int, index: int) -> bool:
    return (when == FIRST_RANK and dist.get_rank() == 0) or (when == NOW_AND_THEN and index % 3 == 2)


def stock(steps: int, when: int, several: int) -> nn.Module:
    net = Net()
    parallel = DistributedDataParallel(net, find_unused_parameters=True)
    inner = inner_of(net)
    for index in range(3 * steps):
        last = (index + 1) % steps == 0
        for backward in range(several):
            synchronises = last and backward == several - 1
            with contextlib.nullcontext() if synchronises else parallel.no_sync():
                number = index * several + backward
                (loss_of(parallel, number, uses_extra=uses_extra(when, index)) / steps).backward()
        if last:
            inner.step(), inner.zero_grad()
    parallel._sync_buffers()  # the next forward would do this
    return net


UNUSED = {"find_unused_parameters": True}
#: The model's checkpoints, DDP's options, when `extra` is used, backwards per micro-batch, whether `no_sync`
#: is called by hand, and whether the wrapper has the model.
CASES = {
    "all parameters used": ("", {}, NEVER, 1, False, False),
    "find_unused_parameters": ("", UNUSED, NEVER, 1, False, False),
    "gradient_as_bucket_view": ("", {"gradient_as_bucket_view": True}, NEVER, 1, False, False),
    "static_graph": ("", {"static_graph": True}, NEVER, 1, False, False),
    "no_sync by hand": ("", {}, NEVER, 1, True, False),
    "model=": ("", {}, NEVER, 1, False, True),
    "used on one rank": ("", UNUSED, FIRST_RANK, 1, False, False),
    "used now and then": ("", UNUSED, NOW_AND_THEN, 1, False, True),
    "checkpointed": ("as usual", {}, NEVER, 1, False, False),
    "checkpointed, re-entrant": ("reentrant", {}, NEVER, 1, False, True),
    "two backwards": ("", {}, NEVER, 2, False, False),
}


@pytest.mark.parametrize("case", CASES)
@on_each_rank(2)
def test_equal_to_stock(case: str) -> None:
    how, options, when, several, by_hand, in_module = CASES[case]
    for steps in (1, 3):
        net = Net(how)
        parallel = DistributedDataParallel(net, **options)
        with small_buckets():
            optimizer = wrap(net, steps, data_parallel=parallel, model=parallel if in_module else None)
            for index in range(3 * steps):
                for backward in range(several):
                    with parallel.no_sync() if by_hand and index % 2 else contextlib.nullcontext():
                        number = index * several + backward
                        loss_of(parallel, number, uses_extra=uses_extra(when, index)).backward()
                optimizer.step(), optimizer.zero_grad()
            assert optimizer.num_updates == 3
            optimizer.close()
        wanted = stock(steps, when, several)
        assert_nets_close(net, wanted, 2e-6, steps)
        for (name, p), q in zip(net.named_buffers(), wanted.buffers(), strict=True):
            # With several forwards in a micro-batch, plain DDP broadcasts its buffers before a different
            # forward.
            assert several > 1 or torch.allclose(p.float(), q.float(), rtol=1e-5), (steps, name)
        assert_ranks_equal(net)
        assert parallel.require_backward_grad_sync
        assert "no_sync" not in parallel.__dict__


# Buckets that are sent while the backward runs


def overlapping(kind: str) -> list[int]:
    """Return for each micro-batch how many buckets were sent when the first layer's gradient arrived."""
    net, gone, found = Net(), [0], []
    called, parallel = given(net, kind)
    with small_buckets():
        optimizer = wrap(net, 2, data_parallel=parallel)

    def counting(*arguments, **options):
        gone[0] += 1
        return all_reduce(*arguments, **options)

    all_reduce = dist.all_reduce
    with small_buckets(), mock.patch.object(dist, "all_reduce", counting):
        net.up.weight.register_hook(lambda gradient: found.append(gone[0]))
        for index in range(6):
            gone[0] = 0
            loss_of(called, index).backward()
            wanted = 0 if index % 2 == 0 else 3 + 1  # three buckets and the window's numbers
            assert gone[0] == wanted, "nothing is sent between micro-batches of a window"
            optimizer.step(), optimizer.zero_grad()
    return found


def test_buckets_go_as_they_become_final():
    # After two equal micro-batches, the wrapper predicts the third.
    assert on_ranks(2, overlapping, "ddp") == [[0, 0, 0, 2, 0, 2]] * 2
    assert on_ranks(2, overlapping, "group") == [[0] * 6] * 2, "who knows what it will use next"


@on_each_rank(2)
def test_a_gradient_that_comes_after_its_sum_has_gone_is_an_error() -> None:
    net = Net()
    parallel = DistributedDataParallel(net)
    with small_buckets():
        optimizer = wrap(net, 4, data_parallel=parallel)
        for index in range(3):
            loss_of(parallel, index).backward()
            optimizer.step()

        def once_more(_: Tensor) -> None:
            with torch.enable_grad():
                net.down.weight.sum().backward()

        hook = net.up.weight.register_hook(once_more)
        with pytest.raises(RuntimeError, match="find_unused_parameters=True"):
            loss_of(parallel, 3).backward()
        hook.remove()
        with pytest.raises(RuntimeError, match="discard"):
            optimizer.step()
        optimizer.discard()


# Errors and messages


@on_each_rank(2)
def test_what_cannot_be_reduced_is_refused_before_anything_is_changed() -> None:
    net = Net()
    with pytest.raises(TypeError, match=r"data_parallel must be .*, got Net"):
        wrap(net, 2, data_parallel=net)
    with pytest.raises(TypeError, match=r"reduce_dtype must be None or one of .*, got torch.int8"):
        wrap(net, 2, data_parallel=dist.group.WORLD, reduce_dtype=torch.int8)
    other = nn.Linear(2, 2)
    inner = torch.optim.SGD([*net.parameters(), *other.parameters()], lr=0.1)
    parallel = DistributedDataParallel(net)
    with pytest.raises(ValueError, match="would not be reduced"):
        fusedacc.AccumulatingOptimizer(inner, 2, data_parallel=parallel)
    assert parallel.require_backward_grad_sync
    parallel.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(ValueError, match="a communication hook"):
        wrap(net, 2, data_parallel=parallel)
    spectral = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(
        ValueError, match=r"cannot reduce the gradients of parameter '0.0', of torch.complex64"
    ):
        wrap(spectral, 2, data_parallel=dist.group.WORLD)
    if dist.get_rank():
        net.register_parameter("more", nn.Parameter(torch.zeros(7)))
    with pytest.raises(
        ValueError, match=r"rank 1 has other .* '0.0' of shape \(7,\), torch.float32 in place"
    ):
        wrap(net, 2, data_parallel=dist.group.WORLD)

    parallel = DistributedDataParallel(Net())
    optimizer = wrap(parallel, 2, data_parallel=parallel)
    parallel.require_backward_grad_sync = True
    with pytest.raises(RuntimeError, match="both would reduce"):
        loss_of(parallel, 0)
    optimizer.close()
    loss_of(parallel, 0).backward()
    assert parallel.module.up.weight.grad is not None


@on_each_rank(2)
def test_tensor_parallel_parameters_are_refused() -> None:
    """DTensors have their own collectives."""
    net = Net()
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    with pytest.raises(
        ValueError, match=r"parameter '0.0', a DTensor with .*Shard.*; allowed: plain tensors"
    ):
        fusedacc.AccumulatingOptimizer(inner_of(net), 2, data_parallel=dist.group.WORLD)


@on_each_rank(2)
def test_sparse_gradients_are_refused() -> None:
    net = nn.Embedding(5, 2, sparse=True)
    optimizer = wrap(net, 1, data_parallel=dist.group.WORLD)
    with pytest.raises(RuntimeError, match=r"'0.0' is sparse, .*allowed: dense gradients"):
        net(torch.tensor([1, 2])).sum().backward()
    optimizer.close()


def untold() -> list[str]:
    net = Net()
    parallel = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = wrap(net, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index in range(4):
            loss_of(parallel, index).backward()
            optimizer.step(), optimizer.zero_grad()
        optimizer.close()
        kept = wrap(net, 2, data_parallel=parallel)
        loss_of(parallel, 0).backward()
        del kept
        gc.collect()
        assert parallel.require_backward_grad_sync, "DDP must reduce again"
    return [str(each.message) for each in caught if "data_parallel=ddp" in str(each.message)]


def test_one_warning_of_a_ddp_without_data_parallel():
    assert [len(each) for each in on_ranks(2, untold)] == [1, 1]


@on_each_rank(2)
def test_sixteen_bits_on_the_wire() -> None:
    for kind in ("ddp", "group"):
        finals = []
        for dtype in (None, LOW):
            net = Net()
            called, parallel = given(net, kind, find_unused_parameters=True)
            optimizer = wrap(net, 2, reduction="weighted", data_parallel=parallel, reduce_dtype=dtype)
            for index in range(2):
                with optimizer.accumulate(weight=0.1 + index + dist.get_rank()):
                    loss_of(called, index).backward()
                optimizer.step()
            finals.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
            assert_ranks_equal(net)
        for ours, exact in zip(finals[1], finals[0], strict=True):
            assert_close(ours, exact, 8e-3, kind)
