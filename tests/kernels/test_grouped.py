"""Products of groups of rows, each added straight into its sum, by every backend that runs on a CPU."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from answers import answer
from cases import PAIR_IDS, random_tensor
from gemm_cases import GEMM_PAIRS, NAN, OPERAND_LAYOUTS
from grouped_cases import COUNTS, SUM_LAYOUTS, assert_are_products, groups, lay_out_sums, offsets_of
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedacc.kernels import dtypes, grouped, grouped_ways, library, matmul_eager, matmul_ways
from fusedacc.kernels.grouped import grouped_accumulate_
from fusedacc.kernels.grouped_ways import NEVER
from fusedacc.kernels.native import as_argument
from fusedacc.traffic import TrafficMeter

BACKENDS = [name for name in ("cpu", "eager") if name == "eager" or library.load_error() is None]
native = pytest.mark.skipif(library.load_error() is not None, reason=str(library.load_error()))
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
#: rank_k_tokens and rounded_tokens.
THRESHOLDS = {"blas": (0, NEVER), "rank-k": (64, NEVER), "rounded": (0, 0), "each": (2, 5)}
CPU = torch.device("cpu")


def operator(accumulator, left, right, offsets, scale=1.0, keep=1.0, *, thresholds=(0, NEVER)):
    """The operator itself, any way, whatever this processor would choose."""
    numbers = *as_argument(scale), *as_argument(keep)
    torch.ops.fusedacc.grouped_accumulate_(accumulator, left, right, offsets, *numbers, *thresholds)


def ways():
    """What is tested."""
    found = [pytest.param(functools.partial(grouped_accumulate_, backend=name), id=name) for name in BACKENDS]
    if library.load_error() is None:
        found += [
            pytest.param(functools.partial(operator, thresholds=own), id=f"operator {name}")
            for name, own in THRESHOLDS.items()
        ]
    return found


def rounds(way, left, accumulator):
    """The dtype to which this way may round a product."""
    may = way.keywords.get("thresholds", (0, NEVER))[1] != NEVER or way.keywords.get("backend") == "cpu"
    return BF16 if may and left.dtype == BF16 and accumulator.dtype == F32 else None


def run(way, tensors, scale=1.0, keep=1.0):
    accumulator, left, right, offsets = tensors
    before = accumulator.clone()
    way(accumulator, left, right, offsets, scale, keep)
    dtype = rounds(way, left, accumulator)
    assert_are_products(accumulator, before, left, right, offsets, scale, keep, product_dtype=dtype)


@pytest.fixture
def threads():
    """Sets how many there are, until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.sweep
@pytest.mark.parametrize("way", ways())
@pytest.mark.parametrize("pair", GEMM_PAIRS, ids=PAIR_IDS)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("shape", [(5, 7), (1, 4), (4, 1), (1, 1), (0, 3), (3, 0), (37, 133)], ids=str)
def test_every_pair_shape_and_number(way, pair, counts, shape, generator):
    scales = (1.0, -0.3, torch.tensor(0.7), torch.tensor(0.7, dtype=F64), torch.tensor(0.5, dtype=BF16))
    keeps = (1.0, 0.0, 0.25, torch.tensor(0.25), torch.tensor(0.0))
    for scale, keep in (*zip(scales, keeps, strict=True), *zip(scales, reversed(keeps), strict=True)):
        run(way, groups(pair, shape, counts, generator), scale, keep)


@pytest.mark.sweep
@pytest.mark.parametrize("way", ways())
@pytest.mark.parametrize("pair", GEMM_PAIRS, ids=PAIR_IDS)
@pytest.mark.parametrize("sums", SUM_LAYOUTS)
@pytest.mark.parametrize("left", OPERAND_LAYOUTS)
@pytest.mark.parametrize("right", OPERAND_LAYOUTS)
def test_every_layout(way, pair, sums, left, right, generator):
    for shape in ((5, 7), (1, 6), (6, 1), (3, 4)):
        run(way, groups(pair, shape, (2, 0, 1, 6), generator, (sums, left, right)), 0.3, 0.5)


