"""The native operators on a GPU: compared with the float64 oracle, and bit for bit with the CPU."""

import gpu
import pytest
import torch
from cases import (
    GRADIENT_LAYOUTS,
    LAYOUTS,
    PAIR_IDS,
    PAIRS,
    assert_matches_oracle,
    assert_same_bits,
    copies,
    random_lists,
)

from fusedacc.kernels import library

pytestmark = pytest.mark.cuda

SHAPES = [(5,), (3, 4, 2), (0, 3), (), (257,), (2, 3, 4, 5), (300, 67), (8192,), (24581,)]


@pytest.fixture(autouse=True)
def _cuda_kernels():
    gpu.needs("cuda")


def scale_accumulate_(accumulators, gradients, scale=1.0, overwrite=()):
    tensor, number = (scale, 1.0) if isinstance(scale, torch.Tensor) else (None, scale)
    torch.ops.fusedacc.scale_accumulate_(accumulators, gradients, tensor, number, overwrite)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gradient_layout", GRADIENT_LAYOUTS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_matches_the_oracle_and_the_cpu(layout, gradient_layout, overwrite, generator):
    accumulators, gradients = random_lists(
        PAIRS, SHAPES, generator, layout=layout, gradient_layout=gradient_layout, device="cuda"
    )
    before = copies(accumulators)
    on_cpu = [tensor.cpu() for tensor in accumulators]
    scale_accumulate_(accumulators, gradients, 1 / 3, (overwrite,))
    assert_matches_oracle(accumulators, before, gradients, 1 / 3, overwrite)
    scale_accumulate_(on_cpu, [tensor.cpu() for tensor in gradients], 1 / 3, (overwrite,))
    assert_same_bits(accumulators, on_cpu)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("on_device", [False, True])
def test_kept_sums_equal_the_cpu(layout, on_device, generator):
    accumulators, gradients = random_lists(PAIRS, SHAPES, generator, layout=layout, device="cuda")
    on_cpu, fresh = [tensor.cpu() for tensor in accumulators], [tensor.cpu() for tensor in gradients]
    flags = [index % 3 == 0 for index in range(len(gradients))]
    for ours, theirs in ((accumulators, gradients), (on_cpu, fresh)):
        beta = (torch.tensor(0.7, device=ours[0].device), 1.0) if on_device else (None, 0.7)
        torch.ops.fusedacc.scale_accumulate_(ours, theirs, None, 1 / 3, flags, *beta)
        plan = torch.ops.fusedacc.prepare(ours)
        torch.ops.fusedacc.accumulate_prepared_(plan, theirs, None, 1 / 3, flags, *beta)
    assert_same_bits(accumulators, on_cpu)


@pytest.mark.parametrize(("gradient_dtype", "accumulator_dtype"), PAIRS, ids=PAIR_IDS)
def test_subnormal_infinite_and_tied_values_equal_the_cpu(gradient_dtype, accumulator_dtype):
    special = torch.tensor(
        [0.0, -0.0, 1e-45, 6e-8, 3e-5, 65504.0, 65519.9, 65520.0, 3.4e38, torch.inf, -torch.inf]
    )
    gradient = torch.cat([special, special * 1.0009765625, -special]).to(gradient_dtype)
    accumulator = gradient.flip(0).nan_to_num(posinf=1.0, neginf=1.0).to(accumulator_dtype)
    for scale in (1.0, 0.5, -3.0):
        ours, theirs = accumulator.cuda(), accumulator.clone()
        scale_accumulate_([ours], [gradient.cuda()], scale)
        scale_accumulate_([theirs], [gradient], scale)
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shift", range(9))
@pytest.mark.parametrize("gradient_shift", [0, 1, 3, 8])
def test_misaligned(shift, gradient_shift, generator):
    for gradient_dtype, accumulator_dtype in PAIRS:
        (gradient,) = random_lists([(gradient_dtype, gradient_dtype)], [(20011,)], generator)[1]
        theirs = torch.zeros(20011, dtype=accumulator_dtype)
        room = torch.full((20011 + shift + 9,), 7.0, dtype=accumulator_dtype, device="cuda")
        ours = room[shift : shift + 20011].zero_()
        fresh = torch.zeros(20011 + gradient_shift, dtype=gradient_dtype, device="cuda")[gradient_shift:]
        fresh.copy_(gradient)
        scale_accumulate_([ours], [fresh], 0.3)
        scale_accumulate_([theirs], [gradient], 0.3)
        assert_same_bits([ours], [theirs])
        assert torch.cat([room[:shift], room[shift + 20011 :]]).eq(7).all()


