"""Stochastic rounding in the eager backend: its random bits, its rule, and averages of many sums."""

import pytest
import rounding_oracle as oracle
import torch
from cases import LAYOUTS, random_tensor

from fusedacc.kernels import reference, rounding
from fusedacc.kernels.rounding import Noise, stream_of

BF16, F32 = torch.bfloat16, torch.float32
ONES = (1 << 32) - 1
#: Known answers of Random123 for Philox 4x32 of 10 rounds: key, counter, words.
KNOWN = [
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES), (ONES, ONES, ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
#: Zero, subnormal numbers, numbers near 1 and 1/3, numbers near the largest bfloat16, infinity and NaNs.
MAGNITUDES = (
    *(0, 1, 0x00012345, 0x00008000, 0x007FFFFF, 0x00800000),
    *(0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x3EAAAAAB),
    *(0x7F7EFFFF, 0x7F7F0000, 0x7F7F0001, 0x7F7FFFFF),
    *(0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF),
)


@pytest.mark.parametrize(("key", "counter", "words"), KNOWN, ids=["zeros", "ones", "pi"])
def test_known_answers(key, counter, words):
    assert oracle.philox(key, counter, 10) == words
    found = rounding.philox(key[0] | key[1] << 32, tuple(torch.tensor([each]) for each in counter), 10)
    assert tuple(word.item() for word in found) == words


@pytest.mark.parametrize("seed", [0, 1, 0x123456789ABCDEF, (1 << 63) - 1])
@pytest.mark.parametrize("stream", [0, stream_of(7, 3), stream_of(ONES, (1 << 31) - 1)])
def test_bits_of_elements(seed, stream):
    numbers = [*range(20), (1 << 32) - 1, 1 << 32, (1 << 35) - 1, 1 << 35, (1 << 35) + 13, 1 << 50]
    found = rounding.random_bits(seed, stream, torch.tensor(numbers))
    assert found.tolist() == [oracle.random_bits(seed, stream, number) for number in numbers]
    if seed == 1:
        compiled = torch.compile(rounding.random_bits, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(seed, stream, torch.tensor(numbers)), found)


@pytest.mark.parametrize("magnitude", MAGNITUDES, ids=hex)
def test_each_value_by_the_rule(magnitude):
    for pattern in (magnitude, magnitude | 1 << 31):
        for bits in (0, 1, 0x1234, 0x7FFF, 0x8000, 0xFFFE, 0xFFFF):
            value = torch.tensor([pattern - (pattern >> 31 << 32)], dtype=torch.int32).view(F32)
            found = rounding.rounded(value, torch.tensor([bits]))
            assert oracle.patterns(found) == [oracle.rounded(pattern, bits)], (hex(pattern), hex(bits))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("piece", [1 << 17, 10, 1])
@pytest.mark.parametrize("shape", [(), (0, 3), (13,), (3, 5, 4)], ids=str)
def test_every_layout_in_pieces(layout, piece, shape, monkeypatch, generator):
    monkeypatch.setattr(rounding, "PIECE_ELEMENTS", piece)
    value = random_tensor(shape, F32, generator)
    target = random_tensor(shape, BF16, generator, layout)
    for first in (0, 3, 1 << 35):
        rounding.round_into_(target, value, 5, 6, first)
        assert oracle.patterns(target) == oracle.expected(value, target, 5, 6, first)


def test_streams_of_parameters_and_additions():
    assert stream_of(5, 0) == 5
    assert stream_of(ONES, (1 << 31) - 1) == (1 << 63) - 1
    for wrong in ((-1, 0), (1 << 32, 0), (0, -1), (0, 1 << 31)):
        name, most = ("parameter", 4294967295) if wrong[0] else ("addition", 2147483647)
        with pytest.raises(ValueError, match=rf"{name} is -?\d+; allowed: 0 to {most}"):
            stream_of(*wrong)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "NO AVX"), reason="no fused multiply-add here"
)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("on_device", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize("flags", [False, True, [True, False]], ids=str)
def test_sums_are_float32_sums_rounded_once(dtype, on_device, flags, generator):
    """The numbers have 8 bits, so that float64 represents products and sums exactly."""
    accumulators = [random_tensor(shape, BF16, generator) for shape in ((40,), (6, 7))]
    gradients = [random_tensor(each.shape, BF16, generator).to(dtype) for each in accumulators]
    numbers = [torch.tensor(value) for value in (0.3, 0.7)]
    scale, beta = numbers if on_device else [number.item() for number in numbers]
    results = [each.clone() for each in accumulators]
    streams = [4, 1 << 40]
    reference.scale_accumulate_(results, gradients, scale, flags, beta, Noise(9, streams))
    for index, (result, before, gradient) in enumerate(zip(results, accumulators, gradients, strict=True)):
        product = gradient.double() * numbers[0]
        if flags is False or (flags is not True and not flags[index]):
            product += (before.float() * numbers[1]).double()
        assert oracle.patterns(result) == oracle.expected(product.float(), result, 9, streams[index])


def test_many_small_additions_are_kept_on_average():
    """Add 2**-10, an eighth of a unit, 512 times to 1.0. Rounding to nearest loses it."""
    small = torch.full((4096,), 2.0**-10, dtype=BF16)
    noisy, nearest = torch.ones(4096, dtype=BF16), torch.ones(4096, dtype=BF16)
    for addition in range(512):
        noise = Noise(1, [stream_of(0, addition)])
        reference.scale_accumulate_([noisy], [small], 1.0, False, noise=noise)
        reference.scale_accumulate_([nearest], [small], 1.0, False)
    assert nearest.eq(1).all()
    mean, deviation = noisy.double().mean(), noisy.double().std()
    assert abs(mean - 1.5) < 4 * deviation / 64
    # By the theory, p (1 - p) unit**2 for each addition.
    assert deviation**2 == pytest.approx(512 * 1 / 8 * 7 / 8 * 2.0**-14, rel=0.15)