@pytest.mark.sweep
@pytest.mark.parametrize("way", ways())
@pytest.mark.parametrize("pair", GEMM_PAIRS, ids=PAIR_IDS)
@pytest.mark.parametrize(
    ("shape", "counts"),
    [((650, 1200), (1, 3, 0, 9)), ((300, 2100), (64, 0, 0)), ((1030, 64), (5, 200, 1, 0, 40))],
    ids=str,
)
@pytest.mark.parametrize("layout", ["rows", "long columns"])
def test_what_is_cut_up(way, pair, shape, counts, layout, generator, threads):
    threads(2)
    run(way, groups(pair, shape, counts, generator, (layout, "long rows", "rows")), 0.3, 0.5)
    run(way, groups(pair, shape, counts, generator, (layout, "rows", "columns")), 0.3, 0.0)


@pytest.mark.parametrize("way", ways())
@pytest.mark.parametrize("pair", GEMM_PAIRS, ids=PAIR_IDS)
@pytest.mark.parametrize("keep", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
def test_without_keeping_nothing_is_read(way, pair, keep, generator):
    for counts in COUNTS:
        accumulator, *others = groups(pair, (5, 7), counts, generator)
        accumulator.fill_(NAN)
        way(accumulator, *others, 0.5, keep)
        dtype = rounds(way, others[0], accumulator)
        assert_are_products(accumulator, torch.zeros_like(accumulator), *others, 0.5, product_dtype=dtype)


@pytest.mark.parametrize("way", ways())
def test_what_lies_between_the_sums_is_not_touched(way, generator):
    room = torch.full((3, 9, 12), NAN)
    accumulator = room[:, :6, :7].zero_()
    _, left, right, offsets = groups((F32, F32), (6, 7), (2, 0, 9), generator)
    way(accumulator, left, right, offsets, 1.0, 0.5)
    assert not accumulator.isnan().any()
    accumulator.fill_(NAN)
    assert room.isnan().all()


@pytest.mark.parametrize("way", ways())
@pytest.mark.parametrize("count", [1, 3, 8])
def test_infinities_and_nans_reach_their_sums_alone(way, count):
    left, right = torch.ones(2 * count, 2), torch.ones(2 * count, 9)
    left[0, 1], right[count, 8] = float("inf"), NAN
    accumulator = torch.zeros(2, 2, 9)
    way(accumulator, left, right, offsets_of((count, count)))
    expected = torch.full((2, 2, 9), float(count))
    expected[0, 1], expected[1, :, 8] = float("inf"), NAN
    torch.testing.assert_close(accumulator, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("way", ways())
@pytest.mark.parametrize("pair", GEMM_PAIRS, ids=PAIR_IDS)
def test_equal_bits_on_every_run_and_with_any_threads(way, pair, generator, threads):
    counts = (1, 3, 0, 17, 80, 2)
    accumulator, *others = groups(pair, (300, 260), counts, generator)
    results = []
    for number in (1, 2, 2):
        threads(number)
        results.append(accumulator.clone())
        way(results[-1], *others, 0.3, 0.5)
    assert all(torch.equal(result, results[0]) for result in results)


@native
@pytest.mark.parametrize("pair", GEMM_PAIRS, ids=PAIR_IDS)
def test_one_expert_is_the_product_of_one_layer(pair, generator):
    accumulator, left, right, offsets = groups(pair, (70, 90), (33,), generator)
    expected = accumulator[0].clone()
    torch.ops.fusedacc.gemm_accumulate_(expected, left[:33], right[:33], None, 0.3, None, 0.5)
    operator(accumulator, left, right, offsets, 0.3, 0.5)
    assert torch.equal(accumulator[0], expected)


@native
def test_the_backends_agree(generator):
    for pair in GEMM_PAIRS:
        accumulator, *others = groups(pair, (40, 50), (3, 0, 20, 1), generator)
        other = accumulator.clone()
        operator(accumulator, *others, 0.3, 0.5, thresholds=THRESHOLDS["rank-k"])
        grouped_accumulate_(other, *others, 0.3, 0.5, backend="eager")
        torch.testing.assert_close(accumulator, other)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pair", GEMM_PAIRS, ids=PAIR_IDS)
def test_autograd_records_nothing_and_sees_the_write(backend, pair, generator):
    accumulator, left, right, offsets = groups(pair, (5, 7), (2, 0, 1), generator)
    version = accumulator._version
    grouped_accumulate_(accumulator, left.requires_grad_(), right, offsets, 0.3, 0.5, backend=backend)
    assert not accumulator.requires_grad
    assert accumulator._version > version


@pytest.mark.parametrize("way", ways())
def test_autocast_changes_nothing(way, generator):
    with torch.autocast("cpu", BF16):
        for pair in GEMM_PAIRS:
            run(way, groups(pair, (5, 7), (2, 0, 9), generator), 0.3, 0.5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_inference_tensors(backend, generator):
    with torch.inference_mode():
        run(
            functools.partial(grouped_accumulate_, backend=backend),
            groups((BF16, F32), (5, 7), (2, 0), generator),
        )


# What is allocated and moved


@pytest.mark.sweep
@pytest.mark.parametrize("way", ways())
@pytest.mark.parametrize("pair", GEMM_PAIRS, ids=PAIR_IDS)
@pytest.mark.parametrize("layout", ["long rows", "columns"])
def test_nothing_as_large_as_the_sums_is_allocated(way, pair, layout):
    accumulator = lay_out_sums(torch.zeros(2, 2048, 1024, dtype=pair[1]), layout)
    left, right = torch.ones(6, 2048, dtype=pair[0]), torch.ones(6, 2048, dtype=pair[0])[:, ::2]
    call = functools.partial(way, accumulator, left, right, offsets_of((4, 2)))
    call()  # what is kept after a first call is not counted
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call(0.3, 0.5)
    events = profile.profiler.kineto_results.events()
    largest = max((event.nbytes() for event in events if event.name() == "[memory]"), default=0)
    assert largest <= matmul_eager.PART_ELEMENTS * dtypes.computation_dtype(accumulator.dtype).itemsize
    assert largest < accumulator.nbytes


@native
@pytest.mark.parametrize("pair", GEMM_PAIRS, ids=PAIR_IDS)
def test_bytes(pair, generator):
    accumulator, left, right, offsets = groups(pair, (64, 32), (5, 0, 2, 0), generator)
    operands = 7 * (64 + 32) * left.itemsize + offsets.nbytes
    half, whole = accumulator.nbytes // 2, accumulator.nbytes
    for keep, moved in ((1.0, 2 * half), (0.0, whole), (0.5, 2 * whole), (torch.tensor(0.0), whole)):
        scalar = keep.nbytes if isinstance(keep, torch.Tensor) else 0
        with TrafficMeter() as meter:
            grouped_accumulate_(accumulator, left, right, offsets, 0.5, keep)
        assert not meter.uncounted
        assert meter.total_bytes == operands + moved + scalar


# Selection


def test_selection_says_who_and_why(monkeypatch):
    assert grouped.select(CPU, F32, F32, "eager").reason == "chosen by backend='eager'"
    chosen = grouped.select(CPU, F32, F32)
    assert chosen.reason.startswith("first of cpu, eager that can run here")
    if library.load_error() is None:
        assert chosen.name == "cpu"
        assert chosen.how == "BLAS for each expert, loops of our own for up to 8 tokens"
        assert "FUSEDACC_TUNE=0 forbids trials" in chosen.reason
    monkeypatch.setenv("FUSEDACC_BACKEND", "eager")
    assert grouped.select(CPU, F32, F32).reason == "chosen by FUSEDACC_BACKEND='eager'"
    assert grouped.describe(CPU, F32, F32, "auto", {}) == (
        "eager",
        "torch's product for each expert; chosen by FUSEDACC_BACKEND='eager'",
    )


@native
@pytest.mark.parametrize("has", [True, False])
@pytest.mark.parametrize("pair", GEMM_PAIRS, ids=PAIR_IDS)
def test_without_trials_the_processor_says_whether_products_are_rounded(pair, has, monkeypatch):
    monkeypatch.setattr(grouped_ways, "multiplies_bfloat16", lambda: has)
    found = grouped_ways.thresholds(pair[1], pair[0])
    assert found.rank_k_tokens == 8
    assert found.rounded_tokens == (16 if has and pair[0] == BF16 else NEVER)


def answers_for(pair, few, rounded):
    """Answers by which those are the thresholds."""
    name = f"grouped products of {str(pair[0])[6:]} into {str(pair[1])[6:]}"
    found = []
    for tokens in grouped_ways.RANK_K_CLASSES:
        found += [f"{name}, {tokens} tokens each", "rank_k" if tokens <= few else "blas"]
    for tokens in grouped_ways.ROUNDED_CLASSES:
        found += [f"{name}, rounded with {tokens} tokens each", "rounded" if tokens >= rounded else "exact"]
    return found


@native
@pytest.mark.parametrize("pair", [(F32, F32), (BF16, F32), (BF16, BF16), (F16, F32)], ids=str)
@pytest.mark.parametrize("few", [0, 4, 16, 32])
@pytest.mark.parametrize("rounded", [16, 256, NEVER])
def test_answers_become_thresholds(pair, few, rounded):
    if pair[0] != BF16:
        rounded = NEVER
    kept = {}
    with answer(*answers_for(pair, few, rounded)):
        assert grouped.describe(CPU, pair[1], pair[0], "auto", {})[1].startswith("a trial will tell how")
        chosen = grouped.select(CPU, pair[1], pair[0], kept=kept)
        assert chosen.run.keywords == {"rank_k_tokens": few, "rounded_tokens": rounded}
        name, words = grouped.describe(CPU, pair[1], pair[0], "auto", kept)
    assert (name, words.partition("; ")[0]) == (chosen.name, chosen.how)
    assert (f"up to {few} tokens" in chosen.how) == (few > 0)
    assert (f"bfloat16 product from {rounded} on" in chosen.how) == (rounded != NEVER)
    with answer(*answers_for(pair, 8, NEVER)):  # another machine's answers are stayed with
        again = grouped.select(CPU, pair[1], pair[0], kept=kept)
    assert again.run.keywords == chosen.run.keywords


@native
@pytest.mark.parametrize("question", grouped_ways.questions(), ids=lambda question: question.name)
def test_what_a_trial_times_runs(question):
    assert question.fixed in question.ways
    for run in question.trial().values():
        run()


@native
def test_every_answer_is_followed(generator):
    """A product that is rounded differs in its bits; experts of few tokens are those of the operator's."""
    for few, rounded in ((0, NEVER), (16, NEVER), (4, 16)):
        accumulator, *others = groups((BF16, F32), (40, 50), (3, 40, 12), generator)
        expected = accumulator.clone()
        operator(expected, *others, 0.5, 0.25, thresholds=(few, rounded))
        with answer(*answers_for((BF16, F32), few, rounded)):
            grouped_accumulate_(accumulator, *others, 0.5, 0.25)
        assert torch.equal(accumulator, expected)
    assert matmul_ways.multiplies_bfloat16() in (True, False)


def test_refused_backends():
    tensors = torch.zeros(1, 2, 2), torch.ones(1, 2), torch.ones(1, 2), offsets_of((1,))
    says = "backend='cuda' cannot add grouped products of float32 into float32 on cpu"
    with pytest.raises(RuntimeError, match=says):
        grouped_accumulate_(*tensors, backend="cuda")
    with pytest.raises(ValueError, match="backend='fast' is no backend"):
        grouped_accumulate_(*tensors, backend="fast")
    assert tensors[0].eq(0).all()


# Errors


def make(*shape, dtype=F32):
    return torch.ones(*shape, dtype=dtype)


def ends(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


OWN = torch.ones(12)
#: What both backends refuse in the same words; accumulator, left, right and offsets.
REFUSED = [
    ((make(2, 2), make(1, 2), make(1, 2), ends(1)), "accumulator has 2 dimensions; it must have 3"),
    ((make(1, 2, 2), make(2), make(1, 2), ends(1)), "left has 1 dimensions; it must have 2"),
    ((make(1, 2, 2), make(1, 2), make(1, 2), ends(1).view(1, 1)), "offsets has 2 dimensions; it must have 1"),
    (
        (make(1, 2, 2), make(1, 3), make(1, 2), ends(1)),
        r"left has shape \[1, 3\] but accumulator has \[1, 2, 2\]",
    ),
    (
        (make(1, 2, 2), make(1, 2), make(1, 3), ends(1)),
        r"right has shape \[1, 3\] but accumulator has \[1, 2, 2\]",
    ),
    ((make(1, 2, 2), make(1, 2), make(2, 2), ends(1)), "right has 2 rows but left has 1"),
    (
        (make(1, 2, 2), make(1, 2), make(1, 2, dtype=BF16), ends(1)),
        "right has bfloat16 but left has float32",
    ),
    (
        (make(1, 2, 2), make(1, 2, dtype=F64), make(1, 2, dtype=F64), ends(1)),
        r"float64 (and accumulator|into) float32.*llowed",
    ),
    (
        (OWN[:4].view(1, 2, 2), OWN[2:4].view(1, 2), make(1, 2), ends(1)),
        "left overlaps accumulator in memory",
    ),
    (
        (OWN[:4].view(1, 2, 2), make(1, 2), OWN[2:4].view(1, 2), ends(1)),
        "right overlaps accumulator in memory",
    ),
    ((make(1, 2, 2).expand(2, 2, 2), make(1, 2), make(1, 2), ends(1, 1)), "accumulator overlaps itself"),
    (
        (OWN.as_strided((2, 2, 2), (3, 2, 1)), make(1, 2), make(1, 2), ends(1, 1)),
        "accumulator overlaps itself",
    ),
    (
        (make(1, 2, 2), make(1, 2), make(1, 2), ends(1, dtype=torch.int64)),
        "offsets has int64; it must be int32",
    ),
    ((make(1, 2, 2), make(1, 2), make(1, 2), ends(1, dtype=F32)), "offsets has float32; it must be int32"),
    ((make(2, 2, 2), make(1, 2), make(1, 2), ends(1)), "offsets has 1 elements; it must have 2"),
    ((make(2, 2, 2), make(1, 2), make(1, 2), ends(0, 2)), r"offsets\[1\] is 2; allowed: 0 to 1"),
    ((make(2, 2, 2), make(3, 2), make(3, 2), ends(2, 1)), r"offsets\[1\] is 1; allowed: 2 to 3"),
    ((make(2, 2, 2), make(3, 2), make(3, 2), ends(-1, 1)), r"offsets\[0\] is -1; allowed: 0 to 3"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("arguments", "says"), REFUSED, ids=[re.sub(r"\W+", " ", says) for _, says in REFUSED]
)
def test_bad_arguments_are_refused_before_anything_is_written(backend, arguments, says):
    before = arguments[0].clone()
    with pytest.raises(RuntimeError, match=says):
        grouped_accumulate_(*arguments, 0.5, 0.5, backend=backend)
    assert torch.equal(arguments[0], before)


@native
@pytest.mark.parametrize(
    ("numbers", "thresholds", "says"),
    [
        ((make(1), 1.0), (0, NEVER), "scale must be a number or a 0-dim tensor"),
        ((1.0, torch.tensor(1)), (0, NEVER), "keep is a tensor of a dtype"),
        ((1.0, 1.0), (-1, NEVER), "rank_k_tokens is -1; allowed: 0 to 64"),
        ((1.0, 1.0), (65, NEVER), "rank_k_tokens is 65; allowed: 0 to 64"),
    ],
)
def test_the_operator_checks_by_itself(numbers, thresholds, says):
    accumulator = torch.zeros(1, 2, 2)
    with pytest.raises(RuntimeError, match=says):
        operator(accumulator, make(1, 2), make(1, 2), ends(1), *numbers, thresholds=thresholds)
    with pytest.raises(RuntimeError, match=r"accumulator has strides \[8, 4, 2\]"):
        operator(make(1, 2, 4)[:, :, ::2], make(1, 2), make(1, 2), ends(1))
    assert accumulator.eq(0).all()


# In graphs


@native
@pytest.mark.parametrize("thresholds", THRESHOLDS.values(), ids=THRESHOLDS)
def test_opcheck(thresholds, generator):
    for pair in GEMM_PAIRS:
        tensors = groups(pair, (5, 7), (3, 0, 9), generator, ("columns", "rows", "gaps"))
        for part in tensors[1:3]:
            part.nan_to_num_()  # what is not read is compared too
        for numbers in ((None, 0.3, None, 0.0), (torch.tensor(0.3), 1.0, torch.tensor(0.5), 1.0)):
            arguments = *tensors, *numbers, *thresholds
            torch.library.opcheck(torch.ops.fusedacc.grouped_accumulate_.default, arguments)


@native
def test_fake_tensors_are_checked():
    with FakeTensorMode():
        grouped_accumulate_(make(2, 2, 3), make(4, 2), make(4, 3), ends(1, 4))
        with pytest.raises(RuntimeError, match="do not go into"):
            operator(make(2, 2, 3), make(4, 3), make(4, 3), ends(1, 4))
        with pytest.raises(RuntimeError, match="offsets must be int32"):
            operator(make(2, 2, 3), make(4, 2), make(4, 3), ends(1))


def test_layouts_are_what_they_say(generator):
    values = random_tensor((2, 3, 4), F32, generator)
    strides = {name: lay_out_sums(values, name).stride() for name in SUM_LAYOUTS}
    assert strides["rows"] == strides["misaligned"] == (12, 4, 1)
    assert strides["columns"] == (12, 1, 3)
    assert strides["rows of all experts"] == (4, 8, 1)
    assert all(torch.equal(lay_out_sums(values, name), values) for name in SUM_LAYOUTS)