def test_a_thousand_tensors_are_one_launch_and_no_copy(generator):
    shapes = [(1 + index % 50,) for index in range(1000)]
    accumulators, gradients = random_lists(
        [(torch.bfloat16, torch.float32)], shapes, generator, device="cuda"
    )
    scale = torch.tensor(0.25, device="cuda")
    flags = [index % 3 == 0 for index in range(1000)]
    scale_accumulate_(accumulators, gradients, scale, flags)
    before = copies(accumulators)
    found = gpu.launches(lambda: scale_accumulate_(accumulators, gradients, scale, flags))
    assert len(found) == 1, found
    assert_matches_oracle(accumulators, before, gradients, 0.25, flags)


def test_runs_on_the_current_stream_without_waiting():
    gradient = torch.ones(1000, device="cuda")
    accumulator = torch.zeros(1000, device="cuda")
    scale = torch.tensor(2.0, device="cuda")
    scale_accumulate_([accumulator], [gradient], scale)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        accumulator.fill_(1.0)
        scale_accumulate_([accumulator], [gradient], scale)
        done = stream.record_event()
    assert not done.query()
    stream.synchronize()
    assert bool((accumulator == 3).all())


def test_captured_in_a_graph(generator):
    accumulators, gradients = random_lists(PAIRS, SHAPES, generator, device="cuda")
    scale = torch.tensor(0.5, device="cuda")
    plan = torch.ops.fusedacc.prepare(accumulators)
    graph, _ = gpu.captured(lambda: torch.ops.fusedacc.accumulate_prepared_(plan, gradients, scale))
    for factor in (0.25, -1.0):
        before = copies(accumulators)
        scale.fill_(factor)
        graph.replay()
        torch.cuda.synchronize()
        assert_matches_oracle(accumulators, before, gradients, factor, False)


def test_more_than_2_to_the_31_elements():
    count = 2**31 + 8192 + 5
    gpu.needs_memory(7 * count)
    accumulator = torch.zeros(count, device="cuda")
    gradient = torch.ones(count, dtype=torch.bfloat16, device="cuda")
    scale_accumulate_([accumulator], [gradient], 3.0)
    assert bool((accumulator == 3).all())
    # A transposed gradient is added with loops over both dimensions.
    rows = count // 1024
    scale_accumulate_(
        [accumulator[: rows * 1024].view(1024, rows)], [gradient[: rows * 1024].view(rows, 1024).t()]
    )
    assert accumulator[: rows * 1024].eq(4).all()
    assert accumulator[rows * 1024 :].eq(3).all()


def test_bad_devices_are_named():
    accumulator = torch.zeros(3, device="cuda")
    with pytest.raises(RuntimeError, match="scale is on cpu but the accumulators are on cuda:0"):
        scale_accumulate_([accumulator], [accumulator.clone()], torch.tensor(1.0))
    with pytest.raises(RuntimeError, match=r"gradients\[1\] is on cpu but its accumulator is on cuda:0"):
        scale_accumulate_([accumulator, accumulator.clone()], [accumulator.clone(), torch.zeros(3)])
    assert not accumulator.any()


def test_opcheck(generator):
    accumulators, gradients = random_lists(PAIRS, [(5,), (2, 3)], generator, device="cuda")
    operator = torch.ops.fusedacc.scale_accumulate_.default
    torch.library.opcheck(operator, (accumulators, gradients, None, 0.5, ()))


def test_calls_keep_no_reference():
    sums, fresh = ([torch.zeros(4, device="cuda") for _ in range(20)] for _ in range(2))
    scale = torch.tensor(1.0, device="cuda")
    counts = [tensor._use_count() for tensor in (*sums, *fresh, scale)]
    library.call(torch.ops.fusedacc.scale_accumulate_.default, sums, fresh, scale, 1.0, ())
    assert [tensor._use_count() for tensor in (*sums, *fresh, scale)] == counts
