"""The native library's operators: behavior that the layers above rely on and do not check again."""

import gc
import math
import os
import weakref
from fractions import Fraction
from pathlib import Path

import cases
import forked
import pytest
import torch
from cases import PAIR_IDS, PAIRS, assert_same_bits, bits, copies, native, random_lists

from fusedacc.kernels import library

pytestmark = native

SHAPES = [(5,), (3, 4, 2), (0, 3), (), (257,), (2, 3, 4, 5), (90, 67)]
CAPABILITIES = ("baseline", "avx2", "avx512", "avx512_bf16")


def scale_accumulate_(accumulators, gradients, scale=1.0, overwrite=()):
    tensor, number = (scale, 1.0) if isinstance(scale, torch.Tensor) else (None, scale)
    torch.ops.fusedacc.scale_accumulate_(accumulators, gradients, tensor, number, overwrite)


def accumulate_prepared_(accumulators, gradients, scale=1.0, overwrite=()):
    tensor, number = (scale, 1.0) if isinstance(scale, torch.Tensor) else (None, scale)
    plan = torch.ops.fusedacc.prepare(accumulators)
    torch.ops.fusedacc.accumulate_prepared_(plan, gradients, tensor, number, overwrite)


OPERATORS = [scale_accumulate_, accumulate_prepared_]


@pytest.mark.parametrize(
    ("scale", "overwrite", "beta"),
    [
        (0.3, (), ()),
        (torch.tensor(0.3), (True,), (None, 0.3)),
        (torch.tensor(0.3).bfloat16(), (False, True, True, False), (torch.tensor(0.3), 1.0)),
    ],
)
def test_opcheck(scale, overwrite, beta, generator):
    accumulators, gradients = random_lists(
        PAIRS[::4], [(5,), (2, 3)], generator, gradient_layout="transposed"
    )
    tensor, number = (scale, 1.0) if isinstance(scale, torch.Tensor) else (None, scale)
    operators = torch.ops.fusedacc
    arguments = gradients, tensor, number, overwrite, *beta
    torch.library.opcheck(operators.scale_accumulate_.default, (accumulators, *arguments))
    plan = operators.prepare(accumulators)
    torch.library.opcheck(operators.accumulate_prepared_.default, (plan, *arguments))


def test_opcheck_prepare(generator):
    accumulators, _ = random_lists(PAIRS, SHAPES, generator)
    # Its result holds addresses, so runs on copies of the inputs, as AOTDispatcher's tests make, differ.
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.fusedacc.prepare.default, (accumulators,), test_utils=utilities)


def round_to(value: Fraction, precision: int, lowest: int) -> Fraction:
    """Round to a multiple of a unit in the last place, ties to even. 2**lowest is the smallest unit."""
    if value == 0:
        return value
    exponent = math.floor(math.log2(abs(value)))
    unit = Fraction(2) ** max(exponent - precision + 1, lowest)
    return round(value / unit) * unit


FORMATS = {
    torch.float64: (53, -1074),
    torch.float32: (24, -149),
    torch.bfloat16: (8, -133),
    torch.float16: (11, -24),
}


