"""Sums that are rounded stochastically on a GPU have the bits of the CPU."""

import math

import pytest
import torch
from cases import GRADIENT_LAYOUTS, LAYOUTS, assert_same_bits, random_tensor
from gpu import captured, needs_memory

from fusedacc.kernels import registry, rounding
from fusedacc.kernels.rounding import Noise, stream_of

pytestmark = pytest.mark.cuda

DEVICE = "cuda"
BF16, F32 = torch.bfloat16, torch.float32
SEED = 0x123456789ABCDEF
SHAPES = [(), (0, 3), (5,), (8,), (257,), (2, 3, 4, 5), (300, 67), (8192,), (24581,), (100_003,)]


def factors_of(backend):
    """Return scale and beta. For layouts with gaps Triton uses PyTorch's multiply-add, which rounds twice."""
    return (1 / 3, 0.7) if backend == "cuda" else (0.5, 0.25)


def noise_for(count, addition=3):
    return Noise(SEED, [stream_of(7 * index, addition) for index in range(count)])


def like_on_cpu(tensor):
    """Return a copy on the CPU with the same strides."""
    elements = tensor.untyped_storage().nbytes() // tensor.itemsize
    room = torch.zeros(elements, dtype=tensor.dtype)
    return room.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(tensor)


def lists(dtype, generator, layout="contiguous", gradient_layout="contiguous"):
    accumulators = [random_tensor(shape, BF16, generator, layout, DEVICE) for shape in SHAPES]
    gradients = [random_tensor(shape, dtype, generator, gradient_layout, DEVICE) for shape in SHAPES]
    return accumulators, gradients


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gradient_layout", GRADIENT_LAYOUTS)
def test_sums_in_every_layout_equal_the_cpu(dtype, layout, gradient_layout, backend, generator):
    """Overwrite some sums and keep a part of others, with a call and with a plan."""
    accumulators, gradients = lists(dtype, generator, layout, gradient_layout)
    expected, fresh = [like_on_cpu(each) for each in accumulators], [each.cpu() for each in gradients]
    flags = [index % 3 == 0 for index in range(len(SHAPES))]
    scale, beta = factors_of(backend)
    noises = [noise_for(len(SHAPES), addition) for addition in range(2)]
    for name, sums, values in ((backend, accumulators, gradients), ("cpu", expected, fresh)):
        chosen = registry.get(name)
        chosen.accumulate_(sums, values, scale, flags, noise=noises[0])
        chosen.prepare(sums)(values, scale, flags, beta, noise=noises[1])
    assert_same_bits(accumulators, expected)


@pytest.mark.sweep
@pytest.mark.parametrize("shift", range(9))
@pytest.mark.parametrize("gradient_shift", [0, 1, 8])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_misaligned(shift, gradient_shift, dtype, backend, generator):
    """After an unaligned start, the random bits of a step come from two counters."""
    count = 20011
    gradient = random_tensor((count,), dtype, generator)
    room = torch.full((count + shift + 9,), 7.0, dtype=BF16, device=DEVICE)
    ours = room[shift : shift + count].zero_()
    fresh = torch.zeros(count + gradient_shift, dtype=dtype, device=DEVICE)[gradient_shift:].copy_(gradient)
    theirs = torch.zeros(count, dtype=BF16)
    for addition in range(2):
        noise, scale = noise_for(1, addition), factors_of(backend)[0]
        registry.get(backend).accumulate_([ours], [fresh], scale, False, noise=noise)
        registry.get("cpu").accumulate_([theirs], [gradient], scale, False, noise=noise)
        assert_same_bits([ours], [theirs])
    assert torch.cat([room[:shift], room[shift + count :]]).eq(7).all()


def test_a_thousand_tensors_have_different_random_bits(backend, generator):
    """They need more than one launch."""
    shapes = [(1 + index % 50,) for index in range(1000)]
    gradients = [random_tensor(shape, F32, generator, device=DEVICE) for shape in shapes]
    ours = [torch.zeros(shape, dtype=BF16, device=DEVICE) for shape in shapes]
    theirs = [torch.zeros(shape, dtype=BF16) for shape in shapes]
    noise = noise_for(len(shapes))
    registry.get(backend).accumulate_(ours, gradients, 0.5, False, noise=noise)
    registry.get("cpu").accumulate_(theirs, [each.cpu() for each in gradients], 0.5, False, noise=noise)
    assert_same_bits(ours, theirs)


def test_special_values_equal_the_cpu(backend):
    special = torch.tensor([0.0, -0.0, 1e-45, 3e-39, 1.00390625, 3.38e38, 3.4e38, math.inf, -math.inf])
    values = torch.cat([special, -special, special * 1.0001, torch.full((5,), math.nan)]).repeat(300)
    noise = noise_for(1)
    ours = torch.empty(len(values), dtype=BF16, device=DEVICE)
    theirs = torch.empty(len(values), dtype=BF16)
    registry.get(backend).accumulate_([ours], [values.to(DEVICE)], 1.0, True, noise=noise)
    registry.get("cpu").accumulate_([theirs], [values], 1.0, True, noise=noise)
    torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0, equal_nan=True)


def test_a_graph_repeats_its_random_bits(backend, generator):
    """A replay has the seed and the streams of the captured call."""
    accumulators, gradients = lists(F32, generator)
    expected, fresh = [each.cpu() for each in accumulators], [each.cpu() for each in gradients]
    noise = noise_for(len(SHAPES))
    run = registry.get(backend).prepare(accumulators)
    graph, _ = captured(lambda: run(gradients, 0.5, False, noise=noise))
    graph.replay()
    for _ in range(2):  # the first is the one before the capture
        registry.get("cpu").accumulate_(expected, fresh, 0.5, False, noise=noise)
    torch.cuda.synchronize()
    assert_same_bits(accumulators, expected)


def test_more_than_2_to_the_32_elements():
    count = 2**32 + 8192 + 5
    needs_memory(5 * count)
    accumulator = torch.zeros(count, dtype=BF16, device=DEVICE)
    gradient = torch.full((count,), 1.0, dtype=BF16, device=DEVICE)
    noise = noise_for(1)
    registry.get("cuda").accumulate_([accumulator], [gradient], 1.003, True, noise=noise)
    value = torch.full((100,), 1.003)
    for first in (0, 2**31 - 50, 2**32 - 50, count - 100):
        bits = rounding.random_bits(noise.seed, noise.streams[0], torch.arange(first, first + 100))
        assert_same_bits([accumulator[first : first + 100]], [rounding.rounded(value, bits)])