@pytest.mark.parametrize(("gradient_dtype", "accumulator_dtype"), PAIRS, ids=PAIR_IDS)
def test_rounds_once_to_the_computation_and_once_to_the_accumulator(
    gradient_dtype, accumulator_dtype, generator
):
    count = 400
    spread = torch.randint(-6, 7, (count,), generator=generator)
    gradient = torch.ldexp(torch.randn(count, generator=generator, dtype=torch.float64), spread)
    gradient = gradient.to(gradient_dtype)
    accumulator = torch.randn(count, generator=generator, dtype=torch.float64).to(accumulator_dtype)
    before = accumulator.clone()
    scale_accumulate_([accumulator], [gradient], 1 / 3)
    computation = torch.float64 if accumulator_dtype == torch.float64 else torch.float32
    scale = Fraction(torch.tensor(1 / 3, dtype=computation).item())
    for result, old, fresh in zip(accumulator.tolist(), before.tolist(), gradient.tolist(), strict=True):
        fused = round_to(Fraction(old) + scale * Fraction(fresh), *FORMATS[computation])
        assert Fraction(result) == round_to(fused, *FORMATS[accumulator_dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_conversions_agree_with_torch_for_every_value(dtype):
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    widened = torch.empty(2**16)
    scale_accumulate_([widened], [halves], 1.0, (True,))
    torch.testing.assert_close(widened, halves.float(), rtol=0, atol=0, equal_nan=True)
    # Every upper half of a float32, with lower halves near the tie.
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) * 2**16
    for lower in (0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values = (upper + lower).view(torch.float32)
        narrowed = torch.empty(2**16, dtype=dtype)
        scale_accumulate_([narrowed], [values], 1.0, (True,))
        expected = values.to(dtype)
        numbers = ~expected.isnan()
        assert torch.equal(bits(narrowed)[numbers], bits(expected)[numbers])
        assert torch.equal(narrowed.isnan(), values.isnan())


def errors():
    """Per case: accumulators, gradients, what the error must say, and perhaps a scale and flags."""
    f32 = torch.zeros(4)
    shared = torch.zeros(8)
    square = shared[:4].view(2, 2)
    many = torch.zeros([2] * 18).permute(*range(1, 18, 2), *range(0, 18, 2))
    crossing = torch.zeros(64).as_strided((3, 3), (2, 3))
    sums, other = (
        r"accumulators\[2\] overlaps accumulators\[1\]",
        r"gradients\[1\] overlaps accumulators\[1\]",
    )
    return {
        "shape": ([f32], [torch.zeros(5)], r"gradients\[1\] has shape \[5\] but its accumulator has \[4\]"),
        "dims": ([f32], [torch.zeros(1, 4)], r"gradients\[1\] has shape \[1, 4\]"),
        "pair": ([f32], [f32.double()], r"gradients\[1\] has float64 and its accumulator float32; allowed"),
        "integer": ([f32], [f32.long()], r"gradients\[1\] has another dtype"),
        "integer accumulator": ([f32.long()], [f32], r"accumulators\[1\] has a dtype that is not"),
        "complex": ([f32.cfloat()], [f32], r"accumulators\[1\] has a dtype that is not"),
        "sparse": ([f32], [f32.to_sparse()], r"gradients\[1\] is sparse"),
        "count": ([f32], [f32, f32], r"2 accumulators but 3 gradients"),
        "same accumulator": ([shared, shared], [f32, f32], sums),
        "overlapping": ([shared[2:6], shared[:4]], [f32, f32], sums),
        "expanded": ([torch.zeros(1).expand(4)], [f32], r"accumulators\[1\] overlaps itself: strides \[0\]"),
        "interleaved": ([crossing], [torch.zeros(3, 3)], r"accumulators\[1\] overlaps itself"),
        "shifted gradient": ([shared[:4]], [shared[1:5]], other),
        "another's": ([shared[:4], f32], [torch.ones(4), shared[:4]], r"gradients\[2\] overlaps acc"),
        "other strides": ([square], [square.t()], other),
        "dimensions": ([torch.zeros([2] * 18)], [many], r"gradients\[1\] .* more than 16 dimensions"),
        "scale's shape": ([f32], [f32], "scale must be a number or a 0-dim tensor", torch.ones(1)),
        "scale's dtype": ([f32], [f32], "scale is a tensor of a dtype", torch.tensor(1)),
        "flags": ([f32], [f32], "overwrite has 3 values for 2 accumulators", 1.0, (True, False, True)),
    }


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("case", errors())
def test_an_error_names_the_tensor_and_changes_nothing(operator, case):
    accumulators, gradients, message, *others = errors()[case]
    first = torch.ones(3)
    before = copies(accumulators)
    with pytest.raises(RuntimeError, match=message):
        operator([first, *accumulators], [torch.ones(3), *gradients], *others)
    assert torch.equal(first, torch.ones(3))
    assert all(torch.equal(now, then) for now, then in zip(accumulators, before, strict=True))


@pytest.mark.parametrize(
    "change",
    [
        torch.zeros_like,
        lambda plan: plan[:3],
        lambda plan: plan[:-1],
        lambda plan: torch.stack([plan, plan], 1)[:, 0],
        torch.Tensor.double,
    ],
)
def test_a_tensor_that_is_not_a_plan_is_refused(change):
    tensors = [torch.zeros(3), torch.zeros(4)]
    with pytest.raises(RuntimeError, match="plan was not made by fusedacc::prepare"):
        torch.ops.fusedacc.accumulate_prepared_(change(torch.ops.fusedacc.prepare(tensors)), tensors)


#: Prints a digest of the results for all pairs, layouts and sizes, and for rows of tables.
DIGEST = """
import hashlib, os, sys
import torch
sys.path[:0] = [{tests!r}]
from cases import GRADIENT_LAYOUTS, PAIRS, random_lists
from fusedacc.kernels import library
from fusedacc.kernels.lists import accumulate_rows_
assert library.load_error() is None
digest = hashlib.sha256()
generator = torch.Generator().manual_seed(1)
shapes = [(n,) for n in (*range(1, 20), 31, 32, 33, 63, 64, 65, 69)] + [(3, 5, 7), (40, 9), (129, 65)]
for layout in GRADIENT_LAYOUTS:
    sums, fresh = random_lists(PAIRS, shapes, generator, gradient_layout=layout)
    if layout == "contiguous":
        for tensor in fresh[1::2]:
            tensor[:3] *= 1e30
            tensor[3:5] *= 1e-38
        for tensor in sums[1::4]:
            tensor[2:5] *= 1e-38
    by = [(1 / 3, 1.0), (1 / 8, 1.0), (-1.0, 0.7), (2.0**-90, 1.0), (2.0**100, 1.0), (2.0**-140, 1.0)]
    for scale, beta in by if layout == "contiguous" else by[::2][:2]:
        for flags in ((), (True,)):
            torch.ops.fusedacc.scale_accumulate_(sums, fresh, None, scale, flags, None, beta)
            for tensor in sums:
                digest.update(tensor.nan_to_num(nan=7.0).double().numpy().tobytes())
    for norm_type in (2.0, float("inf")):
        for tensors in (sums, fresh):
            partials = torch.ops.fusedacc.norm_partials(tensors, norm_type)
            norm, _ = torch.ops.fusedacc.finish_norm([partials.nan_to_num(nan=7.0)], norm_type, True)
            digest.update(partials.nan_to_num(nan=7.0).numpy().tobytes())
            digest.update(norm.numpy().tobytes())
indices = torch.randint(0, 7, (300,), generator=generator)
for tables, fresh in zip(*random_lists(PAIRS, [(7, 77)], generator)):
    gradients = torch.randn(300, 77, generator=generator).to(fresh.dtype)
    accumulate_rows_(tables, indices, gradients, 0.3, scale_grad_by_freq=True, backend="cpu")
    digest.update(tables.double().numpy().tobytes())
print(library.built_with()["cpu_capability"], digest.hexdigest())
"""


def test_every_instruction_set_gives_the_same_bits():
    program = DIGEST.format(tests=os.path.dirname(cases.__file__))
    best = library.built_with()["cpu_capability"]
    digests = set()
    for name in CAPABILITIES[: CAPABILITIES.index(best) + 1]:
        result = forked.run(program, FUSEDACC_CPU_CAPABILITY=name)
        assert result.returncode == 0, result.stderr
        used, digest = result.stdout.split()
        assert used == name
        digests.add(digest)
    assert len(digests) == 1


def test_one_thread_and_more_give_the_same_bits(generator, threads):
    shapes = [(1,), (300001,), (7,), (70, 999), (65537,), (3,)]
    accumulators, gradients = random_lists(PAIRS, shapes, generator, gradient_layout="transposed")
    results = []
    for count in (1, 2, 3):
        threads(count)
        results.append(copies(accumulators))
        scale_accumulate_(results[-1], gradients, 1 / 3)
    for sums in results[1:]:
        assert_same_bits(sums, results[0])


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("bracketed", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_calls_keep_no_reference(bracketed, fails):
    operators = torch.ops.fusedacc
    sums = [torch.zeros(4) for _ in range(50)]
    fresh = [torch.ones(4) for _ in range(50)]
    scale = torch.tensor(0.5)
    if fails:
        fresh[-1] = torch.ones(5)
    counts = [tensor._use_count() for tensor in (*sums, *fresh, scale)]
    plan = operators.prepare(sums)
    plan_count = plan._use_count()

    def call(operator, *arguments):
        try:
            library.call(operator, *arguments) if bracketed else operator(*arguments)
        except RuntimeError:
            assert fails

    def once():
        call(operators.scale_accumulate_.default, sums, fresh, scale, 1.0, (True,) * 50)
        call(operators.accumulate_prepared_.default, plan, fresh, scale, 1.0, ())
        call(operators.prepare.default, sums if not fails else [sums[0], sums[0]])
        call(operators.norm_partials.default, sums, 2.0)

    once()
    assert [tensor._use_count() for tensor in (*sums, *fresh, scale)] == counts
    assert plan._use_count() == plan_count
    for _ in range(200):
        once()
    start = resident_bytes()
    for _ in range(2000):
        once()
    # One word per tensor and call would be 2.4 MB.
    assert resident_bytes() - start < 1_000_000

    watched = weakref.ref(fresh[0])
    fresh.clear()
    gc.collect()
    assert watched() is None


@pytest.mark.parametrize(("gradient_dtype", "accumulator_dtype"), PAIRS, ids=PAIR_IDS)
@pytest.mark.parametrize("shift", [0, 1])
def test_overwrites_with_streaming_stores_write_every_element(gradient_dtype, accumulator_dtype, shift):
    """The tensor is large enough for streaming stores on two threads. The last block is not full."""
    count = 2 * 5 * 2**20 // accumulator_dtype.itemsize + 1001
    gradient = torch.arange(count).remainder(251).to(gradient_dtype)
    room = torch.full((count + shift + 8,), -1.0, dtype=accumulator_dtype)
    accumulator = room[shift : shift + count]
    scale_accumulate_([accumulator], [gradient], 0.5, (True,))
    assert torch.equal(accumulator, (gradient * 0.5).to(accumulator_dtype))
    assert torch.cat([room[:shift], room[shift + count :]]).eq(-1).all()
    if gradient_dtype == accumulator_dtype:
        # In place, each block is read before it is written.
        scale_accumulate_([accumulator], [accumulator], 2.0, (True,))
        assert torch.equal(accumulator, gradient)


# Operators that compute norms


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_opcheck_of_norms(norm_type, generator):
    operators = torch.ops.fusedacc
    tensors, _ = random_lists(PAIRS[::4], [(5,), (90, 101)], generator)
    torch.library.opcheck(operators.norm_partials.default, (tensors, norm_type))
    partials = [operators.norm_partials([tensor], norm_type) for tensor in tensors]
    torch.library.opcheck(operators.finish_norm.default, (partials, norm_type, norm_type == 2.0))


@pytest.mark.parametrize("refusal", ["overlapping sum", "foreign plan"])
def test_a_refused_call_keeps_no_tensor(refusal):
    gradient, scale, beta = torch.ones(4), torch.tensor(0.5), torch.tensor(0.25)
    arguments = [gradient], scale, 1.0, [], beta, 1.0
    operators = torch.ops.fusedacc
    uses = [tensor._use_count() for tensor in (gradient, scale, beta)]
    if refusal == "overlapping sum":
        operator, first = operators.scale_accumulate_, [torch.zeros(1).expand(4)]
    else:
        operator, first = operators.accumulate_prepared_, torch.ones(3)
    with pytest.raises(RuntimeError):
        operator(first, *arguments)
    assert [tensor._use_count() for tensor in (gradient, scale, beta)] == uses
